"""Users' arrays as sequences (n_i, c) float32, and the treatment of missing values."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernel_attention.errors import InputError, unknown

MISSING = ("auto", "interpolate", "error")


def as_sequences(X: Any, missing: str = "error", advice: str | None = None) -> list[np.ndarray]:
    """Collections in aeon's conventions to a list of float32 sequences (n_i, c), time first.

    X: array (cases, channels, time), or (cases, time) for one channel, or a list of arrays (channels, time)
       or (time,), whose lengths may differ; or a data frame: nested (a case a row, a channel a column, a
       series a cell), with an index of two levels (case and time; a channel a column), or of numbers, which
       is an array (cases, time). A frame in a list is (channels, time) as in aeon, or (time, channels) as in
       sktime where its columns have names.
    missing: "error" (also "auto": an array declares nothing) or "interpolate", see `resolve_missing`.
    advice: as in `resolve_missing`.

    Raises InputError for no cases, no steps, no channels, differing channel counts, values that are not real
    numbers, NaN unless interpolated, and infinite values.
    """
    check_missing(missing)
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
    return resolve_missing([np.atleast_2d(case).T for case in cases], missing, "X", advice=advice or ADVICE)


def _from_frame(X: Any) -> Any:
    """A data frame of pandas as an array (cases, time) or a list of arrays (channels, time)."""
    if X.index.nlevels > 2 or X.columns.nlevels > 1:
        raise InputError(
            f"X is a frame with {X.index.nlevels} levels of rows and {X.columns.nlevels} of columns; "
            "accepted: rows of one level, or of two (case, time)"
        )
    if X.index.nlevels == 2:
        return [_in_time(case, group) for case, group in X.groupby(level=0, sort=False)]
    cells = X.to_numpy()
    if not cells.size or not hasattr(cells.flat[0], "__len__") or isinstance(cells.flat[0], str | dict):
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


def _in_time(case: Any, group: Any) -> np.ndarray:
    """A case of a frame with two levels, (channels, time), in the order of its times."""
    times = group.index.get_level_values(1)
    if times.has_duplicates:
        twice = times[times.duplicated()][0]
        raise InputError(f"case {case} of X has the time {twice} twice")
    return group.iloc[times.argsort()].to_numpy().T


def _channels_first(case: Any) -> Any:
    """The values of a frame in a list, (channels, time); all else as it is."""
    if not hasattr(case, "columns"):
        return case
    has_names = any(isinstance(name, str) for name in case.columns)
    return case.to_numpy().T if has_names else case.to_numpy()


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
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} is not an array of numbers ({error})") from None
    if np.iscomplexobj(array):
        raise InputError(f"{where} holds complex numbers: Complex data not supported")
    if array.dtype.kind == "O":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"{where} is not an array of numbers ({error})") from None
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where} is not an array of numbers (its dtype is {array.dtype})")
    return array


ADVICE = "missing='interpolate' fills such gaps"


def resolve_missing(
    sequences: list[np.ndarray], missing: str, where: str, *, declared: bool = False, advice: str = ADVICE
) -> list[np.ndarray]:
    """Check sequences (n_i, c) and return them as float32 without a NaN.

    missing: "interpolate" fills a gap linearly within its case and channel and continues the nearest value to
        the ends; "error" refuses; "auto" interpolates where the file's header declares missing values.
    where: the name of the sequences in messages, for example "the train split of Handwriting".
    advice: the advice in the message about a refused gap.
    """
    check_missing(missing)
    fill = missing == "interpolate" or (missing == "auto" and declared)
    channels = sequences[0].shape[1]
    resolved = []
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
            values = np.ascontiguousarray(sequence, dtype=np.float32)
        if not np.isfinite(values).all():
            values = _finite(values, fill, f"of {where}", case, advice)
        resolved.append(values)
    return resolved


def _finite(values: np.ndarray, fill: bool, where: str, case: int, advice: str) -> np.ndarray:
    infinite = np.argwhere(np.isinf(values))
    if len(infinite):
        step, channel = infinite[0]
        raise InputError(
            f"infinite value in case {case}, channel {channel}, step {step} {where} (float32 is used)"
        )
    gaps = np.isnan(values)
    if not fill:
        step, channel = np.argwhere(gaps)[0]
        raise InputError(
            f"missing value (NaN) in case {case}, channel {channel}, step {step} {where}; {advice}"
        )
    values = values.copy()
    steps = np.arange(len(values))
    for channel in np.flatnonzero(gaps.any(axis=0)):
        known = ~gaps[:, channel]
        if not known.any():
            raise InputError(
                f"every value (all NaN) of case {case}, channel {channel} {where} is missing: nothing to "
                "interpolate from (the archive's <Name>_nmv version has such gaps filled)"
            )
        values[~known, channel] = np.interp(steps[~known], steps[known], values[known, channel])
    return values
