"""Our models as models of Hugging Face transformers, and replaced models of its own.

Importing this module registers our classes with ``AutoConfig``, ``AutoModelForCausalLM``,
``AutoModelForSequenceClassification`` and ``AutoModelForImageClassification``. From then on
``from_pretrained`` also makes a model again whose attention was replaced by ``replace_attention``.
"""

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from kernel_attention.hosts.hugging_face.classifiers import (
    KernelAttentionForImageClassification,
    KernelAttentionForSequenceClassification,
    KernelAttentionForTimeSeriesClassification,
)
from kernel_attention.hosts.hugging_face.models import (
    MODEL_TYPE,
    DecodingCache,
    KernelAttentionConfig,
    KernelAttentionForCausalLM,
    KernelAttentionModel,
)
from kernel_attention.hosts.restoring import include_auxiliary_loss, watch_models

__all__ = [
    "DecodingCache",
    "KernelAttentionConfig",
    "KernelAttentionForCausalLM",
    "KernelAttentionForImageClassification",
    "KernelAttentionForSequenceClassification",
    "KernelAttentionForTimeSeriesClassification",
    "KernelAttentionModel",
    "include_auxiliary_loss",
]

watch_models()
AutoConfig.register(MODEL_TYPE, KernelAttentionConfig, exist_ok=True)
AutoModelForCausalLM.register(KernelAttentionConfig, KernelAttentionForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    KernelAttentionConfig, KernelAttentionForSequenceClassification, exist_ok=True
)
AutoModelForImageClassification.register(
    KernelAttentionConfig, KernelAttentionForImageClassification, exist_ok=True
)
