"""The one error a person can cause: bad input, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: the message names the argument, the value received and what is accepted."""


def unknown(kind: str, value: object, accepted: Iterable[str]) -> InputError:
    """The error for a name that is not in a table, with the nearest names that are."""
    names = sorted(accepted)
    by_lower = {name.lower(): name for name in names}
    asked = value.lower() if isinstance(value, str) else ""  # nothing is near to None
    near = difflib.get_close_matches(asked, by_lower, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(by_lower[name]) for name in near)}?" if near else ""
    return InputError(f"unknown {kind} {value!r}{hint} (accepted: {', '.join(names) or 'none'})")
