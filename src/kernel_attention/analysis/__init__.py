"""Diagnostics of a trained model's attention, as data; the plots are in ``reporting``."""

from kernel_attention.analysis.capture import attention_layers, capture
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.analysis.diagnostics import diagnose
from kernel_attention.analysis.initialization import PrimalInitialization, primal_from_softmax
from kernel_attention.analysis.results import DiagnosticsReport, LayerDiagnostics

__all__ = [
    "CapturedAttention",
    "DiagnosticsReport",
    "LayerDiagnostics",
    "PrimalInitialization",
    "attention_layers",
    "capture",
    "diagnose",
    "primal_from_softmax",
]
