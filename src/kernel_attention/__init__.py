"""Attention layers that come from kernel methods, with functions, solvers, diagnostics and recipes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError, missing_package
from kernel_attention.version import __version__

if TYPE_CHECKING:
    from kernel_attention import analysis, functional, hosts, models, solvers, testing
    from kernel_attention.analysis.conversion import convert_attention, forecast_conversion
    from kernel_attention.analysis.predictive import predict_distribution
    from kernel_attention.core.layer import AttentionLayer
    from kernel_attention.core.objective import (
        ObjectiveCollector,
        auxiliary_loss,
        average_objectives,
        collect_objectives,
    )
    from kernel_attention.core.penalized import PenalizedAttention
    from kernel_attention.core.registry import register_attention
    from kernel_attention.core.sharding import shard_sequence
    from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
    from kernel_attention.hosts import replace_attention, timm_attention
    from kernel_attention.mechanisms import create_attention, list_attention
    from kernel_attention.mechanisms.gaussian_process import KernelGPAttention, SparseGPAttention
    from kernel_attention.mechanisms.kernel_pca import RobustPrincipalAttention, ScaledAttention
    from kernel_attention.mechanisms.linear import LinearAttention
    from kernel_attention.mechanisms.multilinear import (
        DualMultilinearAttention,
        MultilinearAttention,
        TensorAttention,
    )
    from kernel_attention.mechanisms.primal import PrimalAttention
    from kernel_attention.mechanisms.primal_values import PrimalValueAttention
    from kernel_attention.mechanisms.regression import DeltaAttention, RidgeAttention
    from kernel_attention.mechanisms.softmax import SoftmaxAttention
    from kernel_attention.mechanisms.sparse import SparseAttention
    from kernel_attention.mechanisms.support_vector import SupportVectorAttention
    from kernel_attention.series.files import read_series

__all__ = [
    "AttentionClassifier",
    "AttentionLayer",
    "AttentionRegressor",
    "DeltaAttention",
    "DualMultilinearAttention",
    "InputError",
    "KernelGPAttention",
    "LinearAttention",
    "MultilinearAttention",
    "ObjectiveCollector",
    "PenalizedAttention",
    "PrimalAttention",
    "PrimalValueAttention",
    "RidgeAttention",
    "RobustPrincipalAttention",
    "ScaledAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "SparseGPAttention",
    "SupportVectorAttention",
    "TensorAttention",
    "__version__",
    "analysis",
    "auxiliary_loss",
    "average_objectives",
    "collect_objectives",
    "convert_attention",
    "create_attention",
    "forecast_conversion",
    "functional",
    "hosts",
    "list_attention",
    "models",
    "predict_distribution",
    "read_series",
    "register_attention",
    "replace_attention",
    "shard_sequence",
    "solvers",
    "testing",
    "timm_attention",
]

_ROOMS = ("analysis", "functional", "hosts", "models", "solvers", "testing")
_HOMES = {
    "DeltaAttention": "mechanisms.regression",
    "RidgeAttention": "mechanisms.regression",
    "SparseGPAttention": "mechanisms.gaussian_process",
    "KernelGPAttention": "mechanisms.gaussian_process",
    "PrimalValueAttention": "mechanisms.primal_values",
    "AttentionClassifier": "estimators",
    "AttentionLayer": "core.layer",
    "AttentionRegressor": "estimators",
    "DualMultilinearAttention": "mechanisms.multilinear",
    "LinearAttention": "mechanisms.linear",
    "MultilinearAttention": "mechanisms.multilinear",
    "ObjectiveCollector": "core.objective",
    "PenalizedAttention": "core.penalized",
    "PrimalAttention": "mechanisms.primal",
    "RobustPrincipalAttention": "mechanisms.kernel_pca",
    "ScaledAttention": "mechanisms.kernel_pca",
    "SoftmaxAttention": "mechanisms.softmax",
    "SparseAttention": "mechanisms.sparse",
    "SupportVectorAttention": "mechanisms.support_vector",
    "TensorAttention": "mechanisms.multilinear",
    "auxiliary_loss": "core.objective",
    "average_objectives": "core.objective",
    "collect_objectives": "core.objective",
    "convert_attention": "analysis.conversion",
    "create_attention": "mechanisms",
    "forecast_conversion": "analysis.conversion",
    "list_attention": "mechanisms",
    "predict_distribution": "analysis.predictive",
    "read_series": "series.files",
    "register_attention": "core.registry",
    "replace_attention": "hosts",
    "shard_sequence": "core.sharding",
    "timm_attention": "hosts",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    torch and the extras take seconds to import, and ``kernel-attention --help`` needs neither.
    """
    try:
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _HOMES:
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        missing = missing_package(error, f"{__name__}.{name}", "solvers" if name == "solvers" else None)
        if missing is None:
            raise
        raise ModuleNotFoundError(missing, name=error.name) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
