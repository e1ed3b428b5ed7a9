"""Check the links of the built site without a network.

    python tools/links.py site

Every link within the site leads to a file, and to an anchor of it where it names one. Nothing that a page
loads comes from elsewhere.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}


class Page(HTMLParser):
    """The anchors of a page, and what it links to or loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, bool]] = []  # address, whether it is loaded
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Called by the parser for every tag."""
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif value and ((tag, name) in LOADED or (tag == "a" and name == "href")):
                self.links.append((value, tag != "a"))


def broken_links(site: Path) -> list[str]:
    """A line for every link that leads nowhere, and for every file that is loaded from elsewhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site}: no pages"]
    found = []
    for path, page in pages.items():
        for link, is_loaded in page.links:
            complaint = _complaint(link, is_loaded, path, site.resolve(), pages)
            if complaint:
                found.append(f"{path.relative_to(site.resolve())}: {link}: {complaint}")
    return found


def _complaint(link: str, is_loaded: bool, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        is_outside = is_loaded and parts.scheme != "data"
        return "loaded from elsewhere" if is_outside else None
    target = path
    if parts.path:
        place = unquote(parts.path)
        target = (site / place[1:] if place.startswith("/") else path.parent / place).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "no such anchor"
    return None


def main() -> int:
    """Print what is broken; the exit code is 1 where something is."""
    if len(sys.argv) != 2:
        print("usage: python tools/links.py SITE", file=sys.stderr)
        return 2
    found = broken_links(Path(sys.argv[1]))
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
