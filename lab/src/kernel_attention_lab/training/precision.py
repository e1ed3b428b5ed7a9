"""The precision of training, chosen by what the processor multiplies fast."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Literal, TypeVar

import torch

from kernel_attention_lab.training.fit import training_device
from kernel_attention_lab.training.recipe import BaseRecipe

Resolved = Literal["32-true", "bf16-mixed", "16-mixed"]
AnyRecipe = TypeVar("AnyRecipe", bound=BaseRecipe)


def resolve_precision(recipe: BaseRecipe) -> Resolved:
    """The recipe's precision; of ``auto``, bf16-mixed where the processor has it, else 32-true."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16-mixed" if has_bfloat16(training_device(recipe.accelerator)) else "32-true"


def with_precision(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe with its precision resolved.

    Warns where bfloat16 is asked for and the processor lacks it. PyTorch then emulates it: the figures are
    the same, but a step can take ten times as long as in 32-true.
    """
    device = training_device(recipe.accelerator)
    if recipe.precision == "bf16-mixed" and not has_bfloat16(device):
        warnings.warn(
            f"precision=bf16-mixed: this processor ({device.type}) has no bfloat16 arithmetic; emulated, it "
            "can be ten times slower than 32-true (precision=auto takes bf16-mixed only where it is fast)",
            stacklevel=3,
        )
    return dataclasses.replace(recipe, precision=resolve_precision(recipe))


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions that multiply bfloat16 numbers."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False  # mps: autocast has no bfloat16 in every release that the package accepts
    if hasattr(torch.cpu, "get_capabilities"):  # newer than the oldest release that the package accepts
        found = torch.cpu.get_capabilities()
        return any(is_there for name, is_there in found.items() if name.endswith("bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
