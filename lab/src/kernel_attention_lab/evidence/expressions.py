"""Expressions and texts of a declaration: Jinja's, with the formats of numbers that the pages use.

An expression reads the fields of one observation (``1e3 * time.step.median``); its value is None where one of
them lacks. A text is a template of the same fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import ChainableUndefined, Environment, Template, Undefined
from jinja2.exceptions import UndefinedError

from kernel_attention_lab.reporting.formats import format_number, is_share, metric_name

Observation = dict[str, Any]
Observations = Sequence[Observation]

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def evaluate(expression: str, observation: Mapping[str, Any]) -> Any:
    """The value of an expression for an observation; None where it lacks a field."""
    if expression in observation:
        return observation[expression]
    try:
        return _compiled(expression)(observation)
    except (UndefinedError, TypeError):  # arithmetic with a field that is not there, or is None
        return None


def fill(text: str, fields: Mapping[str, Any]) -> str:
    """A template with these fields; "" where arithmetic in it lacks one."""
    if "{" not in text:
        return text
    try:
        return _template(text).render(fields)
    except (UndefinedError, TypeError):
        return ""


def grouped(observations: Observations, expression: str | Sequence[str]) -> dict[Any, list[Observation]]:
    """Observations by the value of an expression, or of several, in the order in which they appear."""
    keys = [expression] if isinstance(expression, str) else expression
    found: dict[Any, list[Observation]] = {}
    for each in observations:
        found.setdefault(tuple(str(evaluate(key, each)) for key in keys), []).append(each)
    return found


def show(value: Any, form: str) -> str:
    """A value in a named format (``FORMATS``) or in one of Python's; nothing for None.

    ``.1p`` is a share in per cent with one decimal, without the sign.
    """
    if value is None or isinstance(value, Undefined):
        return ""
    if form.endswith("p"):
        return format(100 * value, f"{form[:-1]}f")
    return str(FORMATS[form](value)) if form in FORMATS else format(value, form)


# --- formats ------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if value == 0:
        return "0"
    digits = 2 - len(str(int(abs(value)))) + 1 if abs(value) >= 1 else 3
    return f"{value:.{max(digits, 0)}f}"


def _ratio(value: float) -> str:
    """Two digits or more."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _digits(value: float) -> str:
    """Two digits, as far as they matter."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 1 - int(f'{max(value, 0.01):e}'.partition('e')[2]))}f}"


def _size(value: int) -> str:
    """Bytes in their largest unit; nothing for no state."""
    return next((f"{value / factor:.3g} {unit}" for factor, unit in _UNITS if value >= factor), "")


def _chance(value: float) -> str:
    """A p value with two digits."""
    return "< 0.0001" if value < 1e-4 else f"{value:.2g}" if value < 0.995 else "1"


def quartiles(figures: Mapping[str, float] | Undefined, divisor: float = 1.0) -> str:
    """A ratio's median with its quartiles; nothing where there is none."""
    if not isinstance(figures, Mapping) or "ratio_median" not in figures:
        return ""
    median, *bounds = (_ratio(figures[f"ratio_{key}"] / divisor) for key in ("median", "lower", "upper"))
    return f"{median} ({'–'.join(bounds)})"


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "three": number,
    "ratio": _ratio,
    "digits": _digits,
    "bytes": _size,
    "chance": _chance,
    "yes": lambda value: "yes" if value else "no",
    "quartiles": quartiles,
    "signed": lambda value: f"{value:+.2f}".replace("-", "−"),
    "points": lambda value: f"{value:+.1f}".replace("-", "−"),
    "long": lambda value: format_number(value, 3),
}


# --- what templates may call --------------------------------------------------------------------------------


def differing(observations: Observations, expression: str, joint: str = " and ") -> str:
    """Different values of an expression, sorted and joined."""
    found = {evaluate(expression, each) for each in observations}
    return joint.join(sorted(str(value) for value in found - {None, ""}))


def values(observations: Observations, expression: str) -> list[Any]:
    """Different values of an expression, in the order in which they appear."""
    return list(dict.fromkeys(evaluate(expression, each) for each in observations))


def span(observations: Observations, expression: str, form: str = ".0f") -> str:
    """The least and the largest value of an expression: ``29 to 1467``; one where they look alike."""
    found = [value for each in observations if (value := evaluate(expression, each)) is not None]
    ends = [show(end, form) for end in (min(found), max(found))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def machine_words(machine: Mapping[str, Any]) -> str:
    """Processor, software, date, code and how busy the machine was."""
    busy = [str(machine[key][0]) for key in ("load_before", "load_after") if machine.get(key)]
    load = f", load {' before and '.join(busy)} after" if busy else ""
    code = f", revision {machine['revision'][:7]}" if machine.get("revision") else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['instructions']}, torch "
        f"{machine['torch']}, {machine['date'][:10]}{code}{load}"
    )


def words(name: str) -> str:
    """``length 64, items 4`` for ``length_64_items_4``; ``pairs 4`` for ``pairs_4``."""
    return re.sub(r"(?<=\d)_(?=\D)", ", ", name).replace("_", " ")


def reached(course: Mapping[str, Any], limit: float, against: str = "training_seconds") -> float | None:
    """The best validation accuracy of a course within a time or a number of steps, None without one."""
    pairs = zip(course[against], course["val_accuracy"], strict=True)
    return max((accuracy for at, accuracy in pairs if at <= limit), default=None)


def best_so_far(course: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(minutes of training, best validation accuracy so far in per cent) after every evaluation."""
    return [(at / 60, 100 * (reached(course, at) or 0.0)) for at in course["training_seconds"]]


def iterations(name: str) -> int:
    """The products of attention in a layer of RPC, by its contender's name; 1 for other layers."""
    return int((re.findall(r"iterations (\d+)", name) or ["1"])[0])


def metric_title(metric: str) -> str:
    """The figure's name, with the unit of an accuracy."""
    return metric_name(metric) + (", %" if is_share(metric) else "")


def superscripts(cost: str) -> str:
    """N^2 p -> N² p; an exponent that is no number stays."""
    return re.sub(r"\^(\d+)", lambda power: power[1].translate(_SUPERSCRIPTS), cost)


def capitalize_first(text: str) -> str:
    """The text with a capital letter at its beginning; the others stay."""
    return text[:1].upper() + text[1:]


def like(figures: Mapping[str, Any], beginning: str) -> Any:
    """The first of the figures whose name begins so; None where there is none."""
    return next((figures[name] for name in sorted(figures) if name.startswith(beginning)), None)


def _environment() -> Environment:
    # Texts of the checkout's own files, for pages of Markdown: nothing to escape.
    made = Environment(undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True)
    functions = (
        show, quartiles, differing, values, span, machine_words, words, reached, best_so_far, iterations,
        metric_title, superscripts, capitalize_first, like,
    )  # fmt: skip
    made.filters |= {each.__name__: each for each in functions}
    made.globals |= {"max": max, "min": min, "len": len, "zip": zip, "round": round}
    return made


ENVIRONMENT = _environment()


@cache
def _compiled(expression: str) -> Callable[[Mapping[str, Any]], Any]:
    return ENVIRONMENT.compile_expression(str(expression), undefined_to_none=True)


@cache
def _template(text: str) -> Template:
    return ENVIRONMENT.from_string(text)
