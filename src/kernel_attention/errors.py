"""The error for bad input, reported in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_FEW = 24  # names that still fit into a message


class InputError(ValueError):
    """Bad input: the message names the argument, the value received and what is accepted."""


def unknown(kind: str, value: object, accepted: Iterable[str], *, listing: str = "") -> InputError:
    """The error for a name that is not in a table, with the nearest names that are.

    Args:
        kind: what the name should have been the name of.
        value: what was received.
        accepted: the names there are. All are given where they are few.
        listing: the command or call that lists them, for tables of many.
    """
    names = sorted(accepted)
    near = nearest(value, names)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    if len(names) > _FEW and listing:
        return InputError(f"unknown {kind} {value!r}{hint} (all {len(names)}: {listing})")
    return InputError(f"unknown {kind} {value!r}{hint} (accepted: {', '.join(names) or 'none'})")


def nearest(value: object, names: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """The names most like ``value``, capitals aside; none where nothing is like it."""
    by_lower = {name.lower(): name for name in names}
    asked = value.lower() if isinstance(value, str) else ""  # nothing is near to None
    return [by_lower[name] for name in difflib.get_close_matches(asked, by_lower, n=count, cutoff=cutoff)]


# The extra of pyproject.toml that installs a package which the core does without.
_EXTRAS = {
    "PIL": "train", "aeon": "timeseries", "datasets": "language", "jinja2": "train", "lightning": "train",
    "matplotlib": "train", "pydantic": "train", "rich": "train", "safetensors": "train", "sklearn": "train",
    "timm": "vision", "tokenizers": "language", "transformers": "language", "yaml": "train",
}  # fmt: skip


def missing_package(error: ModuleNotFoundError, what: str, extra: str | None = None) -> str | None:
    """One line that names the package an import lacks and the extra that installs it.

    Args:
        error: what the import raised.
        what: what was asked for.
        extra: the extra, where it is not the package's usual one.

    Returns:
        The line; None where the package is in no extra, so that the error is a fault of ours.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    extra = extra or _EXTRAS[package]
    return f"{what} needs {package}, which is not installed: pip install 'kernel-attention[{extra}]'"
