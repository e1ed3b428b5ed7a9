"""Packed sequences in Hugging Face models with our attention: each has what it has alone, or is refused."""

from __future__ import annotations

import pytest
import torch
from hosts.models_of_hosts import scatter
from hosts.test_interface import build
from torch.testing import assert_close

import kernel_attention as ka
from kernel_attention.hosts.known import TransformersAttention

LENGTHS = (5, 1, 4)
N = sum(LENGTHS)
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])[None]
ENDS = torch.tensor((0, *LENGTHS)).cumsum(dim=0).int()
BERT = {
    "hidden_size": 20, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 17,
    "vocab_size": 50, "max_position_embeddings": 40,
}  # fmt: skip


def ids() -> torch.Tensor:
    return torch.randint(3, 50, (1, N))


def alone(model, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part)[0] for part in x.split(LENGTHS, dim=1)], dim=1)


def bert(transformers, implementation="sdpa", **options):
    config = transformers.BertConfig(**BERT, **options)
    torch.manual_seed(0)
    model = transformers.BertModel._from_config(
        config, attn_implementation=implementation, add_pooling_layer=False
    )
    return scatter(model).double().eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mechanism", ["softmax", "linear", "batch_norm"])
def test_a_decoder_whose_heads_are_ours(transformers, mechanism, implementation):
    """The host says it by a mask of blocks, and by its positions, which it passes on."""
    model, x = build(transformers, "Llama", implementation).double(), ids()
    expected = model(x, position_ids=PLACES, use_cache=False)[0]
    ka.replace_attention(model, {"all": mechanism})
    found = model(x, position_ids=PLACES, use_cache=False)[0]
    assert_close(found, alone(model, x))
    if mechanism == "softmax":
        assert_close(found, expected, rtol=1e-5, atol=1e-5)  # rotary positions are in float32
    two, places = torch.cat([x, ids()]), torch.cat([PLACES, torch.arange(N)[None]])
    both = model(two, position_ids=places, use_cache=False)[0]
    assert_close(both, torch.cat([alone(model, two[:1]), model(two[1:])[0]]))
    most = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    stated = {
        "cu_seq_lens_q": ENDS,
        "cu_seq_lens_k": ENDS,
        **most,
        "seq_idx": torch.tensor([[0] * 5 + [1] + [2] * 4]),
    }
    assert_close(model(x, position_ids=PLACES, use_cache=False, **stated)[0], found)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mechanism", ["primal", "delta", "softmax"])
def test_an_encoder_whose_layers_are_ours(transformers, mechanism, implementation):
    model, x = bert(transformers, implementation), ids()
    report = ka.replace_attention(model, {"all": mechanism})
    assert len(report) == 2
    assert_close(model(x, position_ids=PLACES)[0], alone(model, x))
    assert_close(model(x, cu_seq_lens_q=ENDS, position_ids=PLACES)[0], alone(model, x))


def test_a_decoder_whose_layers_are_ours(transformers):
    model, x = bert(transformers, is_decoder=True, use_cache=False), ids()
    ka.replace_attention(model, {"all": "gated_delta"})
    assert_close(model(x, position_ids=PLACES)[0], alone(model, x))


def test_what_contradicts_itself_is_refused(transformers):
    model, x = bert(transformers), ids()
    ka.replace_attention(model, {"all": "linear"})
    for message, call in (
        ("cu_seq_lens_k is not cu_seq_lens_q", {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS[[0, -1]]}),
        ("max_length_q needs cu_seq_lens_q", {"max_length_q": 5}),
        ("seq_idx has other sequences", {"seq_idx": torch.arange(N)[None]}),
        ("linear: cu_seqlens ends with 6, expected the number of tokens, 10", {"cu_seq_lens_q": ENDS[:-1]}),
    ):
        with pytest.raises(ka.InputError, match=message):
            model(x, **call)
    padded = torch.ones_like(x)
    padded[0, -1] = 0
    with pytest.raises(ka.InputError, match="attention_mask cannot be combined with cu_seqlens"):
        model(x, attention_mask=padded, cu_seq_lens_q=ENDS)


def test_a_mask_of_blocks_says_where_sequences_lie():
    """Of a host that passes no positions; with other holes it is refused as before."""
    layer = ka.create_attention("softmax", 20, 2)
    host, x = TransformersAttention(layer), torch.randn(1, N, 20)
    number = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    blocks = number[:, None] == number
    for is_causal, mask in ((False, blocks), (True, blocks.tril())):
        expected = [layer(part, is_causal=is_causal) for part in x.split(LENGTHS, dim=1)]
        assert_close(host(x, mask[None, None])[0], torch.cat(expected, dim=1))
    for wrong in (blocks.clone().fill_diagonal_(False), blocks | blocks.roll(1, 0), blocks.triu()):
        with pytest.raises(ka.InputError, match="neither padding nor causal"):
            host(x, wrong[None, None])


def test_compiled_positions_that_begin_again_are_refused():
    host, x = TransformersAttention(ka.create_attention("linear", 20, 2)), torch.randn(1, N, 20)
    compiled = torch.compile(host, backend="aot_eager")
    assert_close(compiled(x, position_ids=torch.arange(N)[None])[0], host(x)[0])
    with pytest.raises(RuntimeError, match="position_ids begin again"):
        compiled(x, position_ids=PLACES)
