"""The package ``fla`` as a recurrence: its functions' documented signatures and layouts, by plain loops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernel_attention.tensors.gpu import find_kernel


def recurrence(q, k, v, write: Callable[[Tensor, int, int], Tensor], scale, cu_seqlens) -> Tensor:
    """o_t = scale q_t S_t, (B, T, H, V), with S_t (H, K, V) = write(S, b, t) from 0 in every sequence."""
    assert q.shape == k.shape
    assert q.shape[:3] == v.shape[:3]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    if cu_seqlens is not None:
        assert len(q) == 1
        assert ends[-1] == q.shape[1]
    rows = []
    for b in range(len(q)):
        row = []
        for t in range(q.shape[1]):
            if t in ends:
                state = q.new_zeros(*q.shape[2:], v.shape[-1])
            state = write(state, b, t)
            row.append(scale * torch.einsum("hk,hkv->hv", q[b, t], state))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
):
    def write(state, b, t):
        return state + torch.einsum("hk,hv->hkv", k[b, t], values[b, t])

    values = v
    o = recurrence(q, k, v, write, scale, cu_seqlens)
    if normalize:
        values = torch.ones_like(v[..., :1])
        o = o / (recurrence(q, k, values, write, scale, cu_seqlens) + 1e-10)
    return o, None


def linear_attn_of_one_sequence(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, head_first=False
):
    return chunk_linear_attn(q, k, v, scale, normalize=normalize)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):  # fmt: skip
    assert beta.shape == q.shape[:3]
    assert g is None or g.shape == q.shape[:3]
    assert not use_qk_l2norm_in_kernel

    def write(state, b, t):
        state = state if g is None else state * g[b, t].exp()[:, None, None]
        error = v[b, t] - torch.einsum("hk,hkv->hv", k[b, t], state)
        return state + torch.einsum("hk,hv->hkv", k[b, t] * beta[b, t][:, None], error)

    return recurrence(q, k, v, write, scale, cu_seqlens), None


def chunk_delta_rule(
    q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):  # fmt: skip
    return chunk_gated_delta_rule(q, k, v, None, beta, scale, cu_seqlens=cu_seqlens)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package in ``sys.modules``; the module ``fla.ops.linear_attn``."""
    kernels = {
        "linear_attn": chunk_linear_attn,
        "delta_rule": chunk_delta_rule,
        "gated_delta_rule": chunk_gated_delta_rule,
    }
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, kernel in kernels.items():
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, kernel.__name__, kernel)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    find_kernel.cache_clear()
    yield sys.modules["fla.ops.linear_attn"]
    find_kernel.cache_clear()
