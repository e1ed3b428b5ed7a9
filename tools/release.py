"""The version and the address of the project: each said once, and written wherever a file names it.

    python tools/release.py version 0.2.0   # before a release: both packages, the citation, the conda recipe
    python tools/release.py check v0.2.0    # all of them, and the change log, say that version
    python tools/release.py address https://github.com/OWNER/REPOSITORY [--tag v0.2.0]

The address is that of whoever hosts the project, and no file in git names it. The release workflow sets it
before it builds; a host that wants it in git too runs the command once and commits. It becomes
`[project.urls]` of both packages, the repository of the citation and of the site, the address in the install
lines, and the links by which notebooks open in Colab. With a tag the links of the packages' READMEs are made
absolute, as PyPI needs them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
# The places of the version: a file, and what stands before the version there.
VERSIONS = (
    ("src/kernel_attention/version.py", r'^__version__ = "'),
    ("lab/pyproject.toml", r'^version = "'),
    ("lab/pyproject.toml", r'"kernel-attention\[estimators\]=='),
    ("CITATION.cff", r"^version: "),
    ("conda.recipe/recipe.yaml", r'^  version: "'),
)
_URLS = "\n[project.urls]\n"
_COLAB = "https://colab.research.google.com/github/"


class ReleaseError(Exception):
    """A file that does not say what it must."""


def versions(root: Path) -> dict[str, str]:
    """The version in each of its places, by file and line's beginning."""
    found = {}
    for name, before in VERSIONS:
        match = re.search(f"({before})({_VERSION})", (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None:
            raise ReleaseError(f"{name}: no version after {before}")
        found[f"{name}: {match[1].strip()}"] = match[2]
    return found


def set_version(root: Path, version: str) -> None:
    """Write a version into all its places."""
    if not re.fullmatch(_VERSION, version):
        raise ReleaseError(f"version={version!r} must look like 0.2.0 or 0.2.0rc1")
    for name, before in VERSIONS:
        text = (root / name).read_text(encoding="utf-8")
        changed = re.sub(f"({before}){_VERSION}", rf"\g<1>{version}", text, flags=re.MULTILINE)
        (root / name).write_text(changed, encoding="utf-8")


def check_version(root: Path, tag: str) -> None:
    """Raise ReleaseError where a place of the version, or the change log, does not say that of the tag."""
    wrong = {place: found for place, found in versions(root).items() if f"v{found}" != tag}
    if wrong:
        raise ReleaseError(
            "\n".join(f"the tag is {tag}, {place} says {found}" for place, found in wrong.items())
        )
    if not re.search(
        rf"^## {re.escape(tag[1:])}\b", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        raise ReleaseError(f'CHANGELOG.md has no heading "## {tag[1:]}"')


def set_address(root: Path, address: str, tag: str | None = None) -> None:
    """Write the repository's address into every file that names it; a new one replaces an old one."""
    match = re.fullmatch(r"https://([\w.-]+)/([\w.-]+)/([\w.-]+?)/?", address)
    if match is None:
        raise ReleaseError(f"address={address!r} must look like https://github.com/OWNER/REPOSITORY")
    address = address.rstrip("/")
    host, owner, repository = match.groups()
    site = f"https://{owner}.github.io/{repository}/" if host == "github.com" else address
    urls = {
        "Repository": address,
        "Documentation": site,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/{tag or 'main'}/CHANGELOG.md",
    }
    table = _URLS + "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    for name in ("pyproject.toml", "lab/pyproject.toml"):
        _edit(
            root / name,
            r"\n\[project\.urls\]\n(?:\w+ = .*\n)+",
            r"\n\[project\.optional-dependencies\]\n",
            table,
        )
    _edit(root / "CITATION.cff", r"^repository-code: .*\n", r"^authors:\n", f"repository-code: {address}\n")
    _edit(root / "mkdocs.yml", r"^repo_url: .*\n", r"^theme:\n", f"repo_url: {address}\n\n", blank=True)
    _edit(
        root / "conda.recipe/recipe.yaml",
        r"^  repository: .*\n",
        r"^  license: ",
        f"  repository: {address}\n",
    )
    for name in ("README.md", "docs/getting-started.md"):
        text = (root / name).read_text(encoding="utf-8")
        text = re.sub(
            r"(git clone |git\+)(URL|https://\S+?)(?=[ '\"@#]|$)",
            rf"\g<1>{address}",
            text,
            flags=re.MULTILINE,
        )
        (root / name).write_text(text, encoding="utf-8")
    if host == "github.com":
        for path in sorted((root / "notebooks").glob("*.ipynb")):
            _set_colab(path, f"{_COLAB}{owner}/{repository}/blob/main/notebooks/{path.name}")
    if tag is not None:
        for name in ("README.md", "lab/README.md"):
            _make_absolute(root / name, root, address, tag)


def _edit(path: Path, old: str, before: str, new: str, blank: bool = False) -> None:
    """Take out what matches ``old`` and put ``new`` in front of ``before``."""
    text = re.sub(old + ("\n?" if blank else ""), "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    place = re.search(before, text, re.MULTILINE)
    if place is None:
        raise ReleaseError(f"{path.name}: no line {before}")
    path.write_text(text[: place.start()] + new + text[place.start() :], encoding="utf-8")


def _set_colab(path: Path, address: str) -> None:
    """The first cell of a notebook begins with a link that opens it in Colab."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    lines = [line for line in notebook["cells"][0]["source"] if _COLAB not in line]
    while lines and not lines[0].strip():
        lines.pop(0)
    notebook["cells"][0]["source"] = [f"[Open in Colab]({address})\n", "\n", *lines]
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _make_absolute(path: Path, root: Path, address: str, tag: str) -> None:
    """Relative links of a page lead to the repository at the tag, pictures to their bytes."""
    folder = path.parent.relative_to(root).as_posix()
    base = f"{address}/%s/{tag}/" + ("" if folder == "." else f"{folder}/")
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'(?<=src=")(?!\w+:)', base % "raw", text)
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", lambda found: found[1] + base % "raw", text)
    text = re.sub(r"((?<!!)\[[^\]]*\]\()(?![\w+]+:|#)", lambda found: found[1] + base % "blob", text)
    path.write_text(text, encoding="utf-8")


def main() -> int:
    """The command; 1 and a line where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version").add_argument("version")
    commands.add_parser("check").add_argument("tag")
    address = commands.add_parser("address")
    address.add_argument("address")
    address.add_argument("--tag")
    arguments = parser.parse_args()
    try:
        if arguments.command == "version":
            set_version(ROOT, arguments.version)
        elif arguments.command == "check":
            check_version(ROOT, arguments.tag)
        else:
            set_address(ROOT, arguments.address, arguments.tag)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
