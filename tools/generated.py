"""What the generators of this folder share: regions of pages, tables, and writing or checking files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
NOTHING = ["", "Not measured yet.", ""]  # the lines of a region without records


def between_marks(text: str, mark: str, lines: Iterable[str]) -> str:
    """The text with these lines between its marks, which stay."""
    begin, end = (rf"^[^\n]*\b{mark}: {word}\b[^\n]*\n" for word in ("begin", "end"))
    found = re.search(rf"({begin})(.*?)({end})", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"no lines with '{mark}: begin' and '{mark}: end'")
    return text[: found.end(1)] + "".join(f"{line}\n" for line in lines) + text[found.start(3) :]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown's table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["|" + "|".join(cell if cell == "---" else f" {cell} " for cell in line) + "|" for line in lines]


def svg_text(figure: Figure) -> str:
    """A figure as SVG that is the same every time."""
    from kernel_attention_lab.reporting.figures import report_style

    buffer = io.StringIO()
    with report_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def settle(texts: Mapping[Path, str], arguments: Sequence[str], complaint: str) -> int:
    """Name the files that are not what they should be, and write them unless they are only checked.

    Args:
        texts: what the files should be, by path below the root.
        arguments: of the command line; with ``--check`` nothing is written.
        complaint: what is printed before the name of a file that is checked.

    Returns:
        The exit code.
    """
    stale = {
        path: text
        for path, text in texts.items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text
    }
    if "--check" in arguments:
        for path in stale:
            print(f"{complaint}: {path}")
        return int(bool(stale))
    for path, text in stale.items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"written: {path}")
    return 0
