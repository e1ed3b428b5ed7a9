"""The classifier of positions: what a position may read, and which positions are classified."""

import pytest
import torch
from models.test_causal import CAUSAL

from kernel_attention.errors import InputError
from kernel_attention.models.tokens import PositionClassifier

SIZES = {"embed_dim": 12, "num_heads": 3, "num_layers": 2, "feedforward_dim": 10, "dropout": 0.0}


@pytest.mark.parametrize("is_real", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_does_not_read_ahead(name, is_real):
    torch.manual_seed(0)
    options = {"scaled": {"scaling": "matrix", "max_len": 7}} if name == "scaled" else name
    model = PositionClassifier(5, 4, 7, options, is_real=is_real, is_causal=True, **SIZES).double().eval()
    x = torch.randn(2, 7, 5, dtype=torch.float64) if is_real else torch.randint(5, (2, 7))
    other = x.clone()
    other[:, 4:] = x[:, 4:] + 1 if is_real else (x[:, 4:] + 1) % 5
    with torch.inference_mode():
        y, z = model(x), model(other)
    assert y.shape == (2, 7, 4)
    torch.testing.assert_close(y[:, :4], z[:, :4], rtol=1e-9, atol=1e-9)
    assert not torch.equal(y[:, 4:], z[:, 4:])


def test_without_the_mask_a_position_reads_all():
    torch.manual_seed(0)
    model = PositionClassifier(5, 4, 7, "softmax", **SIZES).eval()
    x = torch.randint(5, (2, 7))
    other = x.clone()
    other[:, -1] = (x[:, -1] + 1) % 5
    assert (model(x)[:, 0] != model(other)[:, 0]).any()


def test_chosen_positions_have_their_logits():
    torch.manual_seed(0)
    model = PositionClassifier(5, 4, 7, "linear", is_causal=True, **SIZES).eval()
    x, chosen = torch.randint(5, (2, 7)), torch.rand(2, 7) > 0.5
    torch.testing.assert_close(model.logits_at(x, chosen), model(x)[chosen])


def test_a_mechanism_without_a_causal_form_is_refused():
    with pytest.raises(InputError, match="causal"):
        PositionClassifier(5, 4, 7, ["softmax", "tensor"], is_causal=True, **SIZES)


def test_a_tied_head_has_the_weights_of_the_embedding():
    torch.manual_seed(0)
    model = PositionClassifier(5, 5, 7, "softmax", tied=True, is_causal=True, **SIZES).double().eval()
    x = torch.randint(5, (2, 7))
    expected = model.encoder(x, None, True) @ model.encoder.embed.weight.T
    torch.testing.assert_close(model(x), expected)
    assert not [name for name in model.state_dict() if name.startswith("head")]
    model(x).sum().backward()
    unseen = [token for token in range(5) if token not in x]
    assert all(model.encoder.embed.weight.grad[token].abs().sum() > 0 for token in unseen)


@pytest.mark.parametrize(("num_outputs", "is_real"), [(4, False), (5, True)])
def test_a_tied_head_needs_the_tokens_as_classes(num_outputs, is_real):
    with pytest.raises(InputError, match="tied=True needs the tokens as classes"):
        PositionClassifier(5, num_outputs, 7, tied=True, is_real=is_real, **SIZES)
