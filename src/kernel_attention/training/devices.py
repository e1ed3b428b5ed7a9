"""The device of a training, and the precision that it multiplies fast."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Literal, Protocol, TypeVar

import torch

from kernel_attention.training.settings import Precision

Resolved = Literal["32-true", "bf16-mixed", "16-mixed"]


class HasPrecision(Protocol):
    """Settings of a training: a dataclass with these fields."""

    @property
    def precision(self) -> Precision:
        """As in ``TrainSettings``."""
        ...

    @property
    def accelerator(self) -> str:
        """As in ``TrainSettings``."""
        ...


Settings = TypeVar("Settings", bound=HasPrecision)


def resolve_precision(settings: HasPrecision) -> Resolved:
    """The precision of settings; of ``auto``, bf16-mixed where the processor has it, else 32-true."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16-mixed" if has_bfloat16(training_device(settings.accelerator)) else "32-true"


def with_precision(settings: Settings) -> Settings:
    """The settings with their precision resolved.

    Warns where bfloat16 is asked for and the processor lacks it. PyTorch then emulates it: the figures are
    the same, but a step can take ten times as long as in 32-true.
    """
    device = training_device(settings.accelerator)
    if settings.precision == "bf16-mixed" and not has_bfloat16(device):
        warnings.warn(
            f"precision=bf16-mixed: this processor ({device.type}) has no bfloat16 arithmetic; emulated, it "
            "can be ten times slower than 32-true (precision=auto takes bf16-mixed only where it is fast)",
            stacklevel=3,
        )
    return dataclasses.replace(settings, precision=resolve_precision(settings))  # type: ignore[type-var]


def has_bfloat16(device: torch.device) -> bool:
    """True where the device has instructions that multiply bfloat16 numbers."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False  # mps: autocast has no bfloat16 in every release that the package accepts
    if hasattr(torch.cpu, "get_capabilities"):  # newer than the oldest release that the package accepts
        found = torch.cpu.get_capabilities()
        return any(is_there for name, is_there in found.items() if name.endswith("bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def training_device(accelerator: str, local_rank: int = 0) -> torch.device:
    """The device on which a process trains with this accelerator, by its number on its machine."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "cpu" or found is None:
        return torch.device("cpu")
    return torch.device(found.type, local_rank) if local_rank else found
