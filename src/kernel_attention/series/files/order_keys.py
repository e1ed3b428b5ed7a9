"""Numbers, dates and clock times as keys that sort in time, with all of their digits."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"))

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ISO_FRACTION = re.compile(r"(?:\d\d:\d\d:\d\d|[T ]\d{6})[.,](\d+)")
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
    "november", "december",
)  # fmt: skip
_CLOCK = (
    r"(?P<hour>\d{1,3})(?::(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d)(?:[.,](?P<fraction>\d+))?)?)?"
    r"(?:\s*(?P<half>[ap])\.?m\.?)?"
)
_TIME_OF_DAY = rf"(?:(?:T|\s+){_CLOCK}(?:\s*(?P<zone>Z|UTC|GMT|[+-]\d\d(?::?\d\d)?))?)?"
_GAP = r"[-/._\s]"
_NAMED = r"(?P<name>[a-z]{3,9})\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"


def _date_pattern(text: str) -> re.Pattern[str]:
    return re.compile(text + _TIME_OF_DAY, re.IGNORECASE)


_DATES = [
    _date_pattern(text)
    for text in (
        rf"{_YEAR}(?P<gap>{_GAP})(?P<month>\d{{1,2}})(?:(?P=gap)(?P<day>\d{{1,2}}))?",
        rf"{_YEAR}{_GAP}?(?P<unit>[QMWHSD]){_GAP}?(?P<number>\d{{1,3}})",
        rf"{_YEAR}(?P<unit>-)(?P<number>\d{{3}})",
        rf"(?P<unit>[QHS])(?P<number>\d){_GAP}?{_YEAR}",
        rf"(?P<unit>[MW])(?P<number>\d{{1,2}})[-/\s]{_YEAR}",
        rf"(?P<number>\d)(?P<unit>Q){_GAP}?{_YEAR}",
        rf"(?:{_DAY}{_GAP}*)?{_NAMED}(?:,|{_GAP})*{_YEAR}",
        rf"{_NAMED}{_GAP}*{_DAY}(?:,|{_GAP})+{_YEAR}",
        rf"{_YEAR}{_GAP}*{_NAMED}(?:{_GAP}*{_DAY})?",
    )
]
_MONTH_AND_YEAR = _date_pattern(rf"(?P<month>\d{{1,2}})(?P<gap>{_GAP}){_YEAR}")
_DAY_AND_MONTH = _date_pattern(rf"(?P<first>\d{{1,2}})(?P<gap>[-/.\s])(?P<second_>\d{{1,2}})(?P=gap){_YEAR}")
_TIME = re.compile(_CLOCK, re.IGNORECASE)


class Moment(NamedTuple):
    """A time in whole seconds, and what is left of a second, to any number of digits."""

    seconds: int
    fraction: Decimal = Decimal(0)


def as_number(text: str) -> Decimal | None:
    """The value of a finite number; None for another text."""
    text = text.translate(_MINUS)
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all machines
        return None


def as_date(text: str, *, day_first: bool = True, is_whole: bool = True) -> Moment | None:
    """The begin of a date, month, quarter, half-year, week or day of the year, or a moment of a day.

    Args:
        text: ISO 8601, or another spelling with a year of four digits: 2023-01, 2023/01/05, 01/2023, 2023Q1,
            Q1 2023, 2023-W05, Jan 2023, 5 Jan 2023, 05/01/2023; a time of day may follow.
        day_first: reads 05/01/2023 as the fifth of January; else as the first of May. With dots, the day is
            always first.
        is_whole: the text is a whole name. In a part of one, 1_2023 is not January (``x1_2023``).

    Without a time zone, times are those of UTC.
    """
    text = text.translate(_MINUS)
    found = _iso(text)
    if found is not None:
        return found
    for pattern in _DATES:
        match = pattern.fullmatch(text)
        if match and (moment := _moment(match, _begin(match.groupdict()))):
            return moment
    match = _MONTH_AND_YEAR.fullmatch(text)
    if match and (is_whole or match["gap"] in "-/"):
        return _moment(match, _day(match["year"], match["month"], 1))
    match = _DAY_AND_MONTH.fullmatch(text)
    if match and (day_first or match["gap"] != "."):
        day, month = match["first"], match["second_"]
        if not day_first:
            day, month = month, day
        return _moment(match, _day(match["year"], month, day))
    return None


def as_clock(text: str) -> Moment | None:
    """A time of day or a duration: 09:30, 9:30 PM, 27:15:00.5, 9 am."""
    match = _TIME.fullmatch(text)
    if match is None or (match["minute"] is None and match["half"] is None):
        return None
    return _clock(match)


DATES: tuple[Callable[..., Moment | None], ...] = (as_date, functools.partial(as_date, day_first=False))


def orders_agree(items: Iterable[str], orders: Sequence[dict[str, Any]]) -> bool:
    """Return whether all orders, each a key of every item, sort the items in one way."""
    if len(orders) < 2:
        return True
    items = list(items)
    first, *others = (sorted(items, key=order.__getitem__) for order in orders)
    return all(first == other for other in others)


def _iso(text: str) -> Moment | None:
    if text.isdecimal() and len(text) != 8:
        return None  # Python takes some long numbers for a date with a time of day
    fraction = Decimal(0)
    if "." in text or "," in text:
        match = _ISO_FRACTION.search(text)
        if match is None:
            return None
        # Python cuts a second after six digits.
        fraction = Decimal(f"0.{match[1]}")
        text = text[: match.start(1) - 1] + text[match.end(1) :]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    return Moment(since.days * 86400 + since.seconds, fraction)


def _begin(found: dict[str, str | None]) -> date | None:
    """The first day of what a pattern of ``_DATES`` has found."""
    year, number = found["year"], int(found.get("number") or 0)
    match (found.get("unit") or "").upper():
        case "Q":
            return _day(year, 3 * number - 2, 1) if 1 <= number <= 4 else None
        case "H" | "S":
            return _day(year, 6 * number - 5, 1) if 1 <= number <= 2 else None
        case "M":
            return _day(year, number, 1)
        case "W":
            try:
                return date.fromisocalendar(int(year or 0), number, 1)
            except ValueError:
                return None
        case "D" | "-":
            first = _day(year, 1, 1)
            found_day = first and first + timedelta(number - 1)
            return found_day if found_day and first and found_day.year == first.year else None
    month: str | int | None = found.get("month")
    name = found.get("name")
    if name is not None:
        month = next((i for i, one in enumerate(_MONTHS, 1) if one.startswith(name.lower())), None)
    return _day(year, month, found.get("day") or 1)


def _day(year: Any, month: Any, day: Any) -> date | None:
    try:
        return date(int(year), int(month), int(day))
    except (TypeError, ValueError):
        return None


def _moment(match: re.Match[str], day: date | None) -> Moment | None:
    """A day with the time of day that follows it in a text."""
    if day is None:
        return None
    seconds = (day.toordinal() - _EPOCH.toordinal()) * 86400
    if match["hour"] is None:
        return Moment(seconds)
    clock = _clock(match)
    if clock is None or clock.seconds > 86400:
        return None
    zone = match["zone"] or ""
    offset = 0
    if zone[:1] in ("+", "-"):
        digits = zone[1:].replace(":", "").ljust(4, "0")
        offset = int(f"{zone[0]}1") * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
    return Moment(seconds + clock.seconds - offset, clock.fraction)


def _clock(match: re.Match[str]) -> Moment | None:
    hour = int(match["hour"])
    if match["half"]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if match["half"].lower() == "p" else 0)
    seconds = hour * 3600 + int(match["minute"] or 0) * 60 + int(match["second"] or 0)
    return Moment(seconds, Decimal(f"0.{match['fraction'] or 0}"))
