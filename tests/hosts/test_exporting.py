"""Models as programs of torch.export and ONNX compute what the models compute, for every length they take."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import kernel_attention as ka
from kernel_attention.hosts.exporting import (
    CausalStep,
    export_program,
    export_step,
    onnx_bytes,
    onnx_error,
    program_lengths,
)
from kernel_attention.models import (
    CausalLanguageModel,
    SequenceClassifier,
    TokenPairClassifier,
    VisionTransformer,
)

ROOT = Path(__file__).parents[2]
NAMES = [mechanism.name for mechanism in ka.list_attention()]
SIZES = {"embed_dim": 16, "num_heads": 4, "num_layers": 1, "feedforward_dim": 19}
LENGTH = 12


@pytest.fixture(scope="module")
def exports():
    """``tools/exports.py``, which exports a model and compares what comes out with it."""
    if not (ROOT / "tools").is_dir():
        pytest.skip("needs the checkout")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("exports")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture
def onnx():
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def cells_of_page(name: str) -> list[str]:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def quickly(*chosen: str) -> list:
    """The names of all mechanisms, slow ones but for these. Each takes seconds."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", quickly("primal"))
def test_a_classifier_of_any_length_is_exported_as_the_page_says(exports, onnx, name):
    assert exports.classifier_cells(name) == cells_of_page(name)[1:4]


@pytest.mark.parametrize("name", quickly("rpc"))
def test_a_step_of_decoding_is_exported_as_the_page_says(exports, onnx, name):
    assert exports.step_cell(name) == cells_of_page(name)[4]


def padded(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.arange(batch, 0, -1) * length / batch
    return torch.randn(batch, length, 3), torch.arange(length) < lengths.ceil()[:, None]


@pytest.mark.parametrize(
    "options",
    [
        {
            "stem": "convolution",
            "patch_len": 4,
            "pooling": "attention",
            "views": ("raw", "normalized", "difference"),
        },
        pytest.param(
            {"experts": 3, "positions": "convolutional", "short_convolution": 4, "pooling": "mean_max"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"stem": "rocket", "patch_len": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_parts_around_the_layers_take_every_length(options):
    model = SequenceClassifier(3, 5, LENGTH, "softmax", **SIZES, **options).eval()
    program = export_program(model, *padded(3, LENGTH))
    least = 5 if "patch_len" in options else 2
    assert program_lengths(program) == (least, LENGTH)
    for length in (least, 7):
        x, mask = padded(2, length)
        found = program.module()(x=x, attention_mask=mask)
        torch.testing.assert_close(found, model(x, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_layer_with_weights_per_position_takes_its_longest_length_too():
    layer = ka.create_attention("tensor", 8, 2, max_len=LENGTH).eval()
    tokens = torch.export.Dim("tokens", min=2, max=LENGTH)
    program = torch.export.export(layer, (torch.randn(2, 7, 8),), dynamic_shapes={"x": {1: tokens}})
    for length in (2, LENGTH):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.slow
def test_images_and_pairs_of_texts(onnx):
    torch.manual_seed(0)
    images = torch.rand(3, 3, 8, 8)
    model = VisionTransformer(8, 4, 5, "conv2d", channel_attention=True, **SIZES).eval()
    program = export_program(model, images)
    assert program_lengths(program) is None
    assert onnx_error(onnx_bytes(program), model, images[:1]) < 16
    model = TokenPairClassifier(17, 5, LENGTH, "primal", **SIZES).eval()
    text, mask = torch.randint(17, (3, 2, LENGTH)), torch.ones(3, 2, LENGTH, dtype=torch.bool)
    mask[1, 0, 4:] = False
    assert onnx_error(onnx_bytes(export_program(model, text, mask)), model, text, mask) < 16


def test_a_program_keeps_its_facts_and_leaves_its_inputs_alone(onnx):
    model = CausalLanguageModel(17, LENGTH, "linear", **SIZES).eval()
    content = onnx_bytes(export_step(model), {"class_names": "[]"})
    session = onnx.InferenceSession(content)
    assert session.get_modelmeta().custom_metadata_map["class_names"] == "[]"
    names = [node.name for node in session.get_outputs()]
    assert names == ["logits", *(f"next_state_{number}" for number in range(len(names) - 1))]
    step = CausalStep(model)
    state = step.initial_state(2)
    step(torch.tensor([3, 4]), state)
    assert not any(tensor.any() for tensor in state)


def test_a_step_behind_a_short_convolution_is_exported():
    torch.manual_seed(0)
    model = CausalLanguageModel(17, LENGTH, "linear", **SIZES, short_convolution=4).eval()
    torch.nn.init.normal_(model.layers[0].short_convolution.weight)
    program, text = export_step(model).module(), torch.randint(17, (3, LENGTH))
    state, logits = CausalStep(model).initial_state(3), []
    for token in text.unbind(1):
        found, state = program(tokens=token, state=state)
        logits.append(found)
    torch.testing.assert_close(torch.stack(logits, dim=1), model(text), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_exported_is_refused_in_one_line():
    model = SequenceClassifier(3, 5, LENGTH, "softmax", **SIZES)
    with pytest.raises(ka.InputError, match=r"training mode \(accepted: model.eval\(\)\)"):
        export_program(model, *padded(3, LENGTH))
    with pytest.raises(ka.InputError, match="1 sequences, expected at least 2"):
        export_program(model.eval(), *padded(1, LENGTH))
    text = CausalLanguageModel(17, LENGTH, ["softmax", "rpc"], **SIZES | {"num_layers": 2}).eval()
    with pytest.raises(ka.InputError, match="layer 1, 'rpc', has no exportable step"):
        export_step(text)


class SpectralNorm(torch.nn.Module):
    """The largest eigenvalue of x^T x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigh(x.mT @ x).eigenvalues[..., -1]


def test_an_operator_that_onnx_lacks_is_named(onnx):
    program = export_program(SpectralNorm().eval(), torch.randn(3, 5, 4))
    with pytest.raises(
        ka.InputError, match=r"ONNX has no operator for aten\._linalg_eigh, which the model uses"
    ):
        onnx_bytes(program)
