"""Peaks in a process of their own, against what must be alive."""

from __future__ import annotations

import sys

import pytest

from kernel_attention_lab.benchmarking import Setting
from kernel_attention_lab.benchmarking.memory import measure_peaks


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_weights_of_softmax_are_found():
    """Inference holds two (B, h, N, N) tensors at once, scores and weights, and nothing else as large."""
    setting = Setting(length=1024, embed_dim=16, num_heads=2, batch_size=2)
    weights = 4 * 2 * 2 * 1024**2
    peaks = measure_peaks("eager", setting, ("forward", "step"))
    assert 1.9 * weights < peaks["forward"] < 2.6 * weights
    assert peaks["forward"] < peaks["step"] < 4.6 * weights
    assert peaks["how"] == "VmHWM above VmRSS"


@pytest.mark.slow  # a process that imports torch, for one line of text
def test_what_fails_in_the_other_process_is_told():
    peaks = measure_peaks("sdpa", Setting(length=8, embed_dim=9, num_heads=2), ("forward",))
    assert set(peaks) == {"failed"}
    assert "Error" in peaks["failed"]
