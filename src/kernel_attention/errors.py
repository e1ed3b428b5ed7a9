"""The error for bad input, reported in one line, checks of arguments and files that raise it, and notes.

Notes are remarks that are not errors, written to the logger ``kernel_attention``. Python shows them on
standard error unless logging is configured otherwise.
"""

import difflib
import functools
import logging
import math
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from pathlib import Path

_FEW = 24  # the number of names that fit into a message


class InputError(ValueError):
    """Bad input: the message names the argument, the value received and what is accepted."""


def require_positive(**values: int) -> None:
    """Raise InputError for the first argument that is not a whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value!r} must be a whole number of at least 1")


def require_probability(**values: float) -> None:
    """Raise InputError for the first argument outside [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0.0 <= value < 1.0:
            raise InputError(f"{name}={value!r} must be a probability in [0, 1)")


def require_weight(**values: float) -> None:
    """Raise InputError for the first argument that is not a finite number of at least 0."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0.0 <= value < math.inf:
            raise InputError(f"{name}={value!r} must be a finite number of at least 0")


def reading(what: object) -> AbstractContextManager[None]:
    """Inside the block an OSError becomes an InputError: ``what: cannot be read (reason)``."""
    return _refused(f"{what}: cannot be read")


def writing(what: object) -> AbstractContextManager[None]:
    """Inside the block an OSError becomes an InputError: ``what: cannot be written (reason)``."""
    return _refused(f"{what}: cannot be written")


def require_file(path: Path) -> None:
    """InputError unless this is a regular file or a link to one: a device or a pipe might never end."""
    with reading(path):
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: cannot be read (it is not a regular file)")


@contextmanager
def _refused(said: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{said} ({error.strerror or error})") from None


def unknown(kind: str, value: object, accepted: Iterable[str], *, listing: str = "") -> InputError:
    """The error for a name that is not among the accepted ones, with the nearest; few are all listed.

    ``kind`` is what the name should stand for, such as ``attention mechanism``, and ``listing`` the command
    or call that lists the names where they are many.
    """
    names = sorted(accepted)
    near = nearest(value, names)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    if len(names) > _FEW and listing:
        return InputError(f"unknown {kind} {value!r}{hint} (all {len(names)}: {listing})")
    return InputError(f"unknown {kind} {value!r}{hint} (accepted: {', '.join(names) or 'none'})")


def nearest(value: object, names: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """The names most similar to ``value``, whatever the case of letters; empty where none is similar.

    Where none is spelt alike, names that contain it as a word, or whose words begin with its letters, as
    ``lr`` those of ``learning_rate``.
    """
    by_lower = {name.lower(): name for name in names}
    asked = value.lower() if isinstance(value, str) else ""  # no name is similar to None
    found = difflib.get_close_matches(asked, by_lower, n=count, cutoff=cutoff)
    if not found and len(asked) > 1:
        found = [name for name in by_lower if asked in _words(name)]
        found = found or [name for name in by_lower if asked == "".join(w[0] for w in _words(name) if w)]
    return [by_lower[name] for name in found[:count]]


def _words(name: str) -> list[str]:
    return re.split(r"[\W_]+", name.lstrip("-"))


# The extra of pyproject.toml that installs a package that the layers do not need.
_EXTRAS = {
    "aeon": "timeseries", "lightning_fabric": "estimators", "onnx": "export", "onnxruntime": "export",
    "onnxscript": "export", "pyarrow": "parquet", "pydantic": "estimators", "rich": "estimators",
    "safetensors": "estimators", "sklearn": "estimators", "timm": "vision", "transformers": "transformers",
}  # fmt: skip


def missing_package(error: ModuleNotFoundError, what: str, extra: str | None = None) -> str | None:
    """One line that names the package that an import of ``what`` misses and the extra that installs it.

    ``extra`` is given where it is not the package's usual one. None for a package in no extra: the error is a
    defect of this library then.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    extra = extra or _EXTRAS[package]
    return f"{what} needs {package}, which is not installed: pip install 'kernel-attention[{extra}]'"


def note(sentence: str) -> None:
    """Write a note of one sentence."""
    logging.getLogger("kernel_attention").warning(sentence)


@functools.cache
def note_once(sentence: str) -> None:
    """Write a note the first time in this process."""
    note(sentence)
