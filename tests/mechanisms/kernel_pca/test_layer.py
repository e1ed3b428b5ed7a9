"""The kernel-PCA layers: equal to the float64 loops of the paper, and the contract on every form of theirs.

The shared battery checks the forms it is told of; here are all of them, with a lambda at which S is neither
empty nor full.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention import InputError
from kernel_attention.core.layer import AttentionLayer
from reference import kernel_pca as reference

BATCH, HEADS, LENGTH, HEAD_DIM, CONTEXT, MAX_LEN = 2, 3, 7, 5, 11, 13
EMBED_DIM = HEADS * HEAD_DIM
F64 = torch.float64

FORMS = {
    "released": ("rpc", {"iterations": 3, "lam": 1.0}),
    "paper": ("rpc", {"iterations": 3, "lam": 0.5, "convention": "paper"}),
    "released-asymmetric": ("rpc", {"iterations": 3, "lam": 0.8, "symmetric": False}),
    "paper-asymmetric": ("rpc", {"iterations": 2, "lam": 0.4, "symmetric": False, "convention": "paper"}),
    "scaled": ("scaled", {}),
    "scaled-matrix": ("scaled", {"scaling": "matrix", "max_len": MAX_LEN}),
    "no-bias": ("rpc", {"iterations": 2, "lam": 0.5, "bias": False}),
    "formulas": ("rpc", {"iterations": 3, "lam": 1.0, "impl": "reference"}),
    "formulas-asymmetric": ("rpc", {"iterations": 3, "lam": 0.8, "symmetric": False, "impl": "reference"}),
}
every_form = pytest.mark.parametrize("form", FORMS)
rpc_forms = pytest.mark.parametrize("form", [form for form, (name, _) in FORMS.items() if name == "rpc"])
scaled_forms = pytest.mark.parametrize("form", ["scaled", "scaled-matrix"])
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
MASKS = {
    "": None,
    "right": torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [3]]),
    "holes": torch.tensor([[0, 1, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0, 1]]).bool(),
}
every_mask = pytest.mark.parametrize("mask", [None, MASKS["holes"]], ids=["", "holes"])


def build(form: str, dtype: torch.dtype = F64, **changes: object) -> AttentionLayer:
    """A layer with every parameter off its initial value: zeros would hide errors."""
    name, options = FORMS[form]
    torch.manual_seed(1)
    layer = ka.create_attention(name, EMBED_DIM, HEADS, **{**options, **changes})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.to(dtype)


def inputs(dtype: torch.dtype = F64, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, EMBED_DIM, dtype=dtype)


def with_garbage(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask[..., None], x, 1e4 * torch.randn_like(x))


def gradients(y: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return torch.autograd.grad((y * torch.randn_like(y)).sum(), leaves)


# Equal to the paper's formulas, in outputs and in every gradient


@rpc_forms
@every_mask
@causal
def test_rpc_equals_the_algorithm_as_printed(form, mask, is_causal):
    layer, x = build(form), inputs().requires_grad_()
    y = layer(with_garbage(x, mask), attention_mask=mask, is_causal=is_causal)
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool) if mask is None else mask
    y = y.where(real[..., None], 0.0)
    weights = dict(layer.named_parameters())
    wanted, share = reference.rpc(
        x, weights, mask, num_heads=HEADS, iterations=layer.iterations, lam=layer.lam,
        convention=layer.convention, is_causal=is_causal,
    )  # fmt: skip
    assert 0.1 < share < 0.9  # both sides of the threshold are met
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(gradients(y, x, *weights.values()), gradients(wanted, x, *weights.values()))


@scaled_forms
@every_mask
@causal
def test_scaled_equals_equation_12(form, mask, is_causal):
    layer, x = build(form), inputs().requires_grad_()
    y = layer(with_garbage(x, mask), attention_mask=mask, is_causal=is_causal)
    weights = dict(layer.named_parameters())
    wanted = reference.scaled(x, weights, mask, num_heads=HEADS, is_causal=is_causal)
    if mask is not None:
        y, wanted = (out.where(mask[..., None], 0.0) for out in (y, wanted))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(gradients(y, x, *weights.values()), gradients(wanted, x, *weights.values()))


@scaled_forms
@pytest.mark.parametrize("masked", [False, True])
def test_scaled_reads_keys_and_values_from_the_context(form, masked):
    layer, x, context = build(form), inputs().requires_grad_(), inputs(length=CONTEXT).requires_grad_()
    mask = torch.rand(BATCH, CONTEXT) < 0.6 if masked else None
    weights = dict(layer.named_parameters())
    leaves = (x, context, *weights.values())
    y = layer(x, context=with_garbage(context, mask), attention_mask=mask)
    wanted = reference.scaled(x, weights, mask, num_heads=HEADS, context=context)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(gradients(y, *leaves), gradients(wanted, *leaves))


def test_a_new_scaled_layer_is_softmax_attention():
    x = inputs(torch.float32)
    softmax = ka.create_attention("softmax", EMBED_DIM, HEADS)
    for form in ("scaled", "scaled-matrix"):
        name, options = FORMS[form]
        layer = ka.create_attention(name, EMBED_DIM, HEADS, **options)
        missing, unexpected = layer.load_state_dict(softmax.state_dict(), strict=False)
        assert (len(missing), unexpected) == (1, [])
        for is_causal in (False, True):
            torch.testing.assert_close(layer(x, is_causal=is_causal), softmax(x, is_causal=is_causal))


def test_one_step_of_rpc_without_a_sparse_part_is_the_symmetric_baseline():
    layer, x = build("released", iterations=1, lam=1e9), inputs()
    symmetric = ka.create_attention("symmetric", EMBED_DIM, HEADS).to(F64)
    symmetric.load_state_dict({name.replace("k_proj", "q_proj"): w for name, w in layer.state_dict().items()})
    torch.testing.assert_close(layer(x), symmetric(x))
    torch.testing.assert_close(layer.kernel_matrix(x), symmetric.kernel_matrix(x))


# The contract


def extreme() -> dict[str, Tensor]:
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    alternating = 1e4 * (1.0 - 2.0 * (torch.arange(LENGTH) % 2))[None, :, None]
    return {
        "zeros": torch.zeros_like(x),
        "zero_rows": x * (torch.arange(LENGTH) % 2)[None, :, None],
        "constant": torch.full_like(x, 3.0),
        "large": 1e4 * x,
        "large_constant": torch.full_like(x, -1e4),
        "alternating": alternating.expand_as(x).clone(),
        "one_token": x[:, :1].clone(),
        "one_large_token": 1e4 * x[:, :1],
        "one_zero_token": torch.zeros_like(x[:, :1]),
    }


@pytest.mark.parametrize("form", ["released", "paper", "released-asymmetric"])
def test_extreme_inputs_without_biases_give_finite_outputs_and_gradients(form):
    # Zero tokens are zero keys then, the case in which mu would be infinite.
    for name, x in extreme().items():
        one = torch.arange(x.size(1))[None].expand(BATCH, -1) == 0
        for mask in (None, one):
            for is_causal in (False, True):
                layer, leaf = build(form, torch.float32, bias=False), x.clone().requires_grad_()
                y = layer(leaf, attention_mask=mask, is_causal=is_causal)
                values = (y, *gradients(y, leaf, *layer.parameters()))
                assert all(value.isfinite().all() for value in values), (name, is_causal, mask is None)


@every_form
def test_dropout_is_for_training_and_follows_the_seed(form):
    layer, x = build(form, dropout=0.4), inputs()
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.allclose(layer(x), first)
    torch.testing.assert_close(layer.eval()(x), build(form)(x))


# For analysis


@every_form
@every_mask
def test_the_kernel_matrix_is_what_multiplies_the_values(form, mask):
    layer, x = build(form), inputs()
    matrix = layer.kernel_matrix(x, attention_mask=mask)
    assert matrix.shape == (BATCH, HEADS, LENGTH, LENGTH)
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool) if mask is None else mask
    assert not matrix.masked_fill(real[:, None, :, None] & real[:, None, None, :], 0.0).any()
    y = layer.out_proj(layer.merge_heads(matrix @ layer.split_heads(layer.v_proj(x))))
    torch.testing.assert_close(y[real], layer(x, attention_mask=mask)[real])


def test_the_pursuit_of_a_layer_shows_what_it_took_for_corruption():
    # One entry of one key is grossly wrong; as printed, S finds it and nothing else in the first step.
    layer, x = build("paper", iterations=1, lam=4.0), inputs()
    layer.k_proj.weight.data.copy_(torch.eye(EMBED_DIM))
    layer.k_proj.bias.data.zero_()
    x[1, 4, 8] = 1e3
    sparse = layer.merge_heads(layer.pursuit(x).sparse)
    assert sparse.nonzero().tolist() == [[1, 4, 8]]
    assert 0 < sparse[1, 4, 8] < 1e3


# Options


def test_cross_attention_of_rpc_is_refused():
    with pytest.raises(InputError, match="context was given, but this mechanism has no cross-attention"):
        build("released")(inputs(), context=inputs())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rpc", {"iterations": 0}, "iterations=0 must be a whole number of at least 1"),
        ("rpc", {"lam": 0.0}, "lam=0.0 must be a positive number"),
        ("rpc", {"lam": float("inf")}, "lam=inf must be a positive number"),
        ("rpc", {"convention": "release"}, "unknown convention 'release'; did you mean 'released'"),
        ("rpc", {"dropout": 1.0}, "dropout=1.0 must be a probability"),
        ("scaled", {"scaling": "scalar"}, "unknown scaling 'scalar'"),
        ("scaled", {"scaling": "matrix"}, "max_len=None: scaling='matrix' needs max_len"),
        ("scaled", {"scaling": "matrix", "max_len": 0}, "max_len=0 must be a whole number"),
        ("scaled", {"dropout": -0.1}, "dropout=-0.1 must be a probability"),
    ],
)
def test_bad_options_are_refused_with_the_value(name, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ka.create_attention(name, EMBED_DIM, HEADS, **options)


def test_a_sequence_longer_than_the_learnt_matrix_is_refused():
    layer = build("scaled-matrix")
    with pytest.raises(InputError, match="sequence length 14 exceeds max_len=13"):
        layer(inputs(length=14))
    with pytest.raises(InputError, match="sequence length 14 exceeds max_len=13"):
        layer(inputs(), context=inputs(length=14))
