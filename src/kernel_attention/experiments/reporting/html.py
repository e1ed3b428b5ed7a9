"""The pieces of a self-contained page: every function takes plain text and returns escaped HTML.

The page needs no network and no scripts; its content security policy allows neither, so that nothing that
came into a run folder from a data set or a recipe can act when the report is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple


class Section(NamedTuple):
    """A part of the page: the anchor, the heading and the (already escaped) content."""

    anchor: str
    title: str
    body: str


class Picture(NamedTuple):
    """A picture as data URI, the words for those who cannot see it, and the caption under it."""

    uri: str
    alt: str
    caption: str


STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --muted: #57606a; --rule: #d8dee4; --soft: #f6f8fa;
  --accent: #00598f; }
* { box-sizing: border-box; }
html { background: #fff; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.5rem 4rem; background: #fff; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 .75rem; }
p { margin: 0 0 .75rem; max-width: 46rem; }
a { color: var(--accent); }
.muted { color: var(--muted); }
nav { border-top: 1px solid var(--rule); border-bottom: 1px solid var(--rule); margin: 1.5rem 0 0;
  padding: .5rem 0; }
nav a { display: inline-block; margin-right: 1.1rem; text-decoration: none; font-size: .92rem; }
nav a:hover, nav a:focus { text-decoration: underline; }
section { margin-top: 2.5rem; }
.result { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; align-items: center; margin-top: 1.5rem;
  padding: 1.25rem 1.5rem; border: 1px solid var(--rule); border-left: 5px solid var(--accent);
  border-radius: 6px; }
.result p { margin: 0; }
.result .value { font-size: 2.6rem; font-weight: 650; line-height: 1.15;
  font-variant-numeric: tabular-nums; }
.result .meaning { flex: 1 1 22rem; }
.facts { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1.25rem 0 0; }
.facts dt { color: var(--muted); font-size: .85rem; }
.facts dd { margin: 0; font-weight: 550; overflow-wrap: anywhere; }
.notice { border: 1px solid #9a6700; border-left-width: 5px; background: #fff8e6; border-radius: 6px;
  padding: .75rem 1.25rem; margin-top: 1rem; }
.notice p:last-child, .notice ul { margin: 0; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.25rem 1.5rem; align-items: flex-start; }
figure { margin: 0 0 1rem; flex: 0 1 auto; max-width: 100%; }
.pair figure { flex: 1 1 26rem; max-width: 33rem; }
figure img { display: block; max-width: 100%; height: auto; }
.pair figure img { width: 100%; }
figcaption { color: var(--muted); font-size: .9rem; max-width: 46rem; margin-top: .35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; margin: 0 0 1rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding-bottom: .35rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.25rem .3rem 0;
  border-bottom: 1px solid var(--rule); }
td { overflow-wrap: anywhere; }
thead th { color: var(--muted); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 550; white-space: nowrap; }
.numbers td, .numbers thead th + th { text-align: right; }
pre { background: var(--soft); border: 1px solid var(--rule); border-radius: 6px; padding: .75rem 1rem;
  margin: 0 0 1rem;
  overflow-x: auto;
  font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin: 0 0 1rem; }
summary { cursor: pointer; color: var(--accent); font-size: .92rem; margin-bottom: .5rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--rule); padding-top: .75rem; color: var(--muted);
  font-size: .88rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  nav { display: none; }
  section { margin-top: 1.4rem; }
  figure, tr, .result, .notice { break-inside: avoid; }
  h2 { break-after: avoid; }
  pre { white-space: pre-wrap; }
  .scroll { overflow: visible; }
}
"""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, lead: str, opening: str, sections: Sequence[Section], footer: str) -> str:
    """The whole document; ``opening`` stands between the title and the table of contents."""
    links = "\n".join(f'<a href="#{escape(part.anchor)}">{escape(part.title)}</a>' for part in sections)
    bodies = "\n".join(
        f'<section id="{escape(part.anchor)}">\n<h2>{escape(part.title)}</h2>\n{part.body}\n</section>'
        for part in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="muted">{escape(lead)}</p>
{opening}
</header>
<nav aria-label="Contents">
{links}
</nav>
<main>
{bodies}
</main>
<footer>{escape(footer)}</footer>
</body>
</html>
"""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph, of a CSS class where one is given."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Short facts beside one another, each under its name."""
    inner = "\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">\n{inner}\n</dl>'


def notice(text: str, items: Sequence[str] = ()) -> str:
    """A framed remark, with a list under it where there are items."""
    listed = "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""
    return f'<div class="notice" role="note"><p>{escape(text)}</p>{listed}</div>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", numbers: bool = False
) -> str:
    """A table whose first column names the row; ``numbers`` aligns the other columns to the right."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>\n" if caption else ""
    heading = f"<thead><tr>{top}</tr></thead>\n" if head else ""
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="scroll"><table{kind}>\n{title}{heading}<tbody>\n{body}\n</tbody>\n</table></div>'


def key_values(values: Mapping[str, str], caption: str = "") -> str:
    """A table of two columns: name and value."""
    return table((), list(values.items()), caption)


def pictures(items: Sequence[Picture], pair: bool = False) -> str:
    """Figures with captions; ``pair`` lets two of them share a row."""
    inner = "\n".join(
        f'<figure><img src="{escape(item.uri)}" alt="{escape(item.alt)}">'
        f"<figcaption>{escape(item.caption)}</figcaption></figure>"
        for item in items
    )
    return f'<div class="pictures{" pair" if pair else ""}">\n{inner}\n</div>'


def folded(label: str, body: str) -> str:
    """Content that opens on demand."""
    return f"<details><summary>{escape(label)}</summary>\n{body}\n</details>"


def code(text: str) -> str:
    """Text as it stands, in a fixed-width face."""
    return f"<pre><code>{escape(text.rstrip())}</code></pre>"
