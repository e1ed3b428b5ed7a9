"""Several affine maps in one product give what their own calls give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernel_attention import create_attention
from kernel_attention.core.parameters import can_join, joint_heads, joint_linear


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_equal_those_of_the_calls(bias):
    maps = [nn.Linear(5, out, bias=bias, dtype=torch.float64) for out in (3, 7, 2)]
    x = torch.randn(2, 11, 5, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(parameter for each in maps for parameter in each.parameters())]
    y, expected = joint_linear(x, *maps), torch.cat([each(x) for each in maps], dim=-1)
    torch.testing.assert_close(y, expected)
    probe = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, probe)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, probe))


def test_the_gradient_can_be_differentiated():
    maps = [nn.Linear(2, 3, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: joint_linear(x, *maps).sin(), (x,))


def test_frozen_maps_get_no_gradient():
    maps = [nn.Linear(2, 3), nn.Linear(2, 3).requires_grad_(False)]
    joint_linear(torch.randn(1, 3, 2), *maps).sum().backward()
    assert maps[0].weight.grad is not None
    assert maps[1].weight.grad is None


def test_autocast_decides_the_precision_as_in_the_calls():
    maps = [nn.Linear(4, 4) for _ in range(2)]
    x = torch.randn(2, 3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        q, k = joint_heads(x, 2, *maps)
        expected = maps[1](x)
    assert q.shape == (2, 2, 3, 2)
    assert torch.equal(k.transpose(1, 2).flatten(2), expected)
    k.sum().backward()
    assert maps[1].weight.grad.dtype == torch.float32


def test_it_takes_the_place_of_plain_calls_on_accelerators_and_where_it_is_asked_for():
    layer, x = create_attention("softmax", embed_dim=6, num_heads=2, device="meta"), torch.empty(2, 3, 6)
    maps = layer.q_proj, layer.k_proj, layer.v_proj
    assert can_join(x.to("meta"), *maps)
    assert not can_join(x.to("meta")[:0], *maps)
    assert not can_join(x, *maps)
    assert can_join(x, *maps, on_cpu=True)
    layer.k_proj.register_forward_hook(lambda *_: None)
    assert not can_join(x.to("meta"), *maps)
