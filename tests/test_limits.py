"""What no machine can hold is refused before it is built, in one line that says what to change."""

from __future__ import annotations

import re

import pytest
import torch

import kernel_attention as ka
from kernel_attention import InputError, limits

TOO_LARGE = {
    "primal, rank": ("primal", {"rank": 10**7}, ["rank=10000000", "lower rank, rank_multiplier or max_len"]),
    "primal, data-independent": (
        "primal", {"rank": 10**10, "data_dependent": False}, ["rank=10000000000", "lower rank"]
    ),
    "multilinear, order 4": ("multilinear", {"order": 4, "num_heads": 1}, ["order=4", "rank=512"]),
    "multilinear, order 16": ("multilinear", {"order": 16}, ["order=16", "lower order or rank"]),
    "multilinear, learnable": (
        "multilinear", {"variant": "learnable", "order": 5, "rank": 2}, ["variant='learnable'"]
    ),
    "multilinear, rows": (
        "multilinear", {"variant": "data_dependent", "rank": 500, "rank_multiplier": 10**9}, ["rows of w"]
    ),
    "scaled": ("scaled", {"scaling": "matrix", "max_len": 10**6}, ["max_len=1000000", "scaling='symmetric'"]),
    "tensor": ("tensor", {"option": 2, "max_len": 4096}, ["max_len=4096", "option 1"]),
    "tensor, core": ("tensor", {"order": 8, "max_len": 7}, ["order=8"]),
    "pooling": ("scaled_heads", {"pooling": "conv", "factors": 10**9}, ["factors=", "another pooling"]),
    "convolution": ("conv1d", {"kernel_size": 10**10}, ["kernel_size=10000000000"]),
    "grid convolution": ("conv2d", {"kernel_size": 10**6, "grid_size": (2, 2)}, ["kernel_size=1000000"]),
    "random features": (
        "linear", {"feature_map": {"softmax_plus": {"num_features": 10**11}}}, ["num_features=100000000000"]
    ),
    "taylor": ("linear", {"feature_map": {"taylor": {"order": 40}}}, ["order=40", "lower order"]),
    "width": ("softmax", {"embed_dim": 8 * 10**10}, ["embed_dim=80000000000"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_layer_that_no_machine_holds_is_refused_in_one_line(name, peak_memory):
    mechanism, options, words = TOO_LARGE[name]
    before = peak_memory()
    with pytest.raises(InputError) as error:
        ka.create_attention(mechanism, **({"embed_dim": 512, "num_heads": 8} | options))
    message = str(error.value)
    for word in [*words, "GiB", limits.VARIABLE]:
        assert word in message, message
    assert "\n" not in message
    assert peak_memory() - before < 2**28, "something of that size was built"


def test_an_order_that_torch_has_no_tensors_for_is_refused():
    for order in (1, 17, 30, True, 3.0):
        with pytest.raises(
            InputError, match=rf"order={re.escape(repr(order))} must be a whole number from 2 to 16"
        ):
            ka.create_attention("multilinear", 8, 2, order=order)
    layer = ka.MultilinearAttention(4, 2, order=16, rank=1)
    assert layer(torch.randn(1, 3, 4)).isfinite().all()


def test_the_variable_moves_the_limit_both_ways(monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, "0.001")
    with pytest.raises(InputError, match=r"more than the limit of 0.00 GiB; lower embed_dim"):
        ka.create_attention("softmax", 512, 8)
    monkeypatch.setenv(limits.VARIABLE, "1e9")
    limits.require_parameters("anything", 10**15, "nothing")
    for wrong in ("", "much", "0", "-3", "nan"):
        monkeypatch.setenv(limits.VARIABLE, wrong)
        with pytest.raises(InputError, match="must be a positive number of GiB"):
            limits.memory_limit()


def test_the_limit_is_half_of_what_the_narrowest_control_group_has(tmp_path, monkeypatch):
    files = {"memory.max": "max", "a/memory.max": "3000", "a/b/memory.max": "5000"}
    files |= {"memory/a/memory.limit_in_bytes": "9223372036854771712", "memory/memory.limit_in_bytes": "4000"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    listing = tmp_path / "cgroup"
    listing.write_text("12:cpu,memory:/a\n3:pids:/a/b\n0::/a/b\n")
    found = limits._group_limits(listing, tmp_path)
    assert sorted(found) == [3000, 4000, 5000, 9223372036854771712]
    assert limits._group_limits(tmp_path / "none", tmp_path) == []
    monkeypatch.delenv(limits.VARIABLE, raising=False)
    monkeypatch.setattr(limits, "_usable_memory", lambda: 3000)
    assert limits.memory_limit() == 1500
    monkeypatch.setattr(limits, "_usable_memory", lambda: None)
    limits.require_memory("a system that does not say", 10**30, "nothing")


def test_a_size_beyond_every_float_is_still_named():
    with pytest.raises(InputError, match=r"2\^\d+ GiB"):
        limits.require_parameters("anything", 10**400, "nothing")
