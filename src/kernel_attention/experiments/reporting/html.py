"""The page of a report: its pieces as plain data, and the templates that turn them into HTML.

A section is a list of pieces; a piece knows its template, ``templates/<piece>.html``. The templates escape
whatever they are given. The page needs no network and no scripts; its content security policy allows neither,
so that nothing that came into a run folder from a data set or a recipe can act when the report is opened.
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
    """A paragraph; ``muted`` for what stands in the second row."""

    template = "paragraph.html"
    text: str
    muted: bool = False


@dataclass(frozen=True)
class Result(Piece):
    """The headline figure, what it is, and what to compare it with."""

    template = "result.html"
    value: str
    said: str
    context: str = ""


@dataclass(frozen=True)
class Notice(Piece):
    """A framed remark, with a list under it where there are items."""

    template = "notice.html"
    text: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts(Piece):
    """Short facts beside one another, each under its name."""

    template = "facts.html"
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table(Piece):
    """A table whose first column names the row.

    Args:
        head: names of the columns; none leaves the head out.
        rows: as many cells as columns.
        caption: above the table.
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
    """A picture as data URI, the words for those who cannot see it, and the caption under it.

    ``wide``: of several panels; a narrow screen scrolls it instead of shrinking it past reading.
    """

    uri: str
    alt: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Pictures(Piece):
    """Figures with captions; ``pair`` lets two of them share a row."""

    template = "pictures.html"
    items: Sequence[Picture]
    pair: bool = False


@dataclass(frozen=True)
class Folded(Piece):
    """Pieces that open on demand."""

    template = "folded.html"
    label: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Code(Piece):
    """Text as it stands, in a fixed-width face; ``wrap`` breaks long lines, as of a command."""

    template = "code.html"
    text: str
    wrap: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page: the anchor, the heading and the content."""

    anchor: str
    title: str
    pieces: Sequence[Piece]


def page(title: str, lead: str, opening: Sequence[Piece], sections: Sequence[Section], footer: str) -> str:
    """The whole document; ``opening`` stands between the title and the table of contents."""
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
