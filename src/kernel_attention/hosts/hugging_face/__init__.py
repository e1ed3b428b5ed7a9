"""Our layers in saved Hugging Face models."""

from kernel_attention.hosts.restoring import watch_models

watch_models()
