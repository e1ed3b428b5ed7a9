"""How much there is to read: words of the pages, lines of the README, clicks from the home page.

    python tools/words.py                      # the files as they are
    python tools/words.py 4ea74c81 HEAD        # columns for commits

Words are what white space divides, in every page in Markdown of docs/, tables and code included; generated
tables are counted apart. Clicks are links to follow from the text of the home page, the navigation aside.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]+)?\)")
_GENERATED = re.compile(r"<!-- [\w -]+: begin \(make.*?<!-- [\w -]+: end -->", re.DOTALL)
TARGETS = {
    "install": "getting-started.md",
    "which mechanism": "mechanisms/index.md#which-one-for-your-data",
    "RPC's equation": "mechanisms/rpc.md#equations",
    "convert my model": "converting.md",
    "my own data": "your-own-data.md",
    "the record behind a number": "performance.md#primal-attention",
}


def pages_now() -> dict[str, str]:
    """README and the pages of docs/ by path, as the files are."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def pages_at(commit: str) -> dict[str, str]:
    """README and the pages of docs/ by path, as they are at a commit."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True)
        return run.stdout.decode()

    names = git("ls-tree", "-r", "--name-only", commit, "README.md", "docs").splitlines()
    return {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".md")}


def clicks(pages: Mapping[str, str], target: str) -> int | None:
    """Links to follow from ``docs/index.md`` to a page, or page#anchor, of docs/; None where no way leads."""
    seen, front = {"docs/index.md"}, ["docs/index.md"]
    for count in range(1, 10):
        reached = []
        for name in front:
            for path, anchor in _LINK.findall(pages[name]):
                place = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
                if place not in pages or not place.startswith("docs/"):
                    continue
                if f"docs/{target}" in (place, place + anchor):
                    return count
                if place not in seen:
                    seen.add(place)
                    reached.append(place)
        front = reached
    return None


def measure(pages: Mapping[str, str]) -> dict[str, int | None]:
    """The figures by name."""
    docs = [text for name, text in pages.items() if name.startswith("docs/")]
    generated = [block for text in docs for block in _GENERATED.findall(text)]
    words = sum(len(text.split()) for text in docs)
    return {
        "pages": len(docs),
        "words of docs": words,
        "of them generated": sum(len(block.split()) for block in generated),
        "lines of README": len(pages["README.md"].splitlines()),
        **{f"clicks to {name}": clicks(pages, target) for name, target in TARGETS.items()},
    }


def main() -> int:
    """Print the figures, a column for each commit."""
    commits = sys.argv[1:]
    if any(word.startswith("-") for word in commits):
        print(__doc__)
        return int(commits not in (["--help"], ["-h"]))
    columns = {commit: measure(pages_at(commit)) for commit in commits} or {"now": measure(pages_now())}
    print(f"{'':36}" + "".join(f"{name:>12}" for name in columns))
    for name in next(iter(columns.values())):
        values = ("-" if column[name] is None else f"{column[name]:,}" for column in columns.values())
        print(f"{name:36}" + "".join(f"{value:>12}" for value in values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
