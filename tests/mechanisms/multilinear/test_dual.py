"""Multilinear attention in the dual: equal to the thesis's formulas in float64 loops, and the contract on
every form.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import kernel_attention as ka
from kernel_attention import DualMultilinearAttention, InputError
from kernel_attention.functional import dual_multilinear_scores
from reference import multilinear as reference

F64 = torch.float64
HEADS, HEAD_DIM, LENGTH = 2, 3, 5
EMBED_DIM = HEADS * HEAD_DIM
MASKS = {
    "": None,
    "right": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool(),
    "holes": torch.tensor([[0, 1, 1, 1, 1], [1, 0, 1, 0, 1]]).bool(),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
FORMS = {
    "": {},
    "order_2": {"order": 2},
    "order_4": {"order": 4, "rank": 1},
    "sampled": {"num_samples": 3},
    "chunked": {"chunk_size": 2},
    "chunked_sampled": {"chunk_size": 2, "num_samples": 4},
    "chunked_order_2": {"chunk_size": 3, "order": 2},
}
every_form = pytest.mark.parametrize("form", FORMS)


def build(form: str = "", dtype: torch.dtype = F64, **changes: object) -> DualMultilinearAttention:
    torch.manual_seed(1)
    layer = DualMultilinearAttention(EMBED_DIM, HEADS, **{"rank": 2, **FORMS[form], **changes})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer.to(dtype)


def inputs(batch: int = 2, length: int = LENGTH, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(batch, length, EMBED_DIM, dtype=dtype)


@every_form
@every_mask
def test_the_layer_is_the_formula_of_the_thesis(form, mask):
    layer, x = build(form), inputs().requires_grad_()
    if layer.order == 4:
        x = x[:, :4].detach().requires_grad_()
        mask = None if mask is None else mask[:, :4]
    weights = dict(layer.named_parameters())
    expected, by_hand = reference.dual_attention(
        x, weights, mask, num_heads=HEADS, rank=layer.rank, num_samples=layer.num_samples
    )
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y = layer(x, attention_mask=mask)
    torch.testing.assert_close(y[real], expected[real])
    for n, scores in enumerate(layer.scores(x, attention_mask=mask)):
        for (b, h), wanted in by_hand.items():
            torch.testing.assert_close(scores[b, h, real[b]], wanted[n])
            assert not scores[b, h, ~real[b]].any()
    probe, leaves = torch.randn_like(y), [x, *layer.parameters()]
    found = torch.autograd.grad((y * probe)[real].sum(), leaves)
    wanted = torch.autograd.grad((expected * probe)[real].sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode
def test_forward_mode_goes_through_slices():
    x, tangents = inputs(), []
    for chunk_size in (None, 2):
        layer = build(chunk_size=chunk_size)
        with forward_ad.dual_level():
            y = layer(forward_ad.make_dual(x, torch.ones_like(x)))
            tangents.append(forward_ad.unpack_dual(y).tangent)
    torch.testing.assert_close(*tangents, rtol=1e-9, atol=1e-9)


@every_mask
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("chunk_size", [2, 9])
def test_slices_give_what_the_whole_tensor_gives(chunk_size, order, mask):
    x = inputs()
    results = []
    for size in (None, chunk_size):
        layer, leaf = build(order=order, chunk_size=size), x.clone().requires_grad_()
        y = layer(leaf, attention_mask=mask)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(results[0], results[1])


@every_mask
def test_as_many_samples_as_tokens_give_the_full_form(mask):
    x = inputs()
    full = build()(x, attention_mask=mask)
    torch.testing.assert_close(build(num_samples=LENGTH)(x, attention_mask=mask), full)
    torch.testing.assert_close(build(num_samples=50)(x, attention_mask=mask), full)
    assert not torch.allclose(build(num_samples=2)(x, attention_mask=mask), full)


def test_sampled_tokens_have_the_scores_of_the_sample_alone():
    layer, x = build(num_samples=3), inputs()
    picked = [0, 2, 4]
    alone = build()
    for everyone, few in zip(layer.scores(x), alone.scores(x[:, picked]), strict=True):
        torch.testing.assert_close(everyone[:, :, picked], few)


def test_the_kernel_tensor_is_a_cubemax():
    layer, x = build(), inputs()
    kernel = layer.kernel_tensor(x)
    assert kernel.shape == (2, HEADS, LENGTH, LENGTH, LENGTH)
    torch.testing.assert_close(kernel.sum((-2, -1)), torch.ones(2, HEADS, LENGTH, dtype=F64))
    padded = layer.kernel_tensor(x, attention_mask=MASKS["right"])
    assert not padded[1, :, -1].any()
    assert not padded[1, :, :, -1].any()
    assert not padded[1, :, :, :, -1].any()
    torch.testing.assert_close(padded[1, :, :4, :4, :4], layer.kernel_tensor(x[1:, :4])[0])


def test_order_2_is_attention_with_its_svd():
    layer, x = build("order_2", rank=LENGTH), inputs()
    q, k = layer.split_heads(layer.q_proj(x)), layer.split_heads(layer.k_proj(x))
    attention = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
    torch.testing.assert_close(layer.kernel_tensor(x), attention)
    u, s, vh = torch.linalg.svd(attention)
    e_1, e_2 = layer.scores(x)
    # K_(1) U_2 S^T and K_(2) U_1 S: singular vectors times squared singular values, up to signs.
    torch.testing.assert_close(e_1.abs(), (u * s[..., None, :].square()).abs())
    torch.testing.assert_close(e_2.abs(), (vh.mT * s[..., None, :].square()).abs())


def test_scores_past_the_number_of_tokens_are_zero():
    layer, x = build(rank=4), inputs(length=3)
    for e in layer.scores(x):
        assert e.shape == (2, HEADS, 3, 4)
        assert e[..., :3].any(dim=2).all()
        assert not e[..., 3:].any()


@every_form
def test_twins_have_finite_outputs_and_gradients(form):
    """Repeated rows have repeated singular values, between which a derivative divides by zero."""
    x = inputs(length=7, dtype=torch.float32)[:, [0, 0, 1, 1, 2, 2, 3]].requires_grad_()
    layer = build(form, torch.float32)
    y = layer(x)
    y.square().sum().backward()
    for value in (y, x.grad, *(p.grad for p in layer.parameters())):
        assert value.isfinite().all()


def test_equal_tokens_have_equal_scores():
    # The kernel tensor of twins has exactly repeated rows: its zero singular values are many times repeated.
    layer, x = build(rank=3), inputs()[:, [0, 0, 1, 1, 2]]
    for e in layer.scores(x):
        torch.testing.assert_close(e[:, :, 0], e[:, :, 1])
        torch.testing.assert_close(e[:, :, 2], e[:, :, 3])


def test_the_decomposition_runs_in_float32_under_autocast():
    layer, x = build(dtype=torch.float32), inputs(dtype=torch.float32)
    sequences = layer.sequences(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for inside, outside in zip(
            dual_multilinear_scores(sequences, 2), dual_multilinear_scores(sequences, 2), strict=True
        ):
            assert inside.dtype == torch.float32
            assert torch.equal(inside, outside)
        layer(x).float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    assert build(dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_a_kernel_tensor_that_does_not_fit_is_refused_naming_the_ways_out():
    layer, x = build(), torch.empty(16, 405, EMBED_DIM, dtype=F64)
    with pytest.raises(InputError, match=re.escape("32 x 405 x 405^2 numbers takes 15.84 GiB")) as error:
        layer(x)
    for word in ("memory_limit=1.0 GiB", "num_samples (sub-sampling", "chunk_size"):
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="405 x 64"):
        build(num_samples=64, memory_limit=0.1)(x)
    with pytest.raises(InputError, match="8 x 405"):
        build(chunk_size=8, memory_limit=0.1)(x)


def test_what_has_no_sound_reading_is_refused():
    with pytest.raises(InputError, match="is_causal=True"):
        build()(inputs(), is_causal=True)
    with pytest.raises(InputError, match="no cross-attention"):
        build()(inputs(), context=inputs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1}, "order=1 must be"),
        ({"rank": 0}, "rank=0 must be"),
        ({"num_samples": 0}, "num_samples=0 must be"),
        ({"chunk_size": -1}, "chunk_size=-1 must be"),
        ({"memory_limit": 0.0}, "memory_limit=0.0 must be"),
        ({"eta": 0.1}, "unknown option of attention 'dual_multilinear' 'eta'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ka.create_attention("dual_multilinear", EMBED_DIM, HEADS, **options)


_PEAK = """
import resource, torch, kernel_attention as ka
layer = ka.DualMultilinearAttention(16, 4, rank=2, chunk_size=1)
x = torch.randn(2, 100, 16, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layer(x).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kilobytes on Linux")
def test_the_thinnest_slices_take_less_memory_than_the_kernel_tensor_in_training():
    done = subprocess.run(
        [sys.executable, "-c", _PEAK], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    kernel = (
        2 * 4 * 100**3 * 4
    )  # the tensor of a batch; training on all of it at once takes six times as much
    assert int(done.stdout) * 1024 < 2.5 * kernel  # a Gram matrix and a graph for every slice took 17
