"""Diagnostics of a trained model's attention, as data; the plots are in ``reporting``."""

from kernel_attention.analysis.capture import attention_layers, capture
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.analysis.diagnostics import DiagnosticsReport, LayerDiagnostics, diagnose
from kernel_attention.analysis.distillation import (
    KernelModelErrors,
    distill_primal_values,
    kernel_model_errors,
    primal_values_from_softmax,
)
from kernel_attention.analysis.initialization import PrimalInitialization, primal_from_softmax

__all__ = [
    "CapturedAttention",
    "DiagnosticsReport",
    "KernelModelErrors",
    "LayerDiagnostics",
    "PrimalInitialization",
    "attention_layers",
    "capture",
    "diagnose",
    "distill_primal_values",
    "kernel_model_errors",
    "primal_from_softmax",
    "primal_values_from_softmax",
]
