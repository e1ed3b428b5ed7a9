"""Where parameters are made, in which precision, and how they are drawn anew."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kernel_attention.tensors.affine import joint_affine
from kernel_attention.tensors.recompute import only_formulas

Device = torch.device | str | int | None
"""The values of ``device`` in PyTorch's modules; None: the default device."""


class TensorLinear(nn.Linear):
    """An ``nn.Linear`` of which a layer also reads the weight and the bias as tensors.

    Tools that swap modules of the type ``nn.Linear``, such as ``torch.ao.quantization.quantize_dynamic``,
    leave this type alone. What they would put in its place has no such tensors.
    """


def is_ordinary(linear: nn.Module) -> bool:
    """True where the module computes as ``nn.Linear`` does, with a weight that is a tensor like any other.

    Adapters (LoRA) do not, nor do quantized layers. The weights of torchao know linear maps and little else.
    """
    if type(linear).forward is not nn.Linear.forward:
        return False
    if torch.compiler.is_dynamo_compiling():  # it answers False to the question below
        return type(linear.weight) in (Tensor, nn.Parameter)
    return not is_traceable_wrapper_subclass(linear.weight)


def is_plain(linear: nn.Module) -> bool:
    """True where the module's weight and bias are all that its call computes with.

    They are not in a module that is not ordinary, where ``forward`` was replaced (accelerate fetches weights
    there), or where there are hooks: its own, or those of all modules, which profilers register.
    """
    before = linear._forward_pre_hooks or linear._backward_pre_hooks
    after = linear._forward_hooks or linear._backward_hooks
    is_changed = "forward" in vars(linear) or before or after or _has_any_global_hook()
    return is_ordinary(linear) and not is_changed


def why_not_by_weight(layer: nn.Module, *names: str) -> str | None:
    """Why a form that reads these submodules' weights cannot take the place of their calls; None: it can."""
    for name in names:
        if not is_plain(getattr(layer, name)):
            return f"{name} is an adapter, is quantized or has hooks, so it must be called"
    return None


def can_join(x: Tensor, *linear: nn.Linear, on_cpu: bool = False) -> bool:
    """True where ``joint_linear`` may take the place of the modules' calls, and saves time.

    Launches are what it saves. A CPU gains nothing, unless what follows does, ``on_cpu``.
    """
    return (
        (on_cpu or x.device.type != "cpu")
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and x.size(0) > 0  # passes over no sequences have shapes that are not known
        and only_formulas() is None
        and all(map(is_plain, linear))
        and len({(each.bias is None, each.weight.dtype) for each in linear}) == 1
    )


def joint_linear(x: Tensor, *linear: nn.Linear) -> Tensor:
    """x W_1^T + b_1, x W_2^T + b_2, .. side by side: (B, N, d) -> (B, N, d_1 + d_2 + ..)."""
    return joint_affine(x, [(each.weight, each.bias) for each in linear])


def joint_heads(x: Tensor, num_heads: int, *linear: nn.Linear) -> tuple[Tensor, ...]:
    """Such maps of one size by heads: (B, N, d) -> (B, h, N, p) each."""
    z = joint_linear(x, *linear).unflatten(-1, (len(linear), num_heads, -1))
    return z.permute(2, 0, 3, 1, 4).unbind()


def reset_module(module: nn.Module) -> None:
    """Call the module's ``reset_parameters``, or those of its submodules where it has none."""
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        reset_submodules(module)


def reset_submodules(module: nn.Module) -> None:
    """``reset_module`` of every submodule, in the order of registration."""
    for child in module.children():
        reset_module(child)


@torch.no_grad()
def draw_orthogonal(weight: Tensor) -> None:
    """``nn.init.orthogonal_`` in place, in float32 or better: there is no QR factorisation in 16 bits."""
    if not weight.is_meta:
        drawn = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        weight.copy_(nn.init.orthogonal_(drawn))


@torch.no_grad()
def draw_normal(weight: Tensor, std: float) -> None:
    """``nn.init.trunc_normal_`` in place, truncated at 5 deviations, in float32 or better.

    The bounds of ``nn.init`` are so far out for a small deviation that rounding takes one number in 2^24 to a
    bound, such as -2.
    """
    drawn = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    weight.copy_(nn.init.trunc_normal_(drawn, std=std, a=-5 * std, b=5 * std))
