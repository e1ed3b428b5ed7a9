"""The largest memory of a process, against what it must have held."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kernel_attention_lab import peak_memory
from kernel_attention_lab.peak_memory import peak_resident, reset_peak_resident

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BLOCK = 64 * 2**20


@LINUX
def test_a_block_that_is_gone_counts_until_the_peak_is_reset():
    before = reset_peak_resident()
    block = torch.ones(BLOCK, dtype=torch.uint8)
    del block
    assert peak_resident() - before > 0.9 * BLOCK
    resident = reset_peak_resident()
    assert peak_resident() - resident < 0.5 * BLOCK


@LINUX
def test_without_the_status_file_it_is_the_peak_that_getrusage_tells(forks):
    script = (
        "import torch\nfrom pathlib import Path\nfrom kernel_attention_lab import peak_memory as p\n"
        f"block = torch.ones({BLOCK}, dtype=torch.uint8)\nfirst = p.peak_resident()\n"
        "p._STATUS = Path('/nowhere')\nprint(first, p.peak_resident())"
    )
    process = forks.run("-c", script)
    status, usage = map(int, process.stdout.split())
    assert usage > 0.95 * status > 0.95 * BLOCK  # it may be that of the process that forked


def test_a_system_that_tells_nothing_gives_none(monkeypatch):
    monkeypatch.setattr(peak_memory, "_STATUS", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert peak_resident() is None
    assert reset_peak_resident() is None
