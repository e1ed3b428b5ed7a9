"""What every test shares: fixed seeds, and property tests that draw the same examples everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("reproducible", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
