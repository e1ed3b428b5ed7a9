"""Where only the formulas will do, and how the gradients of hand-written passes are differentiated again."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_traced() -> bool:
    """True where values cannot be asked for: torch.compile, torch.export or torch.func traces the call."""
    return torch.compiler.is_compiling() or is_transformed()


def is_transformed() -> bool:
    """True where a transform of torch.func (vmap, grad, jvp) traces what runs.

    This and the level of forward-mode differentiation have no public name in torch.
    """
    return torch._C._are_functorch_transforms_active()


def is_forward_mode() -> bool:
    """True where forward-mode differentiation is on, as in torch.func.jvp, hessian and linearize."""
    return forward_ad._current_level >= 0


def can_ask(x: Tensor) -> bool:
    """True where a question about the values of x costs nothing: on the CPU, in code that nothing traces.

    On an accelerator it would wait until the queue is empty and forbid CUDA graphs; a compiler would break
    its graph, and a fake tensor has no answer.
    """
    return x.device.type == "cpu" and type(x) is Tensor and not (is_traced() or is_forward_mode())


def is_for_all_sizes() -> bool:
    """True where a compiler, an exporter or torch.jit.trace records what runs for inputs of other sizes."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def needs_operator(x: Tensor) -> bool:
    """True where a hand-written pass over x must be an operator: a compiler looks on, or x has no values."""
    return type(x) is not Tensor or x.is_meta or torch.compiler.is_compiling()


def needs_gradient(*inputs: Tensor | None) -> bool:
    """True where a graph is made, and one of the inputs wants a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def eager_twin(
    compute: Callable[..., tuple[Any, ...]],
    keep: Callable[[Any, tuple[Any, ...], Any], None],
    pull_back: Callable[..., tuple[Tensor | None, ...]],
    *,
    only_first: bool = False,
) -> Callable[..., Any]:
    """The functions of an operator, called as they are where ``needs_operator`` is False.

    An operator's dispatch would cost a small layer a tenth of its training step. ``keep`` is its
    ``setup_context``, and ``pull_back`` its backward function, which takes the gradients of the outputs.
    ``only_first``: whether the first output alone is returned; ``keep`` gets them all.
    """

    class EagerTwin(torch.autograd.Function):
        # A setup_context of its own would cost every call a look at the signature of forward.
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = compute(*inputs)
            keep(ctx, inputs, output)
            return output[0] if only_first else output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return pull_back(ctx, *grads)

    return EagerTwin.apply


_asked = 0  # a number, not a context variable, which a compiler cannot read


@contextlib.contextmanager
def formulas_only() -> Iterator[None]:
    """Inside the block layers take their formulas, for who looks at their operations or changes them."""
    global _asked
    _asked += 1
    try:
        yield
    finally:
        _asked -= 1


def only_formulas() -> str | None:
    """Why operators of our own cannot run: what they have no rule for. None where they can."""
    if _asked:
        return "formulas_only() asks for the formulas"
    if is_transformed():
        return "torch.func transforms the formulas"
    if is_forward_mode():
        return "forward-mode differentiation needs the formulas"
    # An exporter always traces, and torch's own question imports modules for a third of a second.
    if is_for_all_sizes() and torch.onnx.is_in_onnx_export():
        return "ONNX has the formulas' operators only"
    return None


def differentiable_leaves(inputs: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Any]:
    """The saved inputs of a forward pass, for computing it again inside a backward pass.

    A hand-written backward pass is not differentiable. So where gradients are enabled in it, the outputs are
    computed again from these leaves by differentiable operations, and ``differentiable_gradients`` keeps the
    graph of their gradients.
    """
    # One input may depend on another. A view is a node of its own, where differentiation stops.
    return [x.view_as(x) if x is not None and want else x for x, want in zip(inputs, needed, strict=True)]


def differentiable_gradients(
    outputs: Sequence[Tensor | None],
    leaves: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of ``leaves`` that are ``needed``, else None, by automatic differentiation, with a graph
    of their own.

    ``outputs`` are those of the forward pass, computed again from ``leaves`` (``differentiable_leaves``), and
    ``grads`` their gradients; None for an output that is not used.
    """
    used = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if output is not None and grad is not None and output.requires_grad
    ]
    asked = [leaf for leaf, want in zip(leaves, needed, strict=True) if leaf is not None and want]
    reached, given = zip(*used, strict=True)
    found = iter(torch.autograd.grad(reached, asked, given, create_graph=True, materialize_grads=True))
    return [next(found) if want else None for want in needed]
