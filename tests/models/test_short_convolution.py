"""The short convolution: a plain loop, the identity at first, padding, decoding, and models that have it."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from models.test_causal import CAUSAL, LENGTH, VOCABULARY, small
from torch import nn

from kernel_attention import InputError
from kernel_attention.core.decoding import reorder
from kernel_attention.models import (
    CausalLanguageModel,
    DecisionTransformer,
    SequenceClassifier,
    SequenceEncoder,
    ShortConvolution,
    TokenClassifier,
    VisionTransformer,
)

B, N, D = 3, 11, 5
SIZES = {"embed_dim": 6, "num_heads": 2, "num_layers": 2, "feedforward_dim": 7, "dropout": 0.0}


def convolution(taps: int, **options) -> ShortConvolution:
    torch.manual_seed(0)
    return awake(ShortConvolution(D, taps, dtype=torch.float64, **options))


def awake(model: nn.Module) -> nn.Module:
    """The model with convolutions that are no longer the identity."""
    for module in model.modules():
        if isinstance(module, ShortConvolution):
            nn.init.normal_(module.weight, std=0.5)
    return model


def masks() -> dict[str, torch.Tensor | None]:
    """Padding on the right, on the left, in between; the last sequence has one real token."""
    lengths, place = torch.tensor([N, 4, 1])[:, None], torch.arange(N)
    holes = torch.rand(B, N, generator=torch.Generator().manual_seed(3)) < 0.6
    return {"none": None, "right": place < lengths, "left": place >= N - lengths, "holes": holes}


def by_loops(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor | None, front: int) -> torch.Tensor:
    """The definition, one product after the other, over the real tokens of each sequence."""
    y = torch.zeros_like(x)
    for b in range(len(x)):
        real = [n for n in range(x.size(1)) if mask is None or mask[b, n]]
        for i, token in enumerate(real):
            for c in range(x.size(2)):
                total = x[b, token, c].item()
                for j in range(weight.size(1)):
                    if 0 <= i - front + j < len(real):
                        total += weight[c, j].item() * x[b, real[i - front + j], c].item()
                y[b, token, c] = total
    return y


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padding", masks())
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 14])
def test_the_output_is_that_of_plain_loops_over_the_real_tokens(taps, padding, is_causal):
    module, x, mask = convolution(taps), torch.randn(B, N, D, dtype=torch.float64), masks()[padding]
    expected = by_loops(x, module.weight, mask, taps - 1 if is_causal else taps // 2)
    if mask is not None:
        x[~mask] = torch.nan
    found = module(x, mask, is_causal)
    real = slice(None) if mask is None else mask
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-13)


@pytest.mark.parametrize("class_tokens", [0, 2])
@pytest.mark.parametrize("side", [1, 2, 3, 6])
def test_over_a_grid_it_is_that_of_plain_loops_and_leaves_the_class_tokens_alone(side, class_tokens):
    rows, columns = 3, 4
    module = convolution(side, grid_size=(rows, columns), class_tokens=class_tokens)
    x, weight = torch.randn(B, class_tokens + rows * columns, D, dtype=torch.float64), module.weight
    expected = x.clone()
    for row, column, down, right in itertools.product(range(rows), range(columns), range(side), range(side)):
        i, j = row - side // 2 + down, column - side // 2 + right
        if 0 <= i < rows and 0 <= j < columns:
            places = (class_tokens + r * columns + c for r, c in ((row, column), (i, j)))
            here, there = places
            expected[:, here] = expected[:, here] + weight[:, down, right] * x[:, there]
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-13)
    with pytest.raises(InputError, match="no causal form"):
        module(x, is_causal=True)
    with pytest.raises(InputError, match=r"must be class_tokens=. plus the tokens of grid_size=\(3, 4\), 12"):
        module(x[:, 1:])


@pytest.mark.parametrize("options", [{}, {"grid_size": (3, 3), "class_tokens": 2}], ids=str)
def test_the_gradients_are_those_of_differences(options):
    module, x = convolution(3, **options), torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    for mask, is_causal in itertools.product(masks().values(), (False, True)):
        if options and (mask is not None or is_causal):
            continue

        def run(x, weight, mask=mask, is_causal=is_causal):
            arguments = {"attention_mask": mask, "is_causal": is_causal}
            return torch.func.functional_call(module, {"weight": weight}, (x,), arguments)

        assert torch.autograd.gradcheck(run, (x, module.weight), fast_mode=True)
        assert torch.autograd.gradgradcheck(run, (x, module.weight), fast_mode=True)


@pytest.mark.parametrize("options", [{}, {"grid_size": (3, 3), "class_tokens": 2}], ids=str)
def test_float32_and_mixed_precision_round_the_same_numbers(options):
    """Also on the CPU, where torch's own convolution computes float32; its products are not in 16 bits."""
    exact = convolution(4, **options)
    module, x = copy.deepcopy(exact).float(), torch.randn(B, N, D)
    expected = exact(x.double())
    bound = 20 * torch.finfo(torch.float32).eps * expected.abs().max()  # 17 products and their sum
    assert (module(x) - expected).abs().max() < bound
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(x)
    assert found.dtype is torch.float32
    assert (found - expected).abs().max() < bound
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    reference = x.detach().double().requires_grad_()
    (exact(reference) * weight).sum().backward()
    assert (x.grad - reference.grad).abs().max() < 10 * bound
    torch.testing.assert_close(module.weight.grad, exact.weight.grad.float(), rtol=1e-4, atol=1e-4)
    half = module.bfloat16()(x.detach().bfloat16())
    assert half.dtype is torch.bfloat16
    assert (half - expected).abs().max() < 20 * 2**-8 * expected.abs().max()


# Models


MODELS = {
    "series": (lambda **o: SequenceClassifier(3, 2, N, "primal", **SIZES, **o), (B, N, 3)),
    "causal texts": (lambda **o: CausalLanguageModel(VOCABULARY, N, "linear", **SIZES, **o), (B, N)),
    "texts": (lambda **o: TokenClassifier(VOCABULARY, 2, N, "softmax", **SIZES, **o), (B, N)),
    "images": (lambda **o: VisionTransformer((8, 12), 4, 2, "rpc", **SIZES, **o), (B, 3, 8, 12)),
}


def inputs(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape) if len(shape) == 2 else torch.rand(shape)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_starts_as_the_one_without_and_learns_to_differ(name):
    build, shape = MODELS[name]
    models = []
    for taps in (0, 3):
        torch.manual_seed(0)
        models.append(build(short_convolution=taps))
    plain, model = models
    x = inputs(shape)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()(x).square().sum().backward()
    kernels = [p for key, p in model.named_parameters() if key.endswith("short_convolution.weight")]
    assert len(kernels) == 2
    assert all((kernel.grad.flatten(1).abs().amax(dim=1) > 0).all() for kernel in kernels)
    optimizer.step()
    moved = model.eval()(x)
    model.load_state_dict(
        {
            key: torch.zeros_like(value) if "short_convolution" in key else value
            for key, value in model.state_dict().items()
        }
    )
    assert (moved - model(x)).abs().max() > 1e-6
    awake(model).reset_parameters()
    assert not any(kernel.any() for kernel in kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_of_torch_compile_serves_the_model(name):
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = awake(build(short_convolution=4)).eval(), inputs(shape)
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


def test_padding_does_not_reach_a_classifier():
    torch.manual_seed(0)
    model = awake(SequenceEncoder(3, N, "softmax", **SIZES, short_convolution=5)).double().eval()
    x = torch.randn(B, N, 3, dtype=torch.float64)
    mask = masks()["right"]
    together = model(x.masked_fill(~mask[..., None], 7.0), mask)
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        torch.testing.assert_close(
            together[row, :length], model(x[row, None, :length])[0], rtol=0, atol=1e-12
        )


def test_images_of_another_size_keep_the_kernels():
    torch.manual_seed(0)
    model = awake(VisionTransformer(8, 4, 2, "softmax", **SIZES, short_convolution=3))
    larger = model.resized(16)
    assert torch.equal(larger.layers[1].short_convolution.weight, model.layers[1].short_convolution.weight)
    assert larger.layers[1].short_convolution.grid_size == (4, 4)
    images = torch.rand(B, 3, 16, 16)
    assert larger(images).isfinite().all()


def test_a_layer_pickled_before_there_were_any_opens():
    layer = MODELS["series"][0]().encoder.layers[0]
    del layer.__dict__["short_convolution"]
    assert pickle.loads(pickle.dumps(layer)).short_convolution is None
    layer = MODELS["series"][0](short_convolution=2).encoder.layers[0]
    assert pickle.loads(pickle.dumps(layer)).short_convolution.kernel_size == 2


@pytest.mark.parametrize("taps", [-1, 1.5, True, "2"], ids=str)
def test_taps_that_are_no_whole_number_are_refused(taps):
    with pytest.raises(InputError, match=r"short_convolution=.* must be a whole number of at least 1"):
        MODELS["texts"][0](short_convolution=taps)


# Decoding


def mixed(name: str, taps: int = 4) -> CausalLanguageModel:
    """A layer of a mechanism, and one that is decoded by all of its inputs."""
    return awake(small([name, "rpc"], short_convolution=taps))


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CAUSAL)
def test_steps_and_prompts_give_the_logits_of_the_whole_text(name, tokens):
    """No token sees a later one; from the first token on; after a prompt that is shorter than the taps."""
    model = mixed(name)
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(model(tokens[:, :5]), expected[:, :5], rtol=0, atol=1e-12)
        state = model.initial_state(len(tokens))
        for position in range(LENGTH):
            logits, state = model.step(tokens[:, position], state)
            torch.testing.assert_close(logits, expected[:, position], rtol=0, atol=1e-12)
        logits, state = model.prefill(tokens[:, :2])
        torch.testing.assert_close(logits, expected[:, 1], rtol=0, atol=1e-12)
        logits, state = model.prefill(tokens[:, 2:7], state)
        torch.testing.assert_close(logits, expected[:, 6], rtol=0, atol=1e-12)
        order = torch.tensor([2, 0, 0])
        state = reorder(state, order)
        logits, state = model.step(tokens[:, 7], state)
        text = torch.cat([tokens[order, :7], tokens[:, 7:8]], dim=1)
        torch.testing.assert_close(logits, model(text)[:, -1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_padded_prompt_is_read_as_it_is_alone(name, side, tokens):
    """Texts of 2, 8 and 5 tokens; the first is shorter than the taps."""
    model, lengths, size = mixed(name), (2, 8, 5), 8
    place = torch.arange(size)
    real = {
        "left": lambda length: place >= size - length,
        "right": lambda length: place < length,
        "holes": lambda length: place % 4 < length // 2 if length in (2, 8) else place % 3 < 2,
    }[side]
    real = torch.stack([real(length) for length in lengths])
    padded = torch.zeros(3, size, dtype=torch.int64)
    texts = [tokens[row, : real[row].sum()] for row in range(3)]
    for row, text in enumerate(texts):
        padded[row, real[row]] = text
    with torch.no_grad():
        together = model(padded, real)
        last, state = model.prefill(padded, attention_mask=real)
        later = tokens[:, 8]
        after, state = model.step(later, state)
        for row, text in enumerate(texts):
            alone = model(torch.cat([text, later[row : row + 1]])[None])[0]
            torch.testing.assert_close(together[row][real[row]], alone[:-1], rtol=0, atol=1e-12)
            torch.testing.assert_close(last[row], alone[-2], rtol=0, atol=1e-12)
            torch.testing.assert_close(after[row], alone[-1], rtol=0, atol=1e-12)


def test_a_policy_acts_step_by_step_as_on_the_whole_episode():
    torch.manual_seed(0)
    model = DecisionTransformer(3, 2, ["linear", "softmax"], **SIZES, context=5, short_convolution=4)
    model = awake(model).double().eval()
    steps = 5
    returns = torch.randn(B, steps, dtype=torch.float64)
    states, actions = (torch.randn(B, steps, size, dtype=torch.float64) for size in (3, 2))
    with torch.no_grad():
        expected = model(returns, states, actions, torch.arange(steps).expand(B, -1))
        state = model.initial_state(B)
        for step in range(steps):
            found, state = model.act(returns[:, step], states[:, step], state)
            torch.testing.assert_close(found, expected[:, step], rtol=0, atol=1e-12)
            state = model.observe(actions[:, step], state)
