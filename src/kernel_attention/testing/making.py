"""How layers are made: on which device, in which precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.testing.battery import check
from kernel_attention.testing.subjects import EMBED_DIM, HEADS, Subject, inputs


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _same_numbers(layer: nn.Module, other: nn.Module, what: str) -> None:
    for (name, value), expected in zip(_tensors(layer).items(), _tensors(other).values(), strict=True):
        assert value.dtype == expected.dtype, f"{what}: {name} is {value.dtype}, not {expected.dtype}"
        assert torch.equal(value, expected), f"{what}: {name} has other numbers than in a new layer"


def _new(case: Subject, **where: Any) -> AttentionLayer:
    torch.manual_seed(1)
    return case.make(EMBED_DIM, HEADS, **where)


@check()
def a_layer_made_on_meta_becomes_a_new_layer(case: Subject) -> None:
    with torch.device("meta"):
        layer = _new(case)
    for name, value in _tensors(layer).items():
        assert value.is_meta, f"{name} was made on {value.device}"
    layer.to_empty(device="cpu")
    for value in _tensors(layer).values():
        value.detach().fill_(float("nan") if value.is_floating_point() else -1)
    torch.manual_seed(1)
    layer.reset_parameters()
    new = _new(case)
    _same_numbers(layer, new, "reset_parameters")
    x = inputs(torch.float32)
    assert torch.equal(layer.eval()(x), new.eval()(x)), "a materialised layer has other outputs"


@check("placement")
def device_and_dtype_say_where_and_in_which_precision_a_layer_is_made(case: Subject) -> None:
    for name, value in _tensors(_new(case, device="meta")).items():
        assert value.is_meta, f"device='meta': {name} was made on {value.device}"
    _same_numbers(
        _new(case, device="cpu", dtype=torch.float32), _new(case, dtype=torch.float32), "device='cpu'"
    )
    for dtype in (torch.float64, torch.bfloat16):
        layer = _new(case, dtype=dtype)
        for name, value in _tensors(layer).items():
            assert value.dtype == dtype or not value.is_floating_point(), f"{dtype}: {name} is {value.dtype}"
        assert layer(inputs(dtype)).isfinite().all(), f"{dtype}: outputs are not finite"
