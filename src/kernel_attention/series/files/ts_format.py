"""A strict reader of the `.ts` text format, with the line number in every error.

aeon's own reader takes rows without a label, labels that the header does not know, infinite values and text
such as `1_0` for data, loses the sign of time-stamped values, and names no line. This reader refuses
malformed data. On files that both accept, its values and labels equal aeon's (a test checks this).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kernel_attention.errors import InputError

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf(inity)?", re.IGNORECASE)
_STAMPED = re.compile(r"\(([^()]*),([^(),]*)\)")


@dataclass(frozen=True)
class Header:
    """The declarations of a `.ts` header.

    task: "classification", "regression" or None for cases without labels.
    labels: the class labels, lower case as aeon has them; empty unless task is classification.
    """

    task: str | None = None
    labels: tuple[str, ...] = ()
    missing: bool = False
    univariate: bool = False
    equal_length: bool = False
    timestamps: bool = False
    dimensions: int | None = None


@dataclass
class TsFile:
    """The contents of a file.

    sequences: (n_i, c) float32 with NaN where a value is missing.
    labels: one str (classification) or float (regression) a case; empty where the header declares neither.
    """

    header: Header
    sequences: list[np.ndarray] = field(default_factory=list)
    labels: list[str] | list[float] = field(default_factory=list)


def read_ts(text: Iterable[str], source: str) -> TsFile:
    """Read the lines of a `.ts` file.

    source: the name of the file in messages.
    Raises InputError "<source>, line <n>: <what>" for anything that is not a well-formed header followed by
    cases of one channel count (and one length, if the header says so).
    """
    lines = ((number, line.strip()) for number, line in enumerate(text, start=1))
    lines = ((number, line) for number, line in lines if line and line[0] not in "#%")
    header = _read_header(lines, source)
    reader = _CaseReader(header, source)
    for number, line in lines:
        reader.read(number, line)
    return TsFile(header, reader.sequences, reader.labels)


def _read_header(lines: Iterator[tuple[int, str]], source: str) -> Header:
    found: dict[str, object] = {}
    number = 0
    for number, line in lines:
        tag, *values = line.split()
        tag = tag.lower()
        if tag == "@data":
            return _header(found)
        if not tag.startswith("@"):
            raise InputError(f"{source}, line {number}: data before the @data line (is this a .ts file?)")
        name = tag[1:]
        if name in ("missing", "univariate", "equallength", "timestamps", "targetlabel", "classlabel"):
            if not values or values[0].lower() not in ("true", "false"):
                raise InputError(f"{source}, line {number}: {tag} needs true or false")
            found[name] = values[0].lower() == "true"
        if name == "dimensions" and values and re.fullmatch(r"[0-9]{1,9}", values[0]):
            found[name] = int(values[0])
        if name == "classlabel" and found[name]:
            if len(values) == 1:
                raise InputError(f"{source}, line {number}: @classLabel true needs the class labels after it")
            found["labels"] = labels = tuple(label.lower() for label in values[1:])
            if len(set(labels)) < len(set(values[1:])):
                raise InputError(
                    f"{source}, line {number}: class labels that differ only in upper and lower case"
                )
    raise InputError(
        f"{source}: " + ("no @data line (is this a whole .ts file?)" if number else "the file is empty")
    )


def _header(found: dict[str, object]) -> Header:
    # A target wins over class labels, as in aeon.
    task = "regression" if found.get("targetlabel") else "classification" if found.get("classlabel") else None
    labels = found.get("labels", ()) if task == "classification" else ()
    dimensions = found.get("dimensions")
    return Header(
        task=task,
        labels=labels if isinstance(labels, tuple) else (),
        missing=bool(found.get("missing")),
        univariate=bool(found.get("univariate")),
        equal_length=bool(found.get("equallength")),
        timestamps=bool(found.get("timestamps")),
        dimensions=dimensions if isinstance(dimensions, int) else None,
    )


class _CaseReader:
    """Reads the cases one line at a time and holds each to the shape of the first."""

    def __init__(self, header: Header, source: str) -> None:
        self.header = header
        self.source = source
        self.sequences: list[np.ndarray] = []
        self.labels: list = []
        self.first_line = 0
        # Archive headers write 1.0 where the cases say 1, so numeric labels are compared as numbers.
        self.known = {label: label for label in header.labels}
        self.numeric = {value: label for label in header.labels if (value := _to_float(label)) is not None}

    def read(self, number: int, line: str) -> None:
        self.where = f"{self.source}, line {number}"
        body = line
        if self.header.task is not None:
            body, colon, label = line.rpartition(":")
            label = label.strip().lower()
            if not colon or "," in label or not label or label.endswith(")"):
                kind = "class label" if self.header.task == "classification" else "target value"
                raise InputError(f"{self.where}: no {kind} after the last colon (truncated line?)")
        channels = re.split(r"(?<=\)):", body) if self.header.timestamps else body.split(":")
        self._check_channel_count(number, len(channels))
        self.sequences.append(self._values(channels))
        if self.header.task is not None:
            self.labels.append(self._label(label))

    def _check_channel_count(self, number: int, count: int) -> None:
        if self.header.univariate and count != 1:
            raise InputError(f"{self.where}: {count} channels, but the header says @univariate true")
        if not self.sequences:
            self.first_line = number
            return
        expected = self.sequences[0].shape[1]
        if count == expected:
            return
        if count == self.header.dimensions:
            # The header agrees with this line, so the first line is damaged.
            raise InputError(
                f"{self.source}, line {self.first_line}: {expected} channels, "
                f"but the header says @dimensions {count}"
            )
        raise InputError(
            f"{self.where}: {count} channels, but the first case has {expected} (truncated line?)"
        )

    def _values(self, channels: list[str]) -> np.ndarray:
        if self.header.timestamps:
            channels = [self._without_stamps(index, text) for index, text in enumerate(channels)]
        try:
            rows = [list(map(float, text.replace("?", "nan").split(","))) for text in channels]
        except ValueError:
            raise self._bad_token(channels) from None
        if any("_" in text for text in channels):
            raise self._bad_token(channels)
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            odd = next(index for index, length in enumerate(lengths) if length != lengths[0])
            raise InputError(
                f"{self.where}: channel {odd} has {lengths[odd]} values, "
                f"channel 0 has {lengths[0]} (truncated line?)"
            )
        if self.header.equal_length and self.sequences and lengths[0] != len(self.sequences[0]):
            raise InputError(
                f"{self.where}: {lengths[0]} time steps, the first case has {len(self.sequences[0])} "
                "and the header says @equalLength true"
            )
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(np.array(rows, dtype=np.float64).T)
            infinite = np.isinf(values.astype(np.float32))
        if infinite.any():
            step, channel = np.argwhere(infinite)[0]
            raise InputError(
                f"{self.where}: infinite value in channel {channel}, step {step} (float32 is used)"
            )
        return values

    def _without_stamps(self, channel: int, text: str) -> str:
        pairs = _STAMPED.findall(text)
        if not pairs or _STAMPED.sub("", text).strip(", "):
            raise InputError(
                f"{self.where}: channel {channel} is not a list of (time stamp,value) pairs, "
                "but the header says @timeStamps true"
            )
        return ",".join(value for _, value in pairs)

    def _bad_token(self, channels: list[str]) -> InputError:
        for channel, text in enumerate(channels):
            if not text.strip():
                return InputError(f"{self.where}: channel {channel} is empty (a series of length 0)")
            for step, token in enumerate(text.split(",")):
                token = token.strip()
                if token != "?" and not _NUMBER.fullmatch(token):
                    shown = repr(token if len(token) <= 30 else token[:30] + "...")
                    return InputError(
                        f"{self.where}: {shown} in channel {channel}, step {step} is not a number"
                    )
        return InputError(f"{self.where}: a value is not a number")

    def _label(self, label: str) -> str | float:
        value = _to_float(label)
        if self.header.task == "regression":
            with np.errstate(over="ignore"):
                is_finite = value is not None and bool(np.isfinite(np.float64(value).astype(np.float32)))
            if value is None or not is_finite:
                raise InputError(
                    f"{self.where}: target value {label!r} is not a finite number (float32 is used)"
                )
            return value
        known = self.known.get(label) or (None if value is None else self.numeric.get(value))
        if known is None:
            raise InputError(
                f"{self.where}: class label {label!r} is not in the header's @classLabel "
                f"({', '.join(self.header.labels[:30])}{', ...' if len(self.header.labels) > 30 else ''})"
            )
        return known


def _to_float(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None
