"""Users' arrays as sequences (n_i, c), and the treatment of missing values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernel_attention.containers import as_array, as_numbers, feature_names, row_names
from kernel_attention.errors import InputError, unknown

MISSING = ("auto", "interpolate", "error")


def as_sequences(X: Any, missing: str = "error") -> list[np.ndarray]:
    """Collections in aeon's conventions to a list of sequences (n_i, c), time first.

    They are float32 where the input is no more precise, else float64, because only a centred series can be
    rounded to float32 without loss. Masked values, ``pd.NA``, ``None`` and ``NaT`` are missing, as NaN is.

    X: array (cases, channels, time), or (cases, time) for one channel, or a list of arrays (channels, time)
       or (time,), whose lengths may differ; or a data frame: nested (a case a row, a channel a column, a
       series a cell), with an index of two levels (case and time; a channel a column), or of numbers, which
       is an array (cases, time). A frame in a list is (channels, time) as in aeon, or (time, channels) as in
       sktime where its columns have names.
    missing: "error" (also "auto": an array declares nothing) or "interpolate", see `resolve_missing`.

    Raises InputError for no cases, no steps, no channels, differing channel counts, values that are not real
    numbers, missing ones unless interpolated, values beyond float32, and missing or repeated keys of a frame.
    """
    check_missing(missing)
    return resolve_missing(unresolved_sequences(X), missing, "X")


def unresolved_sequences(X: Any) -> list[np.ndarray]:
    """Collections in aeon's conventions as ``as_sequences`` reads them, unchecked, (n_i, c)."""
    if hasattr(X, "columns") and hasattr(X, "index"):
        X = _from_frame(X)
    if isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1:
        X = list(X)
    if isinstance(X, (list, tuple)):
        cases = [_numeric(_channels_first(case), f"case {index} of X") for index, case in enumerate(X)]
        if any(case.ndim not in (1, 2) for case in cases):
            bad = next(index for index, case in enumerate(cases) if case.ndim not in (1, 2))
            raise InputError(
                f"case {bad} of X has shape {cases[bad].shape}; accepted: (channels, time) or (time,)"
            )
    else:
        array = _numeric(X, "X")
        if array.ndim not in (2, 3):
            raise InputError(
                f"X has shape {array.shape}; accepted: (cases, channels, time), (cases, time) or a list of "
                "arrays (channels, time). Reshape your data: one series of one channel is X.reshape(1, -1)"
            )
        cases = list(array)
    if not cases:
        raise InputError("X has 0 cases, at least 1 is needed (found array with 0 sample(s))")
    return [np.atleast_2d(case).T for case in cases]


def channel_names(X: Any) -> list[str] | None:
    """The names of the columns of a frame, or of the channels of the frames in a list; None without any.

    Raises:
        InputError: where the frames of a list have other names, or others in their order.
    """
    if isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1:
        X = list(X)
    if not isinstance(X, (list, tuple)):
        return feature_names(X)
    known: list[str] | None = None
    for index, case in enumerate(X):
        if not hasattr(case, "columns"):
            continue
        names = feature_names(case) or row_names(case)
        known = known or names
        if names is not None and names != known:
            raise InputError(f"case {index} of X has the channels {names}, a case before it has {known}")
    return known


def _from_frame(X: Any) -> Any:
    """A data frame of pandas as an array (cases, time) or a list of arrays (channels, time)."""
    if X.index.nlevels > 2 or X.columns.nlevels > 1:
        raise InputError(
            f"X is a frame with {X.index.nlevels} levels of rows and {X.columns.nlevels} of columns; "
            "accepted: rows of one level, or of two (case, time)"
        )
    if X.index.nlevels == 2:
        return _cases_of(X)
    cells = _contents(as_array, X, "X")
    if cells.dtype != object:
        return cells
    if not any(_is_series(cell) for cell in cells.flat):
        _require_no_words(X, cells)
        return cells
    cases = []
    for index, row in enumerate(cells):
        channels = [_numeric(cell, f"case {index} of X") for cell in row]
        if len({channel.shape for channel in channels}) > 1 or channels[0].ndim != 1:
            shapes = ", ".join(str(channel.shape) for channel in channels)
            raise InputError(
                f"case {index} of X has cells of shapes {shapes}; accepted: one length, a series in each"
            )
        cases.append(np.stack(channels))
    return cases


def _require_no_words(X: Any, cells: np.ndarray) -> None:
    """InputError for a frame with a column of words, such as one with a step of a case a row."""
    for name, column in zip(X.columns, cells.T, strict=True):
        word = next((cell for cell in column if isinstance(cell, str)), None)
        if word is None:
            continue
        try:
            float(word)
        except ValueError:
            raise InputError(
                f"X is not an array of numbers: its column {name!r} holds the text {word!r}; accepted: "
                "a frame (cases, time), one of series, or a step of a case a row with both in its index, "
                "X.set_index([case, time]) without the labels; ka.read_series reads such files"
            ) from None


def _is_series(cell: Any) -> bool:
    return hasattr(cell, "__len__") and not isinstance(cell, str | bytes | dict)


def _cases_of(X: Any) -> list[np.ndarray]:
    """The cases of a frame with two levels, (channels, time) each, in the order of their times."""
    for level, what in enumerate(("case", "time")):
        missing = X.index.get_level_values(level).isna()
        if missing.any():
            raise InputError(
                f"row {int(missing.argmax())} of X has no {what}: level {level} of its index "
                f"({X.index.names[level]!r}) is missing there"
            )
    values, times = _numeric(X, "X"), X.index.get_level_values(1)
    number = X.groupby(level=0, sort=False, observed=True).ngroup().to_numpy()
    order = number.argsort(kind="stable")
    cases = []
    for rows in np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else []:
        case, own = X.index.get_level_values(0)[rows[0]], times[rows]
        if own.has_duplicates:
            raise InputError(f"case {case} of X has the time {own[own.duplicated()][0]} twice")
        try:
            cases.append(values[rows[own.argsort()]].T)
        except TypeError as error:
            raise InputError(f"case {case} of X has times that cannot be sorted together ({error})") from None
    return cases


def _channels_first(case: Any) -> Any:
    """The values of a frame in a list, (channels, time); all else as it is."""
    if not hasattr(case, "columns"):
        return case
    has_names = any(isinstance(name, str) for name in case.columns)
    values = _contents(as_array, case, "a frame of X")
    return values.T if has_names else values


def windows_of(sequences: list[np.ndarray], length: int) -> tuple[list[np.ndarray], list[int]]:
    """Sequences (n_i, c) with every longer one cut into windows of `length` steps, and their number for each.

    A sequence of n_i > length steps becomes ceil(n_i / length) windows whose starts are evenly spaced from 0
    to n_i - length, so that every step lies in one at least. Windows share the memory of their sequence.
    """
    windows, counts = [], []
    for sequence in sequences:
        count = -(-len(sequence) // length)
        starts = (i * (len(sequence) - length) // max(count - 1, 1) for i in range(count))
        windows += [sequence[max(start, 0) :][:length] for start in starts]
        counts.append(count)
    return windows, counts


def check_missing(missing: str) -> None:
    """Raise InputError for an unknown treatment of missing values."""
    if missing not in MISSING:
        raise unknown("value of missing", missing, MISSING)


def _numeric(values: Any, where: str) -> np.ndarray:
    if hasattr(values, "tocsr"):
        raise InputError(f"{where} is a sparse matrix: sparse input is not supported, pass a dense array")
    array = _contents(as_array, values, where)
    if np.iscomplexobj(array):
        raise InputError(f"{where} holds complex numbers: Complex data not supported")
    array = _contents(as_numbers, array, where)
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where} is not an array of numbers (its dtype is {array.dtype})")
    return array


def _contents(read: Callable[[Any], np.ndarray], values: Any, where: str) -> np.ndarray:
    try:
        return read(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{where} is not an array of numbers ({reason})") from None


LARGEST = np.finfo(np.float32).max  # the models compute in float32

ADVICE = "missing='interpolate' fills such gaps"


def resolve_missing(
    sequences: list[np.ndarray], missing: str, where: str, *, declared: bool = False, advice: str = ADVICE
) -> list[np.ndarray]:
    """Check sequences (n_i, c) and return them without a NaN, all float32 or all float64.

    missing: "interpolate" fills a gap linearly within its case and channel and continues the nearest value to
        the ends; "error" refuses; "auto" interpolates where the file's header declares missing values.
    where: the name of the sequences in messages, for example "the train split of Handwriting".
    advice: the advice in the message about a refused gap.
    """
    check_missing(missing)
    fill = missing == "interpolate" or (missing == "auto" and declared)
    resolved = checked_sequences(sequences, where)
    for case, values in enumerate(resolved):
        gaps = np.isnan(values)
        if not gaps.any():
            continue
        if not fill:
            step, channel = np.argwhere(gaps)[0]
            raise InputError(
                f"missing value (NaN) in case {case}, channel {channel}, step {step} of {where}; {advice}"
            )
        resolved[case] = _filled(values, gaps, f"case {case}", where)
    return resolved


def checked_sequences(sequences: list[np.ndarray], where: str) -> list[np.ndarray]:
    """Sequences (n_i, c) of one c, all float32 or all float64; a NaN stays.

    Raises InputError for sequences without steps, of other channel counts, and with values beyond float32.
    """
    channels = sequences[0].shape[1]
    exact = all(np.can_cast(sequence.dtype, np.float32) for sequence in sequences)
    dtype = np.float32 if exact else np.float64
    checked = []
    for case, sequence in enumerate(sequences):
        if sequence.shape[0] == 0 or sequence.shape[1] == 0:
            raise InputError(
                f"case {case} of {where} has {sequence.shape[0]} time steps and {sequence.shape[1]} channels "
                "(0 feature(s)); a minimum of 1 is required."
            )
        if sequence.shape[1] != channels:
            raise InputError(
                f"case {case} of {where} has {sequence.shape[1]} channels, case 0 has {channels}"
            )
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(sequence, dtype=dtype)
        infinite = np.abs(values) > LARGEST
        if infinite.any():
            step, channel = np.argwhere(infinite)[0]
            raise InputError(
                f"infinite value in case {case}, channel {channel}, step {step} of {where} (float32 is used)"
            )
        checked.append(values)
    return checked


def _filled(values: np.ndarray, gaps: np.ndarray, case: str, where: str) -> np.ndarray:
    values = values.copy()
    steps = np.arange(len(values))
    for channel in np.flatnonzero(gaps.any(axis=0)):
        known = ~gaps[:, channel]
        if not known.any():
            raise InputError(
                f"every value (all NaN) of {case}, channel {channel} of {where} is missing: nothing to "
                "interpolate from (the archive's <Name>_nmv version has such gaps filled)"
            )
        values[~known, channel] = np.interp(steps[~known], steps[known], values[known, channel])
    return values
