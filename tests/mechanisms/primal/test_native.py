"""The pass in C++ gives the numbers of the pass in PyTorch, however the tokens are divided."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention.mechanisms.primal.native import LIBRARY

pytestmark = pytest.mark.usefixtures("restored_threads", "built_engines")
F64 = torch.float64
LONG = 1021  # tokens, a prime: four slices of 256, the last one shorter


def make(width: int = 15, heads: int = 3, dtype: torch.dtype = F64, **options) -> ka.PrimalAttention:
    torch.manual_seed(0)
    return ka.PrimalAttention(width, heads, **{"rank": 4, "eta": 0.3, **options}).to(dtype).train()


def step(layer: ka.PrimalAttention, x: Tensor, impl: str, mask: Tensor | None = None) -> list[Tensor]:
    """Output at the real tokens, J, and the gradients of a training step."""
    layer.impl = impl
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y = layer(x, attention_mask=mask)[real]
    (y.sin().sum() + ka.auxiliary_loss(layer)).backward()
    found = [y.detach(), x.grad[real], *(p.grad for p in layer.parameters())]
    return found if layer.objective is None else [*found, layer.objective.detach()]


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_units_of_work_of_any_number_of_threads(batch, threads):
    torch.set_num_threads(threads)
    layer, x = make(), torch.randn(batch, LONG, 15, dtype=F64)
    torch.testing.assert_close(step(layer, x, "native"), step(layer, x, "fused"), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("width", "heads"), [(10, 2), (32, 2), (64, 2), (64, 1), (96, 3), (28, 4)])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"data_dependent": False}, {"feature_map": "identity"}]
)
def test_heads_of_any_width(width, heads, options):
    layer, x = make(width, heads, **options), torch.randn(2, 300, width, dtype=F64)
    mask = torch.arange(300) < torch.tensor([[300], [17]])
    torch.testing.assert_close(
        step(layer, x, "native", mask), step(layer, x, "fused", mask), rtol=1e-10, atol=1e-11
    )


def test_holes_and_values_of_padding():
    layer, x = make(), torch.randn(2, LONG, 15, dtype=F64)
    mask = torch.rand(2, LONG, generator=torch.Generator().manual_seed(1)) < 0.7
    expected = step(layer, x, "fused", mask)
    hidden = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(step(layer, hidden, "native", mask), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e4, 1e30])
def test_tokens_whose_squares_leave_the_range(size):
    layer = make(8, 2, torch.float32, bias=False, data_dependent=False)
    x = torch.full((1, 300, 8), size)
    x[:, ::7] = torch.randn(1, 43, 8)
    for found, wanted in zip(step(layer, x, "native"), step(layer, x, "reference"), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


def test_a_step_repeated_has_the_same_bits():
    torch.set_num_threads(2)
    layer, x = make(dtype=torch.float32), torch.randn(3, LONG, 15)
    for one, other in zip(step(layer, x, "native"), step(layer, x, "native"), strict=True):
        assert torch.equal(one, other)


def test_sequences_and_weights_that_are_no_blocks_of_memory():
    layer, x = make(), torch.randn(15, LONG, 2, dtype=F64).transpose(0, 2)
    for weight in (layer.w_e, layer.w_r, layer.concat.weight, layer.out_proj.weight, layer.q_proj.weight):
        weight.data = weight.data.mT.contiguous().mT
    torch.testing.assert_close(step(layer, x, "native"), step(layer, x, "fused"), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shape", [(0, 5, 15), (1, 1, 15)])
def test_no_sequences_and_one_token(shape):
    layer, x = make().eval(), torch.randn(shape, dtype=F64)
    layer.impl = "native"
    native = layer(x)
    layer.impl = "reference"
    torch.testing.assert_close(native, layer(x))


def test_what_the_kernels_cannot_do_is_refused():
    layer, x = make(impl="native", max_len=11), torch.randn(1, 11, 15, dtype=F64)
    with pytest.raises(ka.InputError, match="float32 and float64, and the input is in bfloat16"):
        layer.bfloat16()(x.bfloat16())
    with pytest.raises(ka.InputError, match="impl='native' has no data-dependent causal form"):
        layer.double()(x, is_causal=True)


def test_auto_takes_it_once_it_is_built_and_never_before():
    layer, x = make().eval(), torch.randn(1, 300, 15, dtype=F64)
    assert layer.plan(x).engine == "native"
    assert layer.plan(x, compiled=True).engine == "reference"
    assert layer.plan(x.bfloat16()).engine == "fused"
    LIBRARY.is_built = False
    assert layer.plan(x).engine == "fused"
    layer.impl = "native"
    with pytest.raises(ka.InputError, match=r"it is not built: run python -m kernel_attention\.native build"):
        layer(x)
