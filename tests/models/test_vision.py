"""The vision transformer: what it computes, what drops out, other image sizes, what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from kernel_attention import InputError, auxiliary_loss
from kernel_attention.models import VisionTransformer
from kernel_attention.models.encoder_layer import StochasticDepth
from kernel_attention.models.vision import interpolate_positions

# Rows, columns, channels, width, heads and classes differ, so that a swapped axis cannot pass.
IMAGE, PATCH, GRID, CLASSES, BATCH = (6, 10), 2, (3, 5), 7, 4
SMALL = {"embed_dim": 28, "num_heads": 4, "num_layers": 3, "feedforward_dim": 31}
FACTORS = [1, 1, 2, 4]
RPC = {"rpc": {"iterations": 4, "lam": 4.0}}
PRIMAL = {"primal": {"rank": 3, "eta": 0.05}}
PAPERS = {
    "softmax": "softmax",
    "linear": "linear",
    "symmetric": "symmetric",
    "batch norm": "batch_norm",
    "scaled heads": {"scaled_heads": {"factors": FACTORS}},
    "batch norm, scaled heads": {"batch_norm_scaled_heads": {"factors": FACTORS}},
    "convolution": "conv2d",
    "scaled, symmetric": {"scaled": {"scaling": "symmetric"}},
    "scaled, matrix": {"scaled": {"scaling": "matrix"}},
    "rpc in the first layer": [RPC, "symmetric", "symmetric"],
    "rpc in all": {"rpc": {"iterations": 2, "lam": 3.0}},
    "rpc, asymmetric": [{"rpc": {"iterations": 4, "symmetric": False}}, "softmax", "softmax"],
    "primal in the last": ["softmax", "softmax", PRIMAL],
}


def build(attention="softmax", **options) -> VisionTransformer:
    return VisionTransformer(IMAGE, PATCH, CLASSES, attention, **{**SMALL, **options})


def images(count: int = BATCH, size: tuple[int, int] = IMAGE, dtype=torch.float32) -> torch.Tensor:
    return torch.rand(count, 3, *size, dtype=dtype)


def moved(model: VisionTransformer) -> VisionTransformer:
    """Every parameter off its first value: zero biases and unit norms would hide a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


# What is computed


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_the_model_is_patches_positions_pre_norm_layers_norm_head(pooling):
    model = moved(build(pooling=pooling, dtype=torch.float64)).eval()
    model.set_scale([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    x = images(dtype=torch.float64)
    scaled = (x - model.input_mean.view(3, 1, 1)) / model.input_std.view(3, 1, 1)
    tokens = [
        torch.einsum("bcij,dcij->bd", scaled[:, :, i : i + PATCH, j : j + PATCH], model.patches.weight)
        + model.patches.bias
        for i in range(0, IMAGE[0], PATCH)
        for j in range(0, IMAGE[1], PATCH)
    ]
    if pooling == "class":
        tokens.insert(0, model.class_token.expand(BATCH, -1))
    h = torch.stack(tokens, dim=1) + model.positions
    for layer in model.layers:
        h = h + layer.attention(layer.norm1(h))
        h = h + layer.linear2(F.gelu(layer.linear1(layer.norm2(h))))
    h = F.layer_norm(h, (28,), model.norm.weight, model.norm.bias, 1e-6)
    torch.testing.assert_close(model.encode(x), h)
    pooled = h[:, 0] if pooling == "class" else h.mean(dim=1)
    torch.testing.assert_close(model(x), model.head(pooled))


def test_a_new_model_starts_as_deit_does():
    """Linear weights and positions with deviation 0.02 within 5 deviations, and no bias."""
    model = build(embed_dim=64, num_layers=2, feedforward_dim=256)
    drawn = [model.positions, model.class_token]
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            drawn.append(module.weight)
            assert not module.bias.any()
    weights = torch.cat([weight.detach().flatten() for weight in drawn])
    assert weights.abs().max() <= 0.1
    # The deviation of n normal numbers has the relative error 1 / sqrt(2 n); 5 of them.
    assert abs(weights.std().item() / 0.02 - 1) <= 5 / (2 * weights.numel()) ** 0.5


# The papers' models


@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize("name", PAPERS)
def test_a_training_step_moves_every_weight_of_the_papers_models(name, pooling):
    torch.manual_seed(0)
    model = build(PAPERS[name], pooling=pooling, drop_path=0.1).train()
    before = {key: value.clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(images(8)), torch.arange(8) % CLASSES) + auxiliary_loss(model)
    loss.backward()
    for key, value in model.named_parameters():
        assert value.grad is not None, key
        assert value.grad.isfinite().all(), key
    optimizer.step()
    # Softmax does not see the keys' bias: its gradient is rounding.
    weights = [item for item in model.named_parameters() if not item[0].endswith("k_proj.bias")]
    assert [key for key, value in weights if torch.equal(value, before[key])] == []
    logits = model.eval()(images())
    assert logits.shape == (BATCH, CLASSES)
    assert logits.isfinite().all()


def test_a_mechanism_gets_the_grid_the_class_token_and_the_number_of_tokens():
    for pooling, first in (("class", 1), ("mean", 0)):
        model = build(["conv2d", {"scaled": {"scaling": "matrix"}}, PRIMAL], pooling=pooling, dropout=0.1)
        convolved, scaled, primal = (layer.attention for layer in model.layers)
        assert (convolved.convolution.grid_size, convolved.convolution.class_tokens) == (GRID, first)
        assert scaled.s.shape == (4, first + 15, first + 15)
        assert primal.num_rows == first + 15
        assert convolved.dropout == scaled.dropout == 0.1


# Stochastic depth


def test_stochastic_depth_zeroes_samples_and_keeps_the_mean():
    x = torch.ones(20_000, 3, 2)
    y = StochasticDepth(0.3)(x)
    per_sample = y.flatten(1)
    assert (per_sample == per_sample[:, :1]).all()
    assert {round(value, 6) for value in per_sample[:, 0].tolist()} == {0.0, round(1 / 0.7, 6)}
    # The share of zeros has the deviation sqrt(0.3 * 0.7 / 20000) = 0.0032; 5 of them.
    assert abs((per_sample[:, 0] == 0).float().mean().item() - 0.3) <= 0.017


def test_stochastic_depth_grows_over_the_layers_and_is_off_in_evaluation():
    model = build(drop_path=0.2)
    rates = [layer.drop_path.probability for layer in model.layers]
    assert rates == pytest.approx([0.0, 0.1, 0.2])
    assert [layer.drop_path.probability for layer in build(drop_path=0.2, num_layers=1).layers] == [0.0]
    x = images()
    model.train()
    assert not torch.equal(model(x), model(x))
    model.eval()
    plain = build()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), plain.eval()(x), rtol=0, atol=0)


def test_a_left_out_layer_passes_its_input_on():
    layer = build(drop_path=0.9).layers[2].train()
    x = torch.randn(64, 15, 28)
    same = [torch.equal(row, before) for row, before in zip(layer(x), x, strict=True)]
    assert 0 < sum(same) < 64  # 0.81 of the samples lose attention and feed-forward network


# Other image sizes


def test_a_resized_model_keeps_its_weights_and_interpolates_its_positions():
    model = moved(build(["conv2d", RPC, "softmax"], dropout=0.1, drop_path=0.1)).eval()
    model.set_scale([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    other = model.resized((8, 6))
    assert (other.image_size, other.grid_size) == ((8, 6), (4, 3))
    assert not other.training
    state, resized = model.state_dict(), other.state_dict()
    assert {key for key in state if not torch.equal(state[key], resized[key])} == {"positions"}
    assert torch.equal(resized["positions"][0], state["positions"][0])
    assert other.layers[0].attention.convolution.grid_size == (4, 3)
    assert other(images(size=(8, 6))).isfinite().all()
    x = images()
    torch.testing.assert_close(model.resized(IMAGE)(x), model(x), rtol=0, atol=0)


def test_positions_linear_in_row_and_column_stay_linear_inside():
    """Cubic interpolation is exact for straight lines where it does not read over the edge."""
    row, column = torch.meshgrid(torch.arange(12.0), torch.arange(16.0), indexing="ij")
    table = torch.stack([row, column], dim=-1).flatten(0, 1).double()
    token = torch.tensor([[5.0, -3.0]], dtype=torch.float64)
    larger = interpolate_positions(torch.cat([token, table]), (12, 16), (24, 32))
    assert torch.equal(larger[:1], token)
    grid = larger[1:].unflatten(0, (24, 32))[6:-6, 6:-6]
    expected_row = ((torch.arange(24.0) + 0.5) / 2 - 0.5)[6:-6, None].expand(12, 20)
    expected_column = ((torch.arange(32.0) + 0.5) / 2 - 0.5)[None, 6:-6].expand(12, 20)
    torch.testing.assert_close(grid, torch.stack([expected_row, expected_column], dim=-1).double())


def test_weights_whose_shape_follows_the_number_of_tokens_are_not_resized():
    model = build(["softmax", "softmax", {"scaled": {"scaling": "matrix"}}])
    with pytest.raises(InputError, match=re.escape("layers.2.attention.s")):
        model.resized(12)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": (6, 9)}, "image_size=(6, 9) must be a multiple of patch_size=2"),
        ({"image_size": (6, 8, 3)}, "image_size=(6, 8, 3) must be a whole number or (height, width)"),
        ({"image_size": 0}, "image_height=0 must be a whole number"),
        ({"patch_size": 0}, "patch_size=0 must be a whole number"),
        ({"num_outputs": 0}, "num_outputs=0"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"drop_path": 1.0}, "drop_path=1.0 must be a probability"),
        ({"pooling": "flatten"}, "unknown pooling 'flatten'"),
        ({"num_heads": 5}, "embed_dim=28 must be divisible by num_heads=5"),
        ({"image_size": 2_000_000}, "image_size=(2000000, 2000000) with patch_size=2"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        VisionTransformer(
            **{"image_size": IMAGE, "patch_size": PATCH, "num_outputs": CLASSES, **SMALL, **options}
        )


@pytest.mark.parametrize("shape", [(3, 6, 10), (4, 1, 6, 10), (4, 6, 10, 3), (4, 3, 10, 6)])
def test_images_of_another_shape_are_refused(shape):
    message = f"images has shape {shape}, expected (B, 3, 6, 10)"
    with pytest.raises(InputError, match=re.escape(message)):
        build()(torch.rand(shape))


def test_bytes_are_refused():
    with pytest.raises(InputError, match=r"dtype torch\.uint8"):
        build()(torch.zeros(4, 3, 6, 10, dtype=torch.uint8))
