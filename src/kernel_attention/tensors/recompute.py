"""Where hand-written backward passes may run, and how their gradients can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_traced() -> bool:
    """Whether torch.compile, torch.export, torch.func or forward-mode differentiation traces the call.

    Forms with a hand-written backward pass are for eager calls; the compiler fuses the formulas itself.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def differentiable_gradients(
    compute: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of ``inputs`` by automatic differentiation, with a graph of their own.

    A hand-written backward pass is not differentiable. So the outputs are computed again from differentiable
    operations, and automatic differentiation keeps the graph of their gradients.

    Args:
        compute: the forward pass in differentiable operations; it takes ``inputs`` and returns the outputs.
        inputs: the saved inputs of the forward pass.
        needed: which of the inputs want a gradient.
        grads: the gradients of the outputs; None for an output that is not used.

    Returns:
        A gradient for each of ``inputs``, None where it is not needed.
    """
    with torch.enable_grad():
        # One input may depend on another. A view is a node of its own, where differentiation stops.
        leaves = [x.view_as(x) if x is not None and w else x for x, w in zip(inputs, needed, strict=True)]
        outputs = compute(*leaves)
        used = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output is not None and grad is not None and output.requires_grad
        ]
        asked = [leaf for leaf, want in zip(leaves, needed, strict=True) if leaf is not None and want]
        outputs, grads = zip(*used, strict=True)
        found = iter(torch.autograd.grad(outputs, asked, grads, create_graph=True, materialize_grads=True))
    return [next(found) if want else None for want in needed]
