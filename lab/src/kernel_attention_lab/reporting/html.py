"""The page of a report: its pieces as plain data, and the templates that turn them into HTML.

A section is a list of pieces. Each piece names its macro in ``templates/pieces.html``. The templates escape
all text. The page needs no network, and its content security policy allows none. The one script is that of
the viewer of maps: the policy of a page with a viewer names its hash, and that of another page allows no
script. So no text in a run folder, from a data set or a recipe, can execute when the report is opened.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernel_attention_lab.reporting.formats import format_number

if TYPE_CHECKING:
    from jinja2 import Environment


class Piece:
    """A part of a section, which the macro of this name in ``pieces.html`` turns into HTML."""

    macro: ClassVar[str]


@dataclass(frozen=True)
class Paragraph(Piece):
    """A paragraph; ``muted`` for secondary text."""

    macro = "paragraph"
    text: str
    muted: bool = False


@dataclass(frozen=True)
class Result(Piece):
    """The headline figure, its meaning, and figures to compare it with."""

    macro = "result"
    value: str
    said: str
    context: str = ""


@dataclass(frozen=True)
class Notice(Piece):
    """A framed remark, with a list of items below it."""

    macro = "notice"
    text: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts(Piece):
    """Short facts in a row, each below its name."""

    macro = "facts"
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table(Piece):
    """A table whose first column names the row.

    Args:
        head: names of the columns; empty for a table without a head.
        rows: one cell per column.
        caption: the text above the table.
        numbers: align all columns but the first to the right.
        total: whether the last row sums the others up.
    """

    macro = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numbers: bool = False
    total: bool = False


@dataclass(frozen=True)
class Picture:
    """A picture as a data URI, its alternative text, and its caption.

    ``wide`` is for pictures of several panels: a narrow screen scrolls them instead of shrinking them.
    """

    uri: str
    alt: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Pictures(Piece):
    """Pictures with captions; ``pair`` puts two of them in a row."""

    macro = "pictures"
    items: Sequence[Picture]
    pair: bool = False


@dataclass(frozen=True)
class ZoomableMap:
    """A map as a palette image with one pixel a cell.

    Args:
        uri: the image; its colours are those of the viewer's scale.
        title: the entry in the list of maps.
        row: the word for what has a row each.
        column: the word for what has a column each.
        low: the value of the scale's first colour.
        high: the value of its last colour.
        shape: the numbers of rows and columns of the map itself.
        block: a cell is the mean of ``block`` x ``block`` values of it; the last ones of fewer.
    """

    uri: str
    title: str
    row: str
    column: str
    low: float
    high: float
    shape: tuple[int, int]
    block: int = 1

    @property
    def alt(self) -> str:
        """The alternative text."""
        ends = f"from {format_number(self.low)} to {format_number(self.high)}"
        return f"{self.title}: a row per {self.row}, a column per {self.column}, {ends}."


@dataclass(frozen=True)
class MapViewer(Piece):
    """Maps to choose from, to zoom, and to read cell by cell. Without scripts it stays hidden.

    Args:
        items: the maps.
        scale: an image of all colours, from the lowest value to the highest, one pixel each.
    """

    macro = "viewer"
    items: Sequence[ZoomableMap]
    scale: str


@dataclass(frozen=True)
class Folded(Piece):
    """Pieces that the reader can unfold."""

    macro = "folded"
    label: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Code(Piece):
    """Unchanged text in a fixed-width font; ``wrap`` breaks long lines between words, for commands."""

    macro = "code"
    text: str
    wrap: bool = False


@dataclass(frozen=True)
class Section:
    """A section of the page: anchor, heading and content."""

    anchor: str
    title: str
    pieces: Sequence[Piece]


def page(title: str, lead: str, opening: Sequence[Piece], sections: Sequence[Section], footer: str) -> str:
    """The whole document; ``opening`` comes between the title and the table of contents."""
    environment = _environment()
    everything = [*opening, *(piece for section in sections for piece in section.pieces)]
    script = digest = None
    if _have_viewer(everything):
        assert environment.loader is not None
        script = environment.loader.get_source(environment, "viewer.js")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return environment.get_template("page.html").render(
        title=title,
        lead=lead,
        opening=opening,
        sections=sections,
        footer=footer,
        script=script,
        script_hash=digest,
    )


def _have_viewer(pieces: Sequence[Piece]) -> bool:
    return any(
        isinstance(piece, MapViewer) or (isinstance(piece, Folded) and _have_viewer(piece.pieces))
        for piece in pieces
    )


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # a part of the extra `train`

    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
