"""Our models as models of Hugging Face transformers.

Legend: B sequences or images, N tokens, V tokens of the vocabulary, c channels.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from kernel_attention.core.decoding import reorder
from kernel_attention.errors import InputError
from kernel_attention.hosts.hugging_face.configuration import KernelAttentionConfig
from kernel_attention.hosts.restoring import include_auxiliary_loss
from kernel_attention.models import (
    CausalLanguageModel,
    SequenceClassifier,
    SequenceEncoder,
    TokenClassifier,
    VisionTransformer,
)
from kernel_attention.models.decoding import DecodingState


class DecodingCache:
    """What ``generate`` carries as ``past_key_values``: the state of every layer after the tokens read.

    Its size is constant where every mechanism has a recurrent form of constant size.

    Args:
        state: the states.
        length: tokens read, padding included.
    """

    is_compileable = False

    def __init__(self, state: DecodingState, length: int) -> None:
        self.state = state
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, padding included."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences ``beam_idx`` (B',) int64; beam search calls this after every step."""
        self.state = reorder(self.state, beam_idx)


class KernelAttentionModel(PreTrainedModel):
    """The base of our models: it makes one of them from the configuration and holds it as ``model``.

    In training, ``loss`` includes the auxiliary loss of the layers.

    Args:
        config: the arguments of ``kind``.

    Raises:
        InputError: for an argument that ``kind`` needs and the configuration does not have, and what ``kind``
            refuses.
    """

    config_class = KernelAttentionConfig
    config: KernelAttentionConfig
    kind: ClassVar[type[nn.Module]]

    def __init__(self, config: KernelAttentionConfig) -> None:
        super().__init__(config)
        self.model: Any = self.kind(**self._arguments(config))
        self.post_init()
        include_auxiliary_loss(self)

    @classmethod
    def _arguments(cls, config: KernelAttentionConfig) -> dict[str, Any]:
        """The arguments of ``kind`` that the configuration has."""
        found: dict[str, Any] = {}
        for name, parameter in _constructor(cls.kind).items():
            value = config.num_labels if name == "num_outputs" else getattr(config, name, None)
            if value is not None:
                found[name] = tuple(value) if name == "image_size" and isinstance(value, list) else value
            elif parameter.default is inspect.Parameter.empty:
                raise InputError(f"{cls.__name__}: the configuration has no {name}")
        return found

    @classmethod
    def from_model(cls, model: nn.Module, config: KernelAttentionConfig) -> Any:
        """The Hugging Face model with the weights of ours, which the configuration describes.

        Raises:
            InputError: where the configuration describes another model.
        """
        new = cls(config)
        try:
            new.model.load_state_dict(model.state_dict())
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{cls.__name__}: the configuration describes another model ({reason})"
            ) from None
        return new.train(model.training)

    def init_weights(self) -> None:
        """The constructors have drawn every weight."""

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw what a file of weights did not hold, as a new model draws it."""
        held = [*self.model.named_parameters(), *self.model.named_buffers()]
        missing = [
            (name, tensor) for name, tensor in held if not getattr(tensor, "_is_hf_initialized", False)
        ]
        if missing:
            drawn = self.kind(**self._arguments(self.config))
            new = dict([*drawn.named_parameters(), *drawn.named_buffers()])
            for name, tensor in missing:
                tensor.copy_(new[name])


class KernelAttentionForCausalLM(KernelAttentionModel, GenerationMixin):
    """``CausalLanguageModel`` with ``generate``; the layers' decoding states are its cache."""

    kind = CausalLanguageModel
    main_input_name = "input_ids"
    _is_stateful = True  # a state cannot be cut back, as assisted generation does with a cache

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        """The table of embeddings."""
        return self.model.embedding

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> nn.Embedding:
        """Refused: the logits have a bias per token, and the tokenizer is that of the training."""
        raise InputError("resize_token_embeddings: the vocabulary of this model cannot change")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DecodingCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token after each, (B, N, V).

        Args:
            input_ids: (B, N) tokens; those after ``past_key_values`` where it is given.
            attention_mask: (B, N), 1 = real token; with ``past_key_values`` it covers the tokens read too.
            past_key_values: the states after the tokens read.
            labels: (B, N) tokens, shifted here; -100 is not predicted.
            use_cache: whether to return the states after the last token.
            logits_to_keep: only those of the last tokens; 0: all.
            return_dict: False returns a tuple.
            options: ``num_items_in_batch`` of the trainer; others have no effect.
        """
        tokens, mask = _masked(input_ids, attention_mask)
        cache = None
        if past_key_values is not None or use_cache:
            x, cache = self._read(tokens, mask, past_key_values)
        else:
            x = self.model.hidden(tokens, mask)
        logits = self.model.logits(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None
        if labels is not None:
            counted = {"num_items_in_batch": options.get("num_items_in_batch")}
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **counted)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]
        return output if return_dict else output.to_tuple()

    def _read(
        self, tokens: Tensor, mask: Tensor | None, cache: DecodingCache | None
    ) -> tuple[Tensor, DecodingCache]:
        if cache is None:
            padding = None if mask is None or bool(mask.all()) else mask
            x, state = self.model.read(tokens, attention_mask=padding)
            return x, DecodingCache(state, tokens.size(1))
        if mask is not None and not bool(mask.all()):
            raise InputError("attention_mask: tokens after past_key_values cannot be padding")
        if tokens.size(1) == 1:
            x, state = self.model.advance(tokens[:, 0], cache.state)
            x = x[:, None]
        else:
            x, state = self.model.read(tokens, cache.state)
        return x, DecodingCache(state, cache.length + tokens.size(1))


class _Classifier(KernelAttentionModel):
    """A model whose outputs are the logits of classes, or the values of a regression."""

    def _output(
        self, logits: Tensor, labels: Tensor | None, return_dict: bool, options: dict[str, Any]
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        loss = None
        if labels is not None:
            counted = {"num_items_in_batch": options.get("num_items_in_batch")}
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **counted)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()


class KernelAttentionForSequenceClassification(_Classifier):
    """``TokenClassifier``: classes of texts."""

    kind = TokenClassifier

    def get_input_embeddings(self) -> nn.Module:
        """The table of embeddings."""
        return self.model.encoder.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
        **options: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, num_labels).

        Args:
            input_ids: (B, N) tokens.
            attention_mask: (B, N), 1 = real token.
            labels: (B,) classes, or what ``config.problem_type`` says.
            return_dict: False returns a tuple.
            options: ``num_items_in_batch`` of the trainer; others have no effect.
        """
        return self._output(self.model(*_masked(input_ids, attention_mask)), labels, return_dict, options)


class KernelAttentionForImageClassification(_Classifier):
    """``VisionTransformer``: classes of images."""

    kind = VisionTransformer
    main_input_name = "pixel_values"

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, return_dict: bool = True, **options: Any
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, num_labels).

        Args:
            pixel_values: (B, C, H, W) in [0, 1]; the model standardises them itself.
            labels: (B,) classes, or what ``config.problem_type`` says.
            return_dict: False returns a tuple.
            options: ``num_items_in_batch`` of the trainer; others have no effect.
        """
        return self._output(self.model(pixel_values), labels, return_dict, options)


class KernelAttentionForTimeSeriesClassification(_Classifier):
    """``SequenceClassifier``: classes of time series, or values, with ``num_labels=1``.

    transformers has no ``Auto`` class for this task: load it by this class.
    """

    kind = SequenceClassifier
    main_input_name = "past_values"

    def __init__(self, config: KernelAttentionConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"  # transformers has no loss of this class's name

    def forward(
        self,
        past_values: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
        **options: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, num_labels).

        Args:
            past_values: (B, N, c), the name that transformers' time-series models give their input.
            attention_mask: (B, N), 1 = real step.
            labels: (B,) classes, or what ``config.problem_type`` says.
            return_dict: False returns a tuple.
            options: ``num_items_in_batch`` of the trainer; others have no effect.
        """
        mask = None if attention_mask is None else attention_mask.bool()
        return self._output(self.model(past_values, mask), labels, return_dict, options)


def _masked(tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tokens, 0 at padding, and their mask as bool: the number of a padding token may be any."""
    if attention_mask is None:
        return tokens, None
    mask = attention_mask[:, -tokens.size(1) :].bool()
    return tokens.masked_fill(~mask, 0), mask


def _constructor(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The arguments of a model, with those of the encoder in the place of ``**encoder_options``."""
    own = inspect.signature(kind).parameters
    found = {
        name: parameter for name, parameter in own.items() if parameter.kind is not parameter.VAR_KEYWORD
    }
    if len(found) < len(own):
        inner = inspect.signature(SequenceEncoder).parameters
        found |= {name: inner[name] for name in inner if name not in found and name != "in_features"}
    return {name: parameter for name, parameter in found.items() if name not in ("device", "dtype")}
