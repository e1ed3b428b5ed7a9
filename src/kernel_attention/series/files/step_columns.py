"""Names of columns as steps of channels: which columns of a wide table are the series, and their order.

A name is read in every way that it can be: a number, a date or a time of day, alone or after the name of a
channel; a lag. Where the readings of all names give different series, the table is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from kernel_attention.errors import InputError
from kernel_attention.series.files.order_keys import DATES, as_clock, as_number
from kernel_attention.series.files.tables import listed

_ADVICE = (
    "name the channels with channel_columns (the part of the names before the steps), or rename the columns "
    "(x_0, x_1, ..., or ISO dates)"
)


class _Step(NamedTuple):
    channel: str
    key: Any


_Read = Callable[[str, str | None], _Step | None]
"""Reads a name as a step; the channel is given, or found by the reader."""


def channel_steps(names: Sequence[str], channels: Sequence[str], source: str) -> dict[str, list[str]]:
    """The columns of every channel of a wide table, in the order of their steps.

    Args:
        names: the names of the columns that may be steps.
        channels: the names before the steps; empty to find them.
        source: the file, for messages.

    Returns:
        {name of a channel: its columns}; the name is "" where columns are named by their steps alone.

    Raises:
        InputError: for names that are no steps, that can be read in several ways, or that do not give all
            channels the same steps.
    """
    if not channels:
        if not names:
            raise InputError(f"{source}: no column is left for the steps of a case")
        found = _settle(_whole(names) or _parted(names, None), names, source)
        _check_channels(found, source)
    else:
        found = {name: _steps_of(name, names, source) for name in channels}
    _check_equal(found, source)
    keys = sorted(next(iter(found.values())))
    return {channel: [steps[key] for key in keys] for channel, steps in found.items()}


def is_step(name: str) -> bool:
    """Return whether a name is a number, a date or a time and nothing else."""
    return any(read(name, None) for read in _WHOLE)


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else f"{name[:60]}...")


class _Reading(NamedTuple):
    """Names as steps of channels. ``twice``: two names of one step."""

    steps: dict[str, dict[Any, str]]
    twice: tuple[str, str] | None
    is_clock: bool

    @property
    def columns(self) -> list[list[str]]:
        return [[steps[key] for key in sorted(steps)] for steps in self.steps.values()]


def _settle(readings: list[_Reading], names: Sequence[str], source: str) -> dict[str, dict[Any, str]]:
    """The one arrangement that all readings give."""
    if not readings:
        raise _no_step(names, source)
    possible = [reading for reading in readings if reading.twice is None]
    if not possible:
        one, other = readings[0].twice or ("", "")
        raise InputError(f"{source}: columns {_shown(one)} and {_shown(other)} have the same number or time")
    first, *others = (reading.columns for reading in possible)
    for other_columns in others:
        if other_columns != first:
            raise InputError(
                f"{source}: columns such as {_shown(names[0])} and {_shown(names[-1])} can be read as steps "
                f"in several ways; {_ADVICE}"
            )
    if possible[0].is_clock and any(map(_passes_midnight, first, [names] * len(first))):
        raise InputError(
            f"{source}: the times of day {names[0]!r} to {names[-1]!r} go past midnight, or are not in their "
            "order; name the columns by numbers (x_0, x_1, ...) or with dates"
        )
    return possible[0].steps


def _passes_midnight(columns: list[str], names: Sequence[str]) -> bool:
    """Return whether the columns stand as a clock shows them from some hour on to the next day."""
    rank = {name: index for index, name in enumerate(columns)}
    ranks = [rank[name] for name in names if name in rank]
    falls = sum(after < before for before, after in itertools.pairwise(ranks))
    return falls == 1 and ranks[-1] < ranks[0]


def _steps_of(channel: str, names: Sequence[str], source: str) -> dict[Any, str]:
    """The columns of a channel whose name is given, by their steps; names that are no steps do not count."""
    readers = (_READ_LAG, *_PARTED, _signed, _dashed)
    chosen = [
        name
        for name in names
        if name.startswith(channel) and any(read(name, channel) is not None for read in readers)
    ]
    if all(name == channel for name in chosen):
        known = list(dict.fromkeys(step.channel for name in names if (step := _whole_number(name, None))))
        raise InputError(
            f"{source}: no column is named {channel!r} with a number after it, a date or a time (numbered "
            f"columns: {listed([_shown(name) for name in known]) or 'none'})"
        )
    return _settle(_parted(chosen, channel), chosen, source)[channel]


def _check_channels(found: dict[str, Any], source: str) -> None:
    """InputError for found channels that look like parts of dates, or like steps that count backwards."""
    names = list(found)
    backward = next((name for name in names if _MAYBE_BACKWARD.search(name)), None)
    if backward is not None:
        raise InputError(
            f"{source}: the numbers after {backward!r} may count backwards; name the columns by lags "
            f"(x_lag2, x_lag1, x), or name {backward!r} with channel_columns if its numbers count forwards"
        )
    are_years = all(1900 <= key <= 2100 for key in found[names[0]] if isinstance(key, Decimal))
    parts = [_CALENDAR.fullmatch(name) or (_YEARLY.fullmatch(name) if are_years else None) for name in names]
    if None not in parts and len({part["head"] for part in parts if part}) < len(names):
        raise InputError(f"{source}: channels {names[0]!r}, {names[1]!r} look like parts of dates; {_ADVICE}")


def _check_equal(found: dict[str, dict[Any, str]], source: str) -> None:
    first, *others = found
    for other in others:
        if found[other].keys() != found[first].keys():
            raise InputError(
                f"{source}: channel {_shown(first)} has {len(found[first])} numbered columns, channel "
                f"{_shown(other)} {len(found[other])} or other numbers; name the channels with "
                "channel_columns"
            )


def _no_step(names: Sequence[str], source: str) -> InputError:
    readers = (*_WHOLE, *_PARTED, _dashed)
    name = next((name for name in names if not any(read(name, None) for read in readers)), names[0])
    return InputError(
        f"{source}: column {_shown(name)} has no number at its end, as the steps of a case have, or one that "
        "can be read in several ways; name it with case_column or target_column, or name those that count "
        "with channel_columns. Is a row a step? Then give layout: long, case_column and time_column "
        "(--layout long --case_column NAME --time_column NAME)"
    )


def _whole(names: Sequence[str]) -> list[_Reading]:
    """The readings of names that are steps and nothing else; empty where one of them is not."""
    return list(_readings(names, None, _WHOLE))


def _parted(names: Sequence[str], channel: str | None) -> list[_Reading]:
    """The readings of names that are a channel and a step."""
    if any(_LAG.fullmatch(name) or _IN_BRACKETS.fullmatch(name) for name in names):
        return list(_readings(names, channel, (_READ_LAG,)))
    # A sign may be a hyphen, so it counts only where nothing else can be read.
    plain = list(_readings([name for name in names if name != channel], channel, _PARTED))
    return plain or list(_readings(names, channel, (_signed, _dashed)))


def _readings(names: Sequence[str], channel: str | None, readers: Iterable[_Read]) -> Iterator[_Reading]:
    for read in readers:
        steps: dict[str, dict[Any, str]] = {}
        twice = None
        bare = []
        for name in names:
            step = read(name, channel)
            if step is None:
                break
            if step.channel == name:
                bare.append(name)
            column = steps.setdefault(step.channel, {}).setdefault(step.key, name)
            if column != name:
                twice = twice or (column, name)
        else:
            # A name without a step is step 0 of a channel whose other steps are lags.
            if all(any(_LAGGED.search(other) for other in steps[name].values()) for name in bare):
                yield _Reading(steps, twice, read in (_clock, _whole_clock))


_INTEGER = r"[_. ]?(?P<step>\d+)"
_DECIMAL = r"[_ ]?(?P<step>(?:(?:(?<=[_ ])[+-])?(?:\d+\.?\d*|\.\d+)|[+-]\d*\.\d+)(?:[eE][+-]?\d+)?)"
_SIGNED = r"[_ ]?(?P<step>[+-]?\d+)?"
_DASHED = r"(?<![_. ])-(?P<step>\d+)"
_LAG = re.compile(
    r"(?P<channel>.*?)(?:^|[_. -]|(?<=[a-z0-9])(?=L))(?P<word>(?i:lag(?:s|ged)?))[_. -]?(?P<step>\d+)"
)
_LEAD = re.compile(
    r"(?P<channel>.*?)(?:^|[_. -]|(?<=[a-z0-9])(?=L))(?P<word>(?i:leads?))[_. -]?(?P<step>\d+)"
)
_IN_BRACKETS = re.compile(r"(?P<channel>.*?)[_. ]?[(\[]\s*t\s*(?P<step>[+-]\s*\d+)?\s*[)\]]")
_LAGGED = re.compile(r"[+-]\s*\d+[)\]\s]*$|lag(?:s|ged)?[_. -]?\d+$", re.IGNORECASE)
_MAYBE_BACKWARD = re.compile(
    r"(?:^|[_. -]|(?<=[a-z0-9])(?=[A-Z]))(?i:minus|prev|previous|before|past|ago|shift|shifted)[_. -]?$"
)
_BROKEN = re.compile(r"[+-]$|\d[:/]$|(?<!\d)\d{4}[-_. ]?[QHMW]$", re.IGNORECASE)  # 2023-, 09:, 2023Q
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_WEEKDAY = r"(?:mon|tue|tues|wed|wednes|thu|thur|thurs|fri|sat|satur|sun)(?:day)?"
_UNIT = r"(?:years?|yr|quarters?|qtr|months?|weeks?|wk|days?|hours?|hr|minutes?|min)"
_CALENDAR = re.compile(
    # Q1; January, Mon; Day 3; Y1M, D1H, 2023M: what is left of a date without the number at its end.
    rf"(?P<head>|.*[_. -])(?:q[1-4]|{_MONTH}\.?|{_WEEKDAY}\.?|{_UNIT}[_. -]?\d+"
    rf"|(?:[ymwdh]?\d+[_. -]?)+(?:[qmwdhs]|{_UNIT}))",
    re.IGNORECASE,
)


_YEARLY = re.compile(r"(?P<head>|.*[_. -])[hsmwd]\d{1,2}", re.IGNORECASE)  # W05_2023


def _pattern_reader(tail: str) -> _Read:
    free, fixed = re.compile(rf"(?P<channel>.*?){tail}"), re.compile(tail)

    def read(name: str, channel: str | None) -> _Step | None:
        if channel is None:
            match = free.fullmatch(name)
            if match is None or not _is_channel(match["channel"]):
                return None
        else:
            match = fixed.fullmatch(name[len(channel) :])
            if match is None or _is_cut(channel, match[0]):
                return None
        key = as_number(match["step"] or "0")
        return None if key is None else _Step(match["channel"] if channel is None else channel, key)

    return read


def _is_channel(text: str) -> bool:
    """Return whether a text can be the name of a channel: not a number, or a part of one."""
    is_number = any(map(str.isdigit, text)) and not any(map(str.isalpha, text))
    return not is_number and not _BROKEN.search(text)


def _is_cut(head: str, tail: str) -> bool:
    """Return whether a name would be cut in the middle of a number."""
    return head[-1:].isdigit() and tail[:1].isdigit()


def _time_reader(read_time: Callable[..., Any]) -> _Read:
    def read(name: str, channel: str | None) -> _Step | None:
        for head, tail in _cuts(name, channel):
            key = read_time(tail, is_whole=not head or channel is not None)
            if key is not None:
                return _Step(head, key) if channel is not None or _is_channel(head) else None
        return None

    return read


def _cuts(name: str, channel: str | None) -> Iterator[tuple[str, str]]:
    """(channel, step) at every place where a date or a time can begin, the longest step first."""
    starts = range(len(name)) if channel is None else [len(channel)]
    for start in starts:
        head, tail = name[:start], name[start:]
        if channel is not None:
            if not _is_cut(head, tail) and tail:
                yield channel, tail[1:] if tail[0] in "_. -" else tail
            continue
        is_in_word = (
            head[-1:].isalpha() and tail[0].isalpha() and not (head[-1].islower() and tail[0].isupper())
        )
        if not is_in_word and not _is_cut(head, tail) and tail[0] not in "_. -":
            yield re.sub(r"[_. -]$", "", head), tail


def _read_lag(name: str, channel: str | None) -> _Step | None:
    """``x_lag2`` is step -2, ``x_lead1`` step 1, ``x`` step 0; so are ``x(t-2)``, ``x(t+1)`` and ``x(t)``."""
    for pattern, sign in ((_LAG, -1), (_LEAD, 1), (_IN_BRACKETS, 1)):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        key = as_number(re.sub(r"\s", "", match["step"] or "0"))
        before = name[: match.start("step")]
        if key is None or channel not in (None, match["channel"], before, before[:-1]):
            return None
        return _Step(match["channel"] if channel is None else channel, sign * key)
    return _Step(name, as_number("0")) if channel in (None, name) else None


def _whole_reader(read_name: Callable[[str], Any]) -> _Read:
    def read(name: str, channel: str | None) -> _Step | None:
        key = read_name(name)
        return None if key is None else _Step(channel or "", key)

    return read


_READ_LAG: _Read = _read_lag
_whole_number = _pattern_reader(_INTEGER)
_signed = _pattern_reader(_SIGNED)
_dashed = _pattern_reader(_DASHED)
_clock = _time_reader(lambda text, is_whole: as_clock(text))
_whole_clock = _whole_reader(as_clock)
_WHOLE: tuple[_Read, ...] = (_whole_reader(as_number), *map(_whole_reader, DATES), _whole_clock)
_PARTED: tuple[_Read, ...] = (
    *(_time_reader(read) for read in DATES), _clock, _whole_number, _pattern_reader(_DECIMAL),
)  # fmt: skip
