"""Numbers and labels in the containers that people have, as plain arrays.

A container has its own mark of a missing value: the mask of a NumPy array, ``pd.NA``, ``None``, ``NaT``. An
array made of it by ``np.asarray`` loses the mark or is none of numbers. Here a missing value is NaN. NumPy is
needed; other libraries are recognised by what they offer, and never imported.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernel_attention.errors import InputError

_SHOWN = 5  # names in a message


# Texts without a value, in any case of letters: what R, pandas, databases and spreadsheets write.
_GAPS = frozenset(("", "?", "na", "n/a", "#na", "#n/a", "<na>", "nan", "+nan", "-nan", "nat", "null", "none"))


def as_array(values: Any) -> np.ndarray:
    """The contents of any container as an array, in their own type where nothing is missing.

    Missing whole numbers and booleans make the array one of float64. In an array of objects, and in one of
    text, missing entries are NaN among objects.

    Raises:
        TypeError, ValueError, RuntimeError: what NumPy or the container raises where there is no array of it.
    """
    if isinstance(values, np.ma.MaskedArray):
        return _unmasked(values)
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
    if _is_frame(values):
        return _frame_array(values)
    if _is_column(values):
        return _column_array(values)
    if isinstance(values, list | tuple) and _holds_containers(values):
        return np.asarray([as_array(each) if _is_container(each) else each for each in values])
    return np.asarray(values)


def as_numbers(values: Any) -> np.ndarray:
    """``as_array``, and an array of objects as float64.

    Raises:
        TypeError, ValueError, RuntimeError: for objects that are no numbers; see also ``as_array``.
    """
    array = as_array(values)
    if array.dtype.kind != "O":
        return array
    return np.where(missing_marks(array), np.nan, array).astype(np.float64)


def as_targets(y: Any, name: str = "y") -> np.ndarray:
    """Targets or labels as an array in their own type: whole numbers, booleans and words stay what they are.

    Raises:
        InputError: for a missing one, with its row.
        TypeError, ValueError, RuntimeError: see ``as_array``.
    """
    array = as_array(y)
    if array.dtype.kind in "US" and isinstance(y, list | tuple):
        # NumPy writes a NaN, or a number, among words as a word.
        objects = np.array(y, dtype=object)
        array = array if all(isinstance(entry, str | bytes) for entry in objects.flat) else objects
    missing = missing_marks(array)
    if array.ndim and missing.any():  # a single None is no targets at all, which the caller says
        row = int(np.argwhere(missing)[0][0])
        raise InputError(f"Input {name} contains NaN: the value of row {row} is missing")
    return array


def is_missing(text: str) -> bool:
    """True where a text says that it has no value: empty, ``NA``, ``NaN``, ``NaT``, ``null`` and so on."""
    return text.lower().strip() in _GAPS


def missing_marks(array: np.ndarray) -> np.ndarray:
    """Which entries are NaN, ``None``, ``pd.NA`` or ``NaT``, in the shape of the array."""
    if array.dtype.kind in "fcmM":
        return array != array
    if array.dtype.kind != "O":
        return np.zeros(array.shape, dtype=bool)
    marks = [entry is None or entry is np.ma.masked or _is_nan(entry) for entry in array.flat]
    found = np.array(marks, dtype=bool).reshape(array.shape)
    # Without pandas in the process there is none of its marks.
    pandas = sys.modules.get("pandas")
    return found if pandas is None else found | pandas.isna(array)


def feature_names(X: Any) -> list[str] | None:
    """The names of a frame's columns; None where they are no text, or X has none.

    Raises:
        InputError: where some are text and others are not, as scikit-learn refuses them.
    """
    columns = getattr(X, "columns", None)
    return None if columns is None else _text_labels(columns, "column")


def row_names(X: Any) -> list[str] | None:
    """The labels of a frame's rows, as ``feature_names``."""
    index = getattr(X, "index", None)
    return None if index is None or callable(index) else _text_labels(index, "row")


def require_names(names: Sequence[str] | None, expected: Sequence[str] | None, where: str = "X") -> None:
    """Refuse names that are not the expected ones in their order; where either is None, nothing is compared.

    Raises:
        InputError: in scikit-learn's words.
    """
    if names is None or expected is None or list(names) == list(expected):
        return
    differences = [
        f"{what}: {', '.join(map(repr, found[:_SHOWN]))}{', ...' if len(found) > _SHOWN else ''}"
        for what, found in (
            ("feature names unseen at fit time", [name for name in names if name not in expected]),
            ("feature names seen at fit time, yet now missing", [n for n in expected if n not in names]),
        )
        if found
    ]
    raise InputError(
        f"The feature names should match those that were passed during fit. {where} has "
        + ("; ".join(differences) or "them in another order: they must be in the same order as in fit")
    )


def _text_labels(labels: Any, what: str) -> list[str] | None:
    found = list(labels)
    are_text = [isinstance(label, str) for label in found]
    if not found or not any(are_text):
        return None
    if not all(are_text):
        kinds = ", ".join(sorted({type(label).__name__ for label in found}))
        raise InputError(f"the {what} names of a frame must be all text or none of them; there are {kinds}")
    return [str(label) for label in found]


def _is_nan(entry: Any) -> bool:
    return isinstance(entry, float | np.floating) and bool(entry != entry)


def _is_frame(values: Any) -> bool:
    return hasattr(values, "columns") and hasattr(values, "iloc")


def _is_column(values: Any) -> bool:
    """A series, an index or an array of pandas."""
    return hasattr(values, "isna") and hasattr(values, "to_numpy") and hasattr(values, "dtype")


def _is_container(values: Any) -> bool:
    return (
        isinstance(values, np.ma.MaskedArray | list | tuple)
        or hasattr(values, "detach")
        or _is_column(values)
        or _is_frame(values)
    )


def _holds_containers(values: Any) -> bool:
    """True where a list holds, at any depth, something that ``np.asarray`` may take the marks off."""
    for each in values:
        if isinstance(each, list | tuple):
            if _holds_containers(each):
                return True
        elif not isinstance(each, float | int | str) and _is_container(each):
            return True
    return False


def _unmasked(values: Any) -> np.ndarray:
    mask = np.ma.getmaskarray(values)
    if not mask.any():
        return np.asarray(values.data)
    kind = values.dtype.kind
    if kind in "mM":
        return np.asarray(values.filled(np.array("NaT", dtype=values.dtype)))
    dtype = np.float64 if kind in "biu" else values.dtype if kind in "fc" else object
    filled = values.data.astype(dtype)
    filled[mask] = np.nan
    return filled


def _frame_array(frame: Any) -> np.ndarray:
    if all(isinstance(dtype, np.dtype) and dtype.kind in "iuf" for dtype in frame.dtypes):
        return frame.to_numpy()
    columns = [_column_array(frame.iloc[:, place]) for place in range(frame.shape[1])]
    if not columns:
        return frame.to_numpy()
    kinds = {column.dtype.kind for column in columns}
    stacked = np.empty(frame.shape, dtype=np.result_type(*columns) if kinds <= set("biuf") else object)
    for place, column in enumerate(columns):
        # NumPy would make whole numbers of dates; pandas makes objects of them, which are no numbers.
        stacked[:, place] = frame.iloc[:, place].astype(object) if column.dtype.kind in "mM" else column
    return stacked


def _column_array(column: Any) -> np.ndarray:
    if isinstance(column.dtype, np.dtype):
        return np.asarray(column.to_numpy())
    if np.any(column.isna()):
        is_number = getattr(column.dtype, "kind", "O") in "biuf"
        return column.to_numpy(dtype=np.float64, na_value=np.nan) if is_number else np.asarray(column)
    plain = getattr(column.dtype, "numpy_dtype", None)
    return np.asarray(column if plain is None else column.to_numpy(dtype=plain))
