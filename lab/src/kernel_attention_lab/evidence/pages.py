"""Write the tables and figures of the documentation that follow from records and from the registry.

    python -m kernel_attention_lab.evidence.pages            # write the files
    python -m kernel_attention_lab.evidence.pages --check    # name those that are not what they should be

A file of docs/tables declares the regions of a page, which stand there between marks. A region has a
``mark``, a ``source`` (``observations``), a ``table`` (``tables``), a ``figure`` (``plots``) and a ``text``,
a template in which these two stand; ``data`` writes named fields of the observations to a file of JSON, and
``empty`` says what stands there without an observation. The ``parts``
of a region follow one another. ``let`` gives every observation a field that follows from ``all`` of them,
``with`` names the observations of further sources for the text. ``per`` repeats a part for every value of an
expression, and ``for`` a region or a part for every mapping in a list, with its entries in place of
``$name``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_attention_lab.evidence import findings, suite_page
from kernel_attention_lab.evidence.expressions import ENVIRONMENT, Observation, evaluate, fill, grouped
from kernel_attention_lab.evidence.observations import Evidence
from kernel_attention_lab.evidence.plots import draw_figure
from kernel_attention_lab.evidence.tables import draw_table, markdown, statistic
from kernel_attention_lab.plain_yaml import read_yaml
from kernel_attention_lab.reporting import html

DECLARATIONS = Path("docs/tables")
NOT_YET = "Not measured yet."

Declaration = Mapping[str, Any]
Texts = dict[Path, str]


def generated_texts(root: Path, kind: str | None = None) -> Texts:
    """The text of every page and figure that is declared below ``root``, by its path.

    Args:
        root: the checkout.
        kind: that of the sources whose regions are drawn; None: all.
    """
    evidence, found = Evidence(root), Texts()
    for declared in declarations(root):
        if kind is not None and kind not in declared.get("source", {}):
            continue
        path = Path(declared["page"])
        text = found.get(path) or (root / path).read_text(encoding="utf-8")
        lines, figures = region(declared, evidence)
        found |= {path: between_marks(text, declared["mark"], lines), **figures}
    return found


def declarations(root: Path) -> Iterator[Declaration]:
    """The regions of all pages, ``for`` every mapping of a list where they have one."""
    for path in sorted((root / DECLARATIONS).glob("*.yaml")):
        content = read_yaml(path)
        for declared in content["regions"]:
            yield from _repeated({"page": content["page"]} | declared)


def region(declared: Declaration, evidence: Evidence) -> tuple[list[str], Texts]:
    """The lines of a region and the files of its figures."""
    texts, figures = [], Texts()
    for part in declared.get("parts", [declared]):
        for each in _repeated(part):
            drawn = list(_part(each, evidence, Path(declared["page"])))
            for text, files in drawn:
                texts.append(text)
                figures |= files
    return ["", *"\n\n".join(text for text in texts if text).split("\n"), ""], figures


def _part(part: Declaration, evidence: Evidence, where: Path) -> Iterator[tuple[str, Texts]]:
    """The text of a part, or its texts ``per`` value of an expression."""
    observations = _observations(part, evidence)
    more = {name: evidence.observations(source) for name, source in part.get("with", {}).items()}
    for name, expression in part.get("let", {}).items():
        value = evaluate(expression, {"all": observations})
        observations = [each | {name: value} for each in observations]
    groups = grouped(observations, part["per"]).values() if "per" in part else [observations]
    if not observations:
        yield part.get("empty", NOT_YET), {}
        return
    for group in groups:
        fields = {**group[0], "all": group, **more}
        files: Texts = {}
        if spec := part.get("figure"):
            path = Path(fill(spec["file"], fields))
            if svg := draw_figure(spec, group):
                files[path] = svg
                fields["figure"] = f"![{spec['alt']}]({_relative(path, where)})"
        if spec := part.get("table"):
            fields["table"] = "\n".join(draw_table(spec, group))
        if data := part.get("data"):
            chosen = ({name: each[name] for name in data["fields"]} for each in group)
            lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in chosen)
            files[Path(data["file"])] = f"[\n{lines}\n]\n"
        text = part.get("text", "{{ table }}")
        yield ENVIRONMENT.from_string(text).render(fields).strip("\n"), files


def _observations(part: Declaration, evidence: Evidence) -> list[Observation]:
    """Those of the ``source``, or of the ``sources``; one with fields of its own has one at least."""
    if "sources" not in part:
        return evidence.observations(part["source"])
    return [
        each
        for source in part["sources"]
        for each in evidence.observations(source)
        or ([{"row": None, **source["with"]}] if "with" in source else [])
    ]


def _relative(path: Path, where: Path) -> str:
    above = len(where.parent.relative_to("docs").parts)
    return "../" * above + path.relative_to("docs").as_posix()


def _repeated(declared: Declaration) -> Iterator[Declaration]:
    if "for" not in declared:
        yield declared
        return
    rest = {key: value for key, value in declared.items() if key != "for"}
    for values in declared["for"]:
        yield _filled(rest, values)


def _filled(content: Any, values: Mapping[str, Any]) -> Any:
    """The content with the values in place of ``$name``; a string that is nothing else becomes the value."""
    if isinstance(content, Mapping):
        return {_filled(key, values): _filled(each, values) for key, each in content.items()}
    if isinstance(content, list):
        return [_filled(each, values) for each in content]
    if not isinstance(content, str):
        return content
    if content.startswith("$") and content[1:] in values:
        return values[content[1:]]
    return re.sub(r"\$\{?(\w+)\}?", lambda name: str(values.get(name[1], name[0])), content)


# --- files --------------------------------------------------------------------------------------------------


def between_marks(text: str, mark: str, lines: Iterable[str]) -> str:
    """The text with these lines between its marks, which stay."""
    begin, end = (rf"^[^\n]*\b{mark}: {word}\b[^\n]*\n" for word in ("begin", "end"))
    found = re.search(rf"({begin})(.*?)({end})", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"no lines with '{mark}: begin' and '{mark}: end'")
    return text[: found.end(1)] + "".join(f"{line}\n" for line in lines) + text[found.start(3) :]


def settle(root: Path, texts: Mapping[Path, str], arguments: Sequence[str], complaint: str) -> int:
    """Name the files that are not what they should be, and write them unless they are only checked.

    Args:
        root: the folder of the files.
        texts: what the files should be, by path below the root.
        arguments: of the command line; with ``--check`` nothing is written.
        complaint: what is printed before the name of a file that is checked.

    Returns:
        The exit code.
    """
    stale = {
        path: text
        for path, text in texts.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    }
    if "--check" in arguments:
        for path in stale:
            print(f"{complaint}: {path}")
        return int(bool(stale))
    for path, text in stale.items():
        (root / path).write_text(text, encoding="utf-8")
        print(f"written: {path}")
    return 0


def html_table(piece: html.Table) -> str:
    """A table of a suite's page as Markdown, with its caption above it."""
    caption = [f"{piece.caption}.", ""] if piece.caption else []
    rows = ([cell.replace("|", "\\|") for cell in row] for row in piece.rows)
    return "\n".join([*caption, *markdown(piece.head, rows)])


def _measured_tables(found: findings.Findings) -> list[str]:
    """The tables of figures, without the rows that nothing was measured of."""
    known = {(line.column, line.row) for lines in found.lines.values() for line in lines if line.measured}
    pieces = suite_page.figure_tables(found)
    rows = [[row for row in piece.rows if (row[0], row[1]) in known] for piece in pieces]
    return [html_table(html.Table(piece.head, kept, piece.caption))
            for piece, kept in zip(pieces, rows, strict=True)]  # fmt: skip


ENVIRONMENT.filters["statistic"] = statistic
ENVIRONMENT.globals |= {
    "facts": lambda found: dict(suite_page.facts(found)),
    "finding_lines": suite_page.finding_lines,
    "missing_lines": suite_page.missing_lines,
    "measured_tables": _measured_tables,
    "comparison_tables": lambda found: [html_table(each) for each in suite_page.comparison_tables(found)],
    "record_table": lambda found: html_table(suite_page.record_table(found)),
    "column_sentence": findings.column_sentence,
    "column_verdict": findings.column_verdict,
}


def write_pages(arguments: Sequence[str]) -> int:
    """Write the files, or check them; the exit code."""
    root = Path.cwd()
    return settle(
        root, generated_texts(root), arguments, "not what is declared in docs/tables (make results)"
    )


if __name__ == "__main__":
    sys.exit(write_pages(sys.argv[1:]))
