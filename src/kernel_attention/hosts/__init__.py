"""Our layers in models of other libraries: torch, timm, Hugging Face."""

from kernel_attention.hosts.known import HostedAttention
from kernel_attention.hosts.replace import PATTERNS, Replacement, ReplacementReport, replace_attention
from kernel_attention.hosts.timm_weights import (
    TimmLoading,
    load_timm_weights,
    timm_attention,
    timm_state_dict,
    vision_transformer_from_timm,
)

__all__ = [
    "PATTERNS",
    "HostedAttention",
    "Replacement",
    "ReplacementReport",
    "TimmLoading",
    "load_timm_weights",
    "replace_attention",
    "timm_attention",
    "timm_state_dict",
    "vision_transformer_from_timm",
]
