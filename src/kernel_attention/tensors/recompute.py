"""Where backward passes written by hand may run, and gradients of theirs that can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_traced() -> bool:
    """Whether torch.compile, torch.export, torch.func or forward-mode differentiation traces what runs.

    Forms with a backward pass written by hand are for eager calls; the compiler fuses the formulas itself.
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
    """What a backward pass returns where its own gradient is needed: by automatic differentiation.

    A backward pass written by hand is not differentiable itself. So the outputs are computed again, from
    differentiable operations alone, and automatic differentiation keeps the graph of their gradients.

    Args:
        compute: the forward pass in differentiable operations; takes ``inputs``, gives the outputs.
        inputs: of the forward pass, as saved.
        needed: which of the inputs want a gradient.
        grads: of the outputs; None where one is not used.

    Returns:
        A gradient for each of ``inputs``, None where it is not needed.
    """
    with torch.enable_grad():
        # One input may have been computed from another: a view is a node of its own, where the way back ends.
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
