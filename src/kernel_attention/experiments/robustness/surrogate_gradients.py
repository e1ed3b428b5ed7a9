"""Gradients that flow through a clamp where its own gradient is zero.

RPC-Attention clamps its residual at every step (soft thresholding). Where the clamp holds, the gradient is
zero, and an attack by gradients could be weak for this reason alone. BPDA, an approximate derivative of
the backward pass, keeps the forward pass and differentiates something smoother (Athalye, Carlini, Wagner,
"Obfuscated Gradients Give a False Sense of Security", ICML 2018).
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernel_attention.tensors.recompute import formulas_only

Gradient = Literal["exact", "straight_through", "smooth"]


class SurrogateClamp(TorchFunctionMode):
    """Inside the block, a clamp between two tensors has its value but the gradient of a surrogate.

    Layers take their formulas there: a pass with gradients of its own would not ask the surrogate.

    Args:
        gradient: ``"exact"``: the clamp's own; ``"straight_through"``: that of the identity; ``"smooth"``:
            that of c + w tanh((x - c)/w), with c the middle and w half the width of the interval.
    """

    def __init__(self, gradient: Gradient) -> None:
        super().__init__()
        self.gradient = gradient
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._inside.enter_context(formulas_only())
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._inside.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.gradient == "exact" or func not in (torch.clamp, torch.Tensor.clamp):
            return func(*args, **kwargs)
        call = {**dict(zip(("input", "min", "max"), args, strict=False)), **kwargs}
        x, lower, upper = call.get("input", call.get("self")), call.get("min"), call.get("max")
        if not (isinstance(x, Tensor) and isinstance(lower, Tensor) and isinstance(upper, Tensor)):
            return func(*args, **kwargs)
        return _Surrogate.apply(x, lower, upper, self.gradient == "smooth")


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lower: Tensor, upper: Tensor, is_smooth: bool) -> Tensor:
        ctx.save_for_backward(x, lower, upper)
        ctx.is_smooth = is_smooth
        return x.clamp(lower, upper)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if not ctx.is_smooth:
            return grad, None, None, None
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            found = torch.autograd.grad(_smooth(*inputs), inputs, grad)
        return (*found, None)


def _smooth(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    return middle + half * torch.tanh((x - middle) / half.clamp_min(torch.finfo(x.dtype).tiny))
