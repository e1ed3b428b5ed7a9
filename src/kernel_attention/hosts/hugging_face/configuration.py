"""The configuration of our models in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from kernel_attention.errors import InputError

MODEL_TYPE = "kernel_attention"


class KernelAttentionConfig(PreTrainedConfig):
    """The constructor's arguments of one of our models, under their own names, and Hugging Face's keys.

    What is not given has the default of the model. ``hidden_size``, ``num_hidden_layers``,
    ``num_attention_heads``, ``intermediate_size``, ``vocab_size`` and ``max_position_embeddings`` are other
    names of ``embed_dim``, ``num_layers``, ``num_heads``, ``feedforward_dim``, ``vocabulary_size`` and
    ``max_len``; ``num_labels`` is ``num_outputs``.

    Args:
        attention: one mechanism for all layers or a list with one per layer; see ``layer_specs``.
        vocabulary_size: of the text models.
        max_len: longest sequence.
        embed_dim: model width d.
        num_heads: heads of every layer.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feed-forward networks.
        options: the other arguments of the model (``image_size``, ``in_features``, ``dropout``, ...), and
            those of ``PreTrainedConfig`` (``num_labels``, ``id2label``, ``pad_token_id``, ...).

    Raises:
        InputError: for two names of one size with different values.
    """

    model_type = MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "embed_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "feedforward_dim",
        "vocab_size": "vocabulary_size",
        "max_position_embeddings": "max_len",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        attention: Any = None,
        vocabulary_size: int | None = None,
        max_len: int | None = None,
        embed_dim: int | None = None,
        num_heads: int | None = None,
        num_layers: int | None = None,
        feedforward_dim: int | None = None,
        **options: Any,
    ) -> None:
        own = {
            "vocabulary_size": vocabulary_size, "max_len": max_len, "embed_dim": embed_dim,
            "num_heads": num_heads, "num_layers": num_layers, "feedforward_dim": feedforward_dim,
        }  # fmt: skip
        for theirs, ours in self.attribute_map.items():
            value = options.pop(theirs, None)
            if value is not None and own[ours] not in (None, value):
                raise InputError(f"{theirs}={value!r} and {ours}={own[ours]!r} are two values of one size")
            own[ours] = own[ours] if value is None else value
        self.attention = attention
        for name, size in own.items():
            setattr(self, name, size)
        self.use_cache = options.pop("use_cache", True)
        options.setdefault("tie_word_embeddings", False)  # our models tie by themselves: `tied`
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self, name, options.pop(name, None))
        super().__init__(**options)

    def to_dict(self) -> dict[str, Any]:
        """The values by our names and by Hugging Face's, which peft reads here."""
        held = super().to_dict()
        return held | {theirs: held[ours] for theirs, ours in self.attribute_map.items() if ours in held}

    def to_diff_dict(self) -> dict[str, Any]:
        """The values of ``config.json``, by our names."""
        held = super().to_diff_dict()
        return {name: value for name, value in held.items() if name not in self.attribute_map}
