"""The baselines equal their formulas written as loops: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import InputError, LinearAttention, SoftmaxAttention
from reference import softmax as reference

HEADS, WIDTH, TOKENS, CONTEXT = 3, 5, 11, 7
EMBED_DIM = HEADS * WIDTH
KINDS = {
    "softmax": {},
    "no_bias": {"bias": False},
    "symmetric": {"symmetric": True},
    "cosine": {"kernel": "cosine"},
}


def build(kernel="softmax", **options) -> SoftmaxAttention | LinearAttention:
    if kernel == "cosine":
        return LinearAttention(EMBED_DIM, HEADS, feature_map="cosine", **options).double()
    return SoftmaxAttention(EMBED_DIM, HEADS, **options).double()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def compare(layer, kind, x, mask, context=None, is_causal=False) -> None:
    options = {key: value for key, value in KINDS[kind].items() if key != "bias"}
    leaves = [x, *layer.parameters()] + ([] if context is None else [context])
    for leaf in leaves:
        leaf.requires_grad_()
    expected = reference.attention(
        x,
        dict(layer.named_parameters()),
        mask,
        num_heads=HEADS,
        context=context,
        is_causal=is_causal,
        **options,
    )
    y = layer(x, context=context, attention_mask=mask, is_causal=is_causal)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None or context is not None else mask
    torch.testing.assert_close(y[real], expected[real])
    downstream = torch.randn_like(y[real])
    torch.testing.assert_close(
        torch.autograd.grad((y[real] * downstream).sum(), leaves),
        torch.autograd.grad((expected[real] * downstream).sum(), leaves),
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("mask_kind", ["none", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_all_gradients_equal_the_loops(kind, mask_kind, is_causal):
    holes = torch.rand(3, TOKENS) < 0.6
    holes[0, 5] = True
    holes[1] = torch.arange(TOKENS) >= TOKENS - 4
    holes[2] = torch.arange(TOKENS) < 1
    mask = holes if mask_kind == "holes" else None
    compare(build(**KINDS[kind]), kind, random(3, TOKENS, EMBED_DIM), mask, is_causal=is_causal)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "cosine"])
def test_cross_attention_equals_the_loops(kind, masked):
    mask = torch.arange(CONTEXT)[None] < torch.tensor([CONTEXT, 4, 1])[:, None] if masked else None
    compare(
        build(**KINDS[kind]), kind, random(3, TOKENS, EMBED_DIM), mask, context=random(3, CONTEXT, EMBED_DIM)
    )


def test_softmax_is_that_of_torch():
    layer = build()
    theirs = torch.nn.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        parts = (layer.q_proj, layer.k_proj, layer.v_proj)
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.load_state_dict(layer.out_proj.state_dict())
    x, mask = random(3, TOKENS, EMBED_DIM), torch.arange(TOKENS)[None] < torch.tensor([11, 4, 1])[:, None]
    expected, _ = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)
    torch.testing.assert_close(layer(x, attention_mask=mask), expected)


def test_the_symmetric_form_has_a_symmetric_kernel_and_no_key_projection():
    layer = build(symmetric=True)
    assert layer.k_proj is None
    assert not layer.supports(context=True)
    assert not any(name.startswith("k_proj") for name, _ in layer.named_parameters())


def test_constant_values_pass_through_softmax_unchanged():
    # The weights of every query sum to one.
    layer, x = build(), random(2, TOKENS, EMBED_DIM)
    with torch.no_grad():
        layer.v_proj.weight.zero_()
    expected = layer.out_proj(layer.v_proj.bias).expand(2, TOKENS, -1)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x, is_causal=True), expected)


def test_dropout_acts_in_training_only():
    layer, x = build(dropout=0.5), random(2, TOKENS, EMBED_DIM)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    without = build()
    without.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), without(x))


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan"), "much", None])
def test_a_dropout_that_is_no_probability_is_refused(dropout):
    with pytest.raises(InputError, match=f"dropout={dropout!r} must be a probability"):
        build(dropout=dropout)
