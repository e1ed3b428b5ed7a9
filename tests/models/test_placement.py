"""device, dtype, construction on meta, and reset_parameters of whole models."""

import pytest
import torch

from kernel_attention.models import CausalLanguageModel, DecisionTransformer, SequenceClassifier, StatePolicy
from kernel_attention.models.tokens import TokenClassifier, TokenPairClassifier
from kernel_attention.models.vision import Segmenter, VisionTransformer

SIZES = {"embed_dim": 12, "num_heads": 2, "num_layers": 3, "feedforward_dim": 10}
MIXED = [{"primal": {"rank": 2, "eta": 0.1}}, "multilinear", {"linear": {"feature_map": "softmax_plus"}}]
GRIDDED = ["conv2d", {"scaled": {"scaling": "matrix"}}, {"primal": {"rank": 2, "eta": 0.1}}]
TOKENS = torch.tensor([[1, 4, 2, 0, 6], [3, 3, 5, 2, 1]])
MODELS = {
    "series": (lambda **o: SequenceClassifier(3, 4, 5, MIXED, **SIZES, **o), torch.randn(2, 5, 3)),
    "series, fixed positions, mean": (
        lambda **o: SequenceClassifier(3, 4, 5, "rpc", pooling="mean", positions="fixed", **SIZES, **o),
        torch.randn(2, 5, 3),
    ),
    "tokens": (lambda **o: TokenClassifier(7, 3, 5, MIXED, **SIZES, **o), TOKENS),
    "pairs": (lambda **o: TokenPairClassifier(7, 3, 5, MIXED, **SIZES, **o), TOKENS[None]),
    "language": (lambda **o: CausalLanguageModel(7, 5, "softmax", tied=False, **SIZES, **o), TOKENS),
    "language, fixed positions": (
        lambda **o: CausalLanguageModel(7, 5, MIXED, positions="fixed", norm_first=False, **SIZES, **o),
        TOKENS,
    ),
    "images": (lambda **o: VisionTransformer((4, 6), 2, 5, GRIDDED, **SIZES, **o), torch.rand(2, 3, 4, 6)),
    "images, mean": (
        lambda **o: VisionTransformer((4, 6), 2, 5, MIXED, pooling="mean", **SIZES, **o),
        torch.rand(2, 3, 4, 6),
    ),
    "segmentation": (
        lambda **o: Segmenter(VisionTransformer((4, 6), 2, 3, GRIDDED, **SIZES, **o), 3),
        torch.rand(2, 3, 5, 4),
    ),
    "decisions": (
        lambda **o: _OfStates(DecisionTransformer(3, 2, MIXED, context=5, max_timestep=5, **SIZES, **o)),
        torch.randn(2, 5, 3),
    ),
    "decisions of a state": (lambda **o: _OfStates(StatePolicy(3, 2, width=6, **o)), torch.randn(2, 5, 3)),
}


class _OfStates(torch.nn.Module):
    """A policy as a map of states (B, K, o), with returns and actions that follow from them."""

    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def reset_parameters(self) -> None:
        self.policy.reset_parameters()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        times = torch.arange(states.size(1)).expand(states.shape[:2])
        return self.policy(states.sum(dim=-1), states, states[..., :2].tanh(), times)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def seeded(build, **options):
    torch.manual_seed(5)
    return build(**options).eval()


def output(model: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return model(x.to(dtype) if x.is_floating_point() else x)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_on_meta_becomes_a_new_model(name):
    build, x = MODELS[name]
    with torch.device("meta"):
        inside = seeded(build)
    new = seeded(build)
    for model in (inside, seeded(build, device="meta")):
        assert all(value.is_meta for value in tensors(model).values())
        model.to_empty(device="cpu")
        for value in tensors(model).values():
            value.detach().fill_(float("nan") if value.is_floating_point() else -1)
        torch.manual_seed(5)
        model.reset_parameters()
        for key, value in tensors(model).items():
            assert torch.equal(value, tensors(new)[key]), key
        assert torch.equal(output(model, x, torch.float32), output(new, x, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_part_of_a_model_is_in_the_precision_asked_for(name, dtype):
    build, x = MODELS[name]
    model = seeded(build, dtype=dtype)
    wrong = {key: value.dtype for key, value in tensors(model).items() if value.dtype != dtype}
    assert wrong == {}
    y = output(model, x, dtype)
    assert y.dtype == dtype
    assert y.isfinite().all()
