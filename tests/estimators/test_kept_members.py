"""Members from a folder are those that a fit would train (benchmarks/kept_members.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from kernel_attention.estimators import AttentionClassifier

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the checkout")


@pytest.fixture
def kept_members():
    spec = importlib.util.spec_from_file_location("kept_members", ROOT / "benchmarks" / "kept_members.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.kept_members


def test_a_kept_member_serves_with_and_without_a_readout(kept_members, arrays, small, tmp_path):
    X, labels, _ = arrays
    for readout in (False, True, False):
        alone = AttentionClassifier(**small, readout=readout).fit(X, labels)
        with kept_members(tmp_path) as saved:
            shared = AttentionClassifier(**small, readout=readout).fit(X, labels)
        assert torch.equal(shared._outputs(X), alone._outputs(X))
    assert len(saved) == 1  # the last fit trained no member
    assert len([*tmp_path.iterdir()]) == 1
