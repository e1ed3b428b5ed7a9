"""What the machine holds, and the refusal of more."""

from __future__ import annotations

import re

import pytest

from kernel_attention.errors import InputError
from kernel_attention.resources import machine_memory, require_memory


def test_the_machine_has_memory_and_what_fits_is_not_refused():
    limit = machine_memory()
    assert limit is not None
    assert limit > 2**28, "or these tests would not run"
    require_memory(limit, "the model", "make it smaller")


def test_more_than_the_machine_has_is_refused_with_what_to_change():
    message = r"the model needs 1,048,576\.0 GiB of memory, this machine has [\d,.]+ GiB: make it smaller"
    with pytest.raises(InputError) as error:
        require_memory(2**50, "the model", "make it smaller")
    assert re.fullmatch(message, str(error.value))
