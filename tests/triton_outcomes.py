"""What the workers of Triton's tests measure. A worker is a process of its own; see ``triton_process``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import kernel_attention as ka


def relative_errors(
    layer: nn.Module,
    dtype: torch.dtype,
    run: Callable[[nn.Module, torch.dtype], dict[str, Tensor]],
    choose: Callable[[nn.Module, str], None],
) -> dict[str, list[float]]:
    """{quantity: [error of the kernels, error of the formulas]}, relative to float64.

    A quantity counts as at least a tenth of the largest one: a gradient that is zero in exact arithmetic
    would make any error infinite.

    Args:
        layer: is copied for every run.
        dtype: the precision that is compared with float64.
        run: (layer, its precision) -> its results.
        choose: sets the form of a layer, "reference" or "triton".
    """

    def outcome(impl: str, precision: torch.dtype) -> dict[str, Tensor]:
        copied = copy.deepcopy(layer).to(precision).train()
        choose(copied, impl)
        return run(copied, precision)

    exact = outcome("reference", torch.float64)
    found = [outcome(impl, dtype) for impl in ("triton", "reference")]
    sizes = {name: value.norm().item() for name, value in exact.items()}
    smallest = max(sizes.values()) / 10
    return {
        name: [(each[name] - value).norm().item() / max(sizes[name], smallest) for each in found]
        for name, value in exact.items()
    }


def outputs_and_gradients(
    layer: nn.Module, x: Tensor, mask: Tensor | None, *, is_causal: bool, twice: bool
) -> dict[str, Tensor]:
    """The outputs and the gradients at real tokens; ``twice``: the gradients of squared gradients."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x, attention_mask=mask, is_causal=is_causal)
    y = (y if mask is None else y[mask]).double()
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.device)
    if twice:  # the gradient of a gradient: the kernels give way to the formulas
        (first,) = torch.autograd.grad((y * probe).sum(), x, create_graph=True)
        y, probe = first.square().double(), torch.ones_like(first)
    (y * probe).sum().backward()
    assert x.grad is not None
    grad = x.grad if mask is None else x.grad[mask]
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {name: value.detach().double() for name, value in {"y": y, "x": grad, **gradients}.items()}


def padding(batch: int, length: int, device: str) -> Tensor:
    """A mask with the second half of the first sequence padded, and every third token of the second."""
    mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    mask[0, length // 2 :], mask[1, ::3] = False, False
    return mask


def check_compiled(layer: nn.Module, x: Tensor, mask: Tensor | None, **options: bool) -> None:
    """A compiled training step has no graph break and the numbers of an eager one."""
    torch.compiler.reset()  # layers of one class share a limit of compilations
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, compiled):
        layer.zero_grad(set_to_none=True)
        x = x.detach().requires_grad_()
        y = call(x, attention_mask=mask, **options)
        y = y if mask is None else y[mask]
        (y.sin().sum() + ka.auxiliary_loss(layer)).backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*results)
