"""Our layers in models of other libraries: torch, timm, Hugging Face."""

from kernel_attention.hosts.known import HostedAttention
from kernel_attention.hosts.replace import PATTERNS, Replacement, ReplacementReport, replace_attention
from kernel_attention.hosts.timm_class import timm_attention

__all__ = [
    "PATTERNS",
    "HostedAttention",
    "Replacement",
    "ReplacementReport",
    "replace_attention",
    "timm_attention",
]
