"""Token by token, a mechanism that decodes gives what its parallel causal form gives; the others say so."""

from __future__ import annotations

import math

import pytest
import torch
from contracts.cases import BATCH, EMBED_DIM, HEAD_DIM, HEADS, cases_where, every_case, inputs, right_padding

from kernel_attention import InputError, create_attention
from kernel_attention.functional import KeyValueCache, move, state_bytes
from kernel_attention.testing import decoded


def decodes(case) -> bool:
    return case.mechanism.decoding != "no" and case.causal


one_variant_each = cases_where(decodes, others_slow=True)
defaults = cases_where(lambda case: decodes(case) and not case.variant_name)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def caches(state):
    """The key-value caches inside a state."""
    if isinstance(state, KeyValueCache):
        return [state]
    parts = state if isinstance(state, tuple) else vars(state).values() if hasattr(state, "__dict__") else ()
    return [cache for part in parts for cache in caches(part)]


def tensors(state):
    """Every tensor of a state."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state if isinstance(state, tuple) else vars(state).values() if hasattr(state, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors(part)]


@every_case
def test_a_layer_says_whether_it_decodes(case):
    assert case.build().supports(decoding=True) == decodes(case)


@one_variant_each
def test_a_state_moves_between_devices(case):
    layer = case.build()
    _, state = layer.prefill(inputs())
    for moved in (state.to("meta"), move(state, "meta")):
        assert type(moved) is type(state)
        assert tensors(moved)
        assert all(tensor.device.type == "meta" for tensor in tensors(moved))


@one_variant_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_caches_have_the_layers_precision(case, dtype):
    layer = case.build(dtype)
    y, state = decoded(layer, inputs(dtype, length=3), layer.initial_state(BATCH))
    assert y.dtype == dtype
    assert not y.requires_grad
    assert all(cache.keys.dtype == cache.values.dtype == dtype for cache in caches(state))


@defaults
def test_the_state_grows_as_the_table_says(case):
    longest = 256
    options = {"max_len": longest} if "max_len" in case.mechanism.options else {}
    layer = case.build(torch.float32, **options)
    state, sizes, held = layer.initial_state(2), [], []
    for _ in range(longest):
        _, state = layer.step(torch.randn(2, EMBED_DIM), state)
        sizes.append(state_bytes(state))
        held += [cache.keys for cache in caches(state)]
    if case.mechanism.decoding == "constant":
        assert len(set(sizes)) == 1
        return
    factors = getattr(layer, "factors", (1,) * HEADS)
    assert (max(factors) > 1) == (case.mechanism.decoding == "N / f")
    rows = sum(math.ceil(longest / factor) for factor in factors)
    # 256 is a power of two times 16, so that the buffers are exactly full; 1 KB for the rest.
    assert sizes[-1] - 2 * 2 * 4 * HEAD_DIM * rows in range(1025)
    assert sizes[-1] <= 2.2 * sizes[longest // 2 - 1]
    buffers = {keys.data_ptr() for keys in held}  # all alive: no address is used twice
    assert len(buffers) <= len(caches(state)) * 5  # 16, 32, .., 256 rows: a logarithmic number of copies


@defaults
@pytest.mark.parametrize("shape", [(2, 1, EMBED_DIM), (2, EMBED_DIM + 1), (EMBED_DIM,)])
def test_a_token_of_another_shape_is_refused(case, shape):
    layer = case.build()
    with pytest.raises(InputError, match=r"step: x has shape \(.*\), expected \(B, 15\)"):
        layer.step(torch.zeros(shape, dtype=torch.float64), layer.initial_state(2))


# Forms that the battery's variants leave out.
FURTHER = [
    ("primal", {"rank": 2, "rank_multiplier": 2, "max_len": 17, "feature_map": "frobenius"}),
    ("primal", {"rank": 2, "data_dependent": False, "feature_map": "frobenius", "running_means": False}),
    ("primal", {"rank": 2, "data_dependent": False, "feature_map": "frobenius"}),
    ("multilinear", {"variant": "data_dependent", "max_len": 17, "feature_map": "cosine", "rank": 2}),
    ("scaled_heads", {"factors": [1, 2, 3], "kernel": {"linear": {"feature_map": "frobenius"}}}),
    (
        "scaled_heads",
        {"factors": 3, "pooling": "conv", "kernel": {"linear": {"feature_map": "softmax_plus"}}},
    ),
    ("scaled_heads", {"factors": [4, 1, 4], "pooling": "max", "kernel": {"sparse": {"pattern": "fixed"}}}),
    ("batch_norm_scaled_heads", {"factors": 2, "beta": 0.3, "pooling": "conv", "normalize": True}),
    ("batch_norm", {"normalize": True, "kernel": {"sparse": {"stride": 3}}}),
    ("conv1d", {"kernel_size": 1}),
    ("conv1d", {"kernel": {"sparse": {"stride": 3}}, "conv_weights": "separable"}),
]


@pytest.mark.parametrize(("name", "options"), FURTHER, ids=str)
def test_further_forms_equal_the_parallel_form(name, options):
    layer, x = create_attention(name, EMBED_DIM, HEADS, **options).double(), inputs()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = layer(x, is_causal=True).detach()
    close(decoded(layer, x, layer.initial_state(BATCH))[0], expected)
    mask = right_padding((5,) * BATCH)  # the lengths are equal, but the layer cannot know
    _, state = layer.prefill(x[:, :5], mask)
    close(decoded(layer, x[:, 5:], state)[0], expected[:, 5:])


def test_options_without_a_causal_form_are_named():
    for name, options, message in [
        ("conv2d", {"grid_size": (2, 3)}, "a convolution over a grid has no causal form"),
        ("batch_norm", {"kernel": "linear"}, "has no causal form in linear time"),
        ("rpc", {}, "RobustPrincipalAttention does not decode step by step"),
        ("primal", {"impl": "fused", "eta": 0.1}, "impl='fused' has no data-dependent causal form"),
        ("multilinear", {"impl": "fused"}, "impl='fused' has no causal form"),
        ("primal", {}, "max_len=None"),
        ("multilinear", {"variant": "data_dependent"}, "max_len=None"),
    ]:
        layer = create_attention(name, EMBED_DIM, HEADS, **options)
        assert not layer.supports(decoding=True)
        with pytest.raises(InputError, match=message):
            layer.initial_state(1)


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_a_batch_size_is_a_whole_number(size):
    layer = create_attention("softmax", EMBED_DIM, HEADS)
    with pytest.raises(InputError, match="batch_size="):
        layer.initial_state(size)
