"""The kernel-machine view of self-attention as software: layers, functions, solvers, recipes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError, missing_package

if TYPE_CHECKING:
    from kernel_attention import functional
    from kernel_attention.attention import (
        DualMultilinearAttention,
        LinearAttention,
        MultilinearAttention,
        PrimalAttention,
        RobustPrincipalAttention,
        ScaledAttention,
        SoftmaxAttention,
        SparseAttention,
        SupportVectorAttention,
        TensorAttention,
        auxiliary_loss,
        create_attention,
        list_attention,
        replace_attention,
        shard_sequence,
        timm_attention,
    )
    from kernel_attention.estimators import AttentionClassifier, AttentionRegressor

__version__ = "0.1.0"

__all__ = [
    "AttentionClassifier",
    "AttentionRegressor",
    "DualMultilinearAttention",
    "InputError",
    "LinearAttention",
    "MultilinearAttention",
    "PrimalAttention",
    "RobustPrincipalAttention",
    "ScaledAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "SupportVectorAttention",
    "TensorAttention",
    "auxiliary_loss",
    "create_attention",
    "functional",
    "list_attention",
    "replace_attention",
    "shard_sequence",
    "timm_attention",
]

_ESTIMATORS = ("AttentionClassifier", "AttentionRegressor")
_ROOMS = ("analysis", "attention", "functional", "models", "reporting", "solvers")


def __getattr__(name: str) -> Any:
    """Everything is imported when it is first asked for: torch and the extras take seconds to import, and
    ``kernel-attention --help`` needs neither.
    """
    if name not in __all__ and name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        home = "estimators" if name in _ESTIMATORS else "attention"
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        missing = missing_package(error, f"{__name__}.{name}", "solvers" if name == "solvers" else None)
        if missing is None:
            raise
        raise ModuleNotFoundError(missing, name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
