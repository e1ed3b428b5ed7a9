"""The page of a report: its pieces as plain data, and the templates that turn them into HTML.

A section is a list of pieces. Each piece names its template, ``templates/<piece>.html``. The templates escape
all text. The page needs no network and no scripts, and its content security policy allows neither. So no text
in a run folder, from a data set or a recipe, can execute when the report is opened.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from jinja2 import Environment


class Piece:
    """A part of a section."""

    template: ClassVar[str]


@dataclass(frozen=True)
class Paragraph(Piece):
    """A paragraph; ``muted`` for secondary text."""

    template = "paragraph.html"
    text: str
    muted: bool = False


@dataclass(frozen=True)
class Result(Piece):
    """The headline figure, its meaning, and figures to compare it with."""

    template = "result.html"
    value: str
    said: str
    context: str = ""


@dataclass(frozen=True)
class Notice(Piece):
    """A framed remark, with a list of items below it."""

    template = "notice.html"
    text: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts(Piece):
    """Short facts in a row, each below its name."""

    template = "facts.html"
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

    template = "table.html"
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

    template = "pictures.html"
    items: Sequence[Picture]
    pair: bool = False


@dataclass(frozen=True)
class Folded(Piece):
    """Pieces that the reader can unfold."""

    template = "folded.html"
    label: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Code(Piece):
    """Unchanged text in a fixed-width font; ``wrap`` breaks long lines between words, for commands."""

    template = "code.html"
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
    template = _environment().get_template("page.html")
    return template.render(title=title, lead=lead, opening=opening, sections=sections, footer=footer)


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
