"""The causal model: no look ahead in any mechanism, tied weights, and the papers' layouts."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention.errors import InputError
from kernel_attention.models import CausalLanguageModel

# The battery holds every mechanism to causality, padding and decoding. What a model adds is the same for all,
# so the quick tests have one of each kind of state: keys, sums, a recurrence, open blocks, all inputs.
KINDS = ("softmax", "primal", "delta", "scaled_heads", "rpc")
CAUSAL = [
    mechanism.name if mechanism.name in KINDS else pytest.param(mechanism.name, marks=pytest.mark.slow)
    for mechanism in ka.list_attention()
    if mechanism.causal
]
VOCABULARY, LENGTH = 13, 11


def small(attention="softmax", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 6, "num_heads": 2, "num_layers": 2, "feedforward_dim": 7, "dropout": 0.0}
    return CausalLanguageModel(VOCABULARY, LENGTH, attention, **{**sizes, **options}).double().eval()


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", CAUSAL)
def test_no_position_sees_a_later_token(name, norm_first, tokens):
    """Logits of a prefix are those of the text at the same positions, whatever follows, in every layer."""
    model = small(name, norm_first=norm_first)
    cut = 5
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % VOCABULARY
    with torch.no_grad():
        full = model(tokens)
        torch.testing.assert_close(model(changed)[:, :cut], full[:, :cut], rtol=0, atol=1e-12)
        torch.testing.assert_close(model(tokens[:, :cut]), full[:, :cut], rtol=0, atol=1e-12)
        assert (model(changed)[:, cut] - full[:, cut]).abs().max() > 1e-8


def test_last_positions_are_those_of_the_whole(tokens):
    """The product with the vocabulary's weights has other shapes, so its sums of d terms round otherwise."""
    model = small(["softmax", "primal"])
    with torch.no_grad():
        last, whole = model(tokens, last=4), model(tokens)[:, -4:]
        # |x . w| <= sqrt(d) |w| after the layer norm; each of d products rounds once, on either side.
        largest = model.embedding.weight.norm(dim=1).max() * 6**0.5 + model.output_bias.abs().max()
        assert (last - whole).abs().max() <= 2 * 7 * torch.finfo(torch.float64).eps * 6**0.5 * largest


def test_tied_weights_are_one_parameter(tokens):
    """One V x d matrix less, and its gradient is the sum of both uses'."""
    tied, untied = small(), small(tied=False)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == VOCABULARY * 6
    untied.load_state_dict(tied.state_dict() | {"output_weight": tied.embedding.weight})
    torch.testing.assert_close(tied(tokens), untied(tokens))
    for model in (tied, untied):
        model(tokens).square().sum().backward()
    both = untied.embedding.weight.grad + untied.output_weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both)


@pytest.mark.parametrize(
    "spec",
    [{"conv2d": {"grid_size": (1, 1)}}, "dual_multilinear", "tensor", {"batch_norm": {"kernel": "linear"}}],
)
def test_a_mechanism_without_a_causal_form_is_refused(spec):
    with pytest.raises(InputError, match="cannot be a layer of a causal model"):
        small(spec)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(2, LENGTH + 1, dtype=torch.long), "sequence length 12 exceeds max_len=11"),
        (torch.zeros(2, 3), "expected whole numbers"),
        (torch.zeros(3, dtype=torch.long), "expected whole numbers"),
    ],
)
def test_bad_tokens(bad, message):
    with pytest.raises(InputError, match=message):
        small()(bad)


def test_bad_sizes():
    with pytest.raises(InputError, match="unknown positions"):
        small(positions="none")
    with pytest.raises(InputError, match="vocabulary_size=0"):
        CausalLanguageModel(0, 3)
