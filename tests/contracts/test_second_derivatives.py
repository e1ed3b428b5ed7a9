"""Layers whose form is chosen by length can be differentiated twice, whichever form it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernel_attention as ka

# Forward mode imports torch's own scripted derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

F64 = torch.float64
LONG = 257  # both mechanisms take their fused form from here on
LAYERS = {
    "primal": (ka.PrimalAttention, {"rank": 2, "rank_multiplier": 2, "eta": 0.3}),
    "primal, three heads": (ka.PrimalAttention, {"rank": 2, "eta": 0.3, "heads": 3}),
    "primal, data-independent": (ka.PrimalAttention, {"rank": 2, "data_dependent": False, "eta": 0.3}),
    "multilinear": (ka.MultilinearAttention, {"rank": 2, "eta": 0.3}),
    "multilinear, data-dependent": (
        ka.MultilinearAttention, {"rank": 2, "variant": "data_dependent", "rank_multiplier": 2, "eta": 0.3}
    ),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)


def build(name: str, impl: str) -> torch.nn.Module:
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    heads = options.get("heads", 2)
    options = {key: value for key, value in options.items() if key != "heads"}
    return kind(2 * heads, heads, impl=impl, **options).to(F64).train()


def inputs(layer: torch.nn.Module, length: int = LONG) -> tuple[Tensor, Tensor]:
    mask = torch.arange(length)[None] < torch.tensor([length, length - 9])[:, None]
    return torch.randn(2, length, layer.embed_dim, dtype=F64), mask


def forms(layer: torch.nn.Module) -> list[bool]:
    return [False, True] if not getattr(layer, "data_dependent", True) else [False]


@every_layer
def test_second_derivatives_of_the_fused_form_equal_finite_differences(name):
    layer = build(name, "fused")
    names = [key for key, _ in layer.named_parameters()]
    x, mask = inputs(layer)
    probe = torch.randn(x.shape, dtype=F64)[mask]
    for is_causal in forms(layer):

        def loss(x: Tensor, *parameters: Tensor, is_causal: bool = is_causal) -> Tensor:
            call = {"attention_mask": mask, "is_causal": is_causal}
            y = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x, call)
            return (y[mask] * probe).sum() + ka.auxiliary_loss(layer)

        leaves = [x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in layer.parameters())]
        assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["primal", "multilinear"])
def test_the_hessian_of_torch_func_is_that_of_double_backward(name):
    layer = build(name, "auto").eval()
    x = inputs(layer)[0]

    def loss(part: Tensor) -> Tensor:
        return layer(torch.cat([part, x[:, 3:]], dim=1)).square().sum()

    expected = torch.autograd.functional.hessian(loss, x[:, :3])
    torch.testing.assert_close(torch.func.hessian(loss)(x[:, :3]), expected, rtol=1e-7, atol=1e-9)
