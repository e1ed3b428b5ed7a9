"""What the checks compare by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_attention.errors import InputError


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected)


def refused(call: Callable[[], Any], *words: str) -> None:
    """Check that the call raises InputError with one of the words, in one line."""
    try:
        call()
    except InputError as error:
        message = str(error)
    else:
        raise AssertionError(f"a call was not refused; expected an error that names one of {words}")
    assert any(word in message for word in words), f"refused without one of {words}: {message}"
    assert "\n" not in message, f"more than one line: {message}"


def required(value: Tensor | None) -> Tensor:
    assert value is not None, "the objective is gone"
    return value
