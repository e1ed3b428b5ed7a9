"""Contenders and plans that cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kernel_attention_lab.benchmarking import Plan, Setting, contenders

TINY = {"length": (8,), "embed_dim": (8,), "num_heads": (2,), "batch_size": (2,)}


@pytest.fixture(autouse=True)
def _threads():
    """Measuring sets the number of threads; the other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> Setting:
    return Setting(length=8, embed_dim=8, num_heads=2, batch_size=2)


@pytest.fixture
def tiny_plan() -> Plan:
    return Plan(title="tiny", contenders=("sdpa", "eager"), grid=TINY, rounds=1, memory=False, flops=False)


@pytest.fixture
def enter(monkeypatch) -> Callable[..., None]:
    """Adds a contender to the table for one test."""

    def add(name: str, make: Callable[[Setting], nn.Module], **facts: object) -> None:
        contender = contenders.Contender(name, make, **facts)
        monkeypatch.setitem(contenders.CONTENDERS, name, contender)

    return add
