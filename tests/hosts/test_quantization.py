"""Models with eight-bit weights compute what the models with those weights, rounded, compute."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic

import kernel_attention as ka
from kernel_attention.mechanisms import get_mechanism
from kernel_attention.models import SequenceClassifier

NAMES = [mechanism.name for mechanism in ka.list_attention()]
SHORT = {"dual_multilinear", "tensor", "conv2d"}  # cubic in the number of tokens, or with a grid of ten


@pytest.fixture
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own import
        return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


def classifier(name: str) -> SequenceClassifier:
    spec = {name: dict(get_mechanism(name).example)}
    return SequenceClassifier(
        3, 5, 300, spec, embed_dim=16, num_heads=4, num_layers=1, feedforward_dim=19
    ).eval()


def padded(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.arange(batch, 0, -1) * length / batch
    return torch.randn(batch, length, 3), torch.arange(length) < lengths.ceil()[:, None]


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_quantize_dynamic_changes_the_logits_as_rounded_weights_do(name):
    """A few times as much: the inputs have half as many steps as the weights, and a wider range."""
    torch.manual_seed(0)
    model = classifier(name)
    x, mask = padded(16, 11)
    expected = model(x, mask)
    quantized = quantize_dynamic(model, {nn.Linear})
    eight_bit = torch.ao.nn.quantized.dynamic.Linear
    parts = {path: part for path, part in quantized.named_modules() if isinstance(part, eight_bit)}
    assert {"head", "encoder.layers.0.linear1", "encoder.layers.0.linear2"} <= set(parts)
    for path, part in parts.items():
        model.get_submodule(path).weight.data = part.weight().dequantize()
    assert (quantized(x, mask) - expected).norm() < 10 * (model(x, mask) - expected).norm()


@pytest.mark.parametrize("name", NAMES)
def test_weights_quantized_by_torchao_are_computed_with(name, torchao):
    """At 300 tokens primal and multilinear layers have forms that read weights as tensors."""
    x, mask = padded(3, 11 if name in SHORT else 300)
    rounded, quantized = classifier(name), classifier(name)
    quantized.load_state_dict(rounded.state_dict())
    torchao.quantize_(quantized, torchao.Int8WeightOnlyConfig())
    parts = {path: part for path, part in quantized.named_modules() if isinstance(part, nn.Linear)}
    with torch.no_grad():
        for path, part in parts.items():
            rounded.get_submodule(path).weight.copy_(part.weight.dequantize())
        torch.testing.assert_close(quantized(x, mask), rounded(x, mask))


@pytest.mark.parametrize(
    "name",
    ["primal", *(pytest.param(name, marks=pytest.mark.slow) for name in ("multilinear", "scaled_heads"))],
)
def test_code_compiled_from_quantized_weights(name, torchao):
    model, (x, mask) = classifier(name), padded(3, 300)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with torch.no_grad():
        y = model(x, mask)
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, mask), y)
    torch.compiler.reset()


@pytest.mark.parametrize("name", [m.name for m in ka.list_attention() if m.decoding != "no"])
def test_decoding_with_quantized_weights(name, torchao):
    mechanism = get_mechanism(name)
    options = {**mechanism.example, **({"max_len": 7} if "max_len" in mechanism.options else {})}
    layer = nn.Sequential(ka.create_attention(name, 16, 4, **options)).eval()
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        state, steps = layer[0].start_decoding(2), []
        for token in x.unbind(1):
            y, state = layer[0].step(token, state)
            steps.append(y)
        torch.testing.assert_close(torch.stack(steps, 1), layer[0](x, is_causal=True))


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("how", ["quantize_dynamic", "torchao"])
def test_quantized_projections_are_not_replaced(how, torchao):
    model, (x, mask) = classifier("softmax"), padded(3, 11)
    if how == "torchao":
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    else:
        model = quantize_dynamic(model, {nn.Linear})
    with torch.no_grad():
        y = model(x, mask)
        with pytest.raises(
            ka.InputError, match=r"q_proj is a .*Linear.*, expected .* before adapting or quant"
        ):
            ka.replace_attention(model, {0: "linear"})
        assert torch.equal(model(x, mask), y)
