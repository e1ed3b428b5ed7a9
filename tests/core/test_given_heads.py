"""A mechanism between projections made elsewhere is the mechanism of the layer."""

import pytest
import torch

import kernel_attention as ka

BATCH, LENGTH, EMBED_DIM, HEADS = 3, 11, 20, 4
RIGHT = torch.arange(LENGTH) < torch.tensor([11, 7, 3])[:, None]
MASKS = {"none": None, "right": RIGHT, "left": RIGHT.flip(1)}
LAYERS = {
    "softmax": {}, "symmetric": {}, "linear": {"feature_map": "frobenius"}, "cosine": {}, "sparse": {},
    "batch_norm": {"normalize": True}, "scaled_heads": {}, "batch_norm_scaled_heads": {},
    "primal_values": {"eta": 0.1}, "rpc": {"symmetric": False}, "scaled": {"max_len": LENGTH},
}  # fmt: skip


def make(name: str) -> ka.AttentionLayer:
    torch.manual_seed(0)
    return ka.create_attention(name, EMBED_DIM, HEADS, **LAYERS[name]).double()


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LAYERS)
def test_given_heads_have_the_outputs_of_the_layer(name, mask, causal):
    layer, x, mask = make(name), torch.randn(BATCH, LENGTH, EMBED_DIM, dtype=torch.float64), MASKS[mask]
    expected = layer(x, attention_mask=mask, is_causal=causal)
    objective = ka.auxiliary_loss(layer)
    q, k, v = (
        layer.split_heads((projection or layer.q_proj)(x))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    found = layer.attend_heads(q, k, v, attention_mask=mask, is_causal=causal)
    found = layer.out_proj(layer.merge_heads(found))
    real = slice(None) if mask is None else mask
    torch.testing.assert_close(found[real], expected[real], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ka.auxiliary_loss(layer), objective, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_reads_queries_alone_gives_the_last_row_from_all_keys(name):
    """The promise behind a cache of keys and values; a layer without it has another last row."""
    layer = make(name)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM, dtype=torch.float64)
    q, k, v = (
        layer.split_heads((projection or layer.q_proj)(x))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    expected = layer.attend_heads(q, k, v, is_causal=True)[:, :, -1:]
    if layer.reads_queries_alone():
        torch.testing.assert_close(layer.attend_heads(q[:, :, -1:], k, v), expected, rtol=1e-12, atol=1e-12)
    assert layer.reads_queries_alone() == (name in ("softmax", "cosine"))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("primal", {}, "no weighted values"),
        ("conv1d", {}, "convolution runs over the features of all heads"),
        ("scaled_heads", {"pooling": "conv"}, "pooling='conv' reads tokens before they are projected"),
        ("scaled_heads", {"pooling": "max"}, "pooling='max' reads tokens before they are projected"),
    ],
)
def test_a_layer_that_takes_no_heads_says_why(name, options, reason):
    layer = ka.create_attention(name, EMBED_DIM, HEADS, **options)
    assert reason in layer.why_not_heads()
