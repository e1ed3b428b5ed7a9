"""Data parallelism over two processes."""

from __future__ import annotations

import pytest
import torch
from contracts.workers import WORLD, train_one_step


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_gradients_under_data_parallelism_are_the_mean_over_the_shards(tmp_path):
    torch.multiprocessing.spawn(train_one_step, args=(str(tmp_path / "meeting_point"),), nprocs=WORLD)
