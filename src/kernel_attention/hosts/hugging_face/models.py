"""The base of our models as models of Hugging Face transformers, their configuration, and the language model.

Legend: B texts, N tokens, d model width, V tokens of the vocabulary.
"""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kernel_attention.core.decoding import reorder, tensors_of
from kernel_attention.errors import InputError
from kernel_attention.hosts.hugging_face.arguments import (
    check_positions,
    read_kept,
    read_packed,
    read_padding,
    read_tokens,
    refuse_others,
    said,
    without_padding,
)
from kernel_attention.hosts.masks import PACKING
from kernel_attention.hosts.restoring import include_auxiliary_loss
from kernel_attention.models import CausalLanguageModel, SequenceEncoder
from kernel_attention.models.language.decoding import DecodingState
from kernel_attention.tensors.packing import PackedSequences

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


class DecodingCache:
    """The ``past_key_values`` of ``generate``: the state of every layer after the tokens read.

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
    _keys_to_ignore_on_load_missing = [r"\binput_mean_rest$"]  # noqa: RUF012  (zero in earlier models)

    def __init__(self, config: KernelAttentionConfig) -> None:
        super().__init__(config)
        self.model: Any = self.kind(**self._arguments(config))
        for name in config.attribute_map.values():  # other libraries read the sizes from the configuration
            if getattr(config, name) is None and (size := _constructor(self.kind).get(name)) is not None:
                setattr(config, name, size.default)
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

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this path; peft asks for the table of embeddings by the path that BERT gives it."""
        if target == "embeddings.word_embeddings" and hasattr(self, "get_input_embeddings"):
            return self.get_input_embeddings()
        return super().get_submodule(target)

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
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DecodingCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cache_position: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token after each, (B, N, V). A switch that is None is the configuration's.

        Args:
            input_ids: (B, N) tokens; those after ``past_key_values`` where it is given.
            attention_mask: (B, N), 1 = real token; with ``past_key_values`` it covers the tokens read too.
            past_key_values: the states after the tokens read. There are no gradients after them.
            labels: (B, N) tokens, shifted here; -100 is not predicted, nor is the first token of a text.
            use_cache: whether to return the states after the last token, which have no gradients. None in
                training, and for several texts in a row: no.
            logits_to_keep: only those of the last tokens, 0: all; or those of the places (K,).
            return_dict: False returns a tuple.
            inputs_embeds: (B, N, d), what ``get_input_embeddings()`` gives, in the place of ``input_ids``.
            position_ids: (B, N), the places of the real tokens in their texts, which are also the default.
                Where they begin again at 0, without padding, several texts lie in a row.
            token_type_ids: zeros.
            cache_position: (N,), the places with those of padding, which are also the default.
            output_hidden_states: whether to return the input of every layer and what the logits are made of,
                (B, N, d) each.
            options: ``num_items_in_batch`` of the trainer, and ``cu_seq_lens_q`` (S + 1,), ``cu_seq_lens_k``,
                ``max_length_q``, ``max_length_k`` and ``seq_idx``, which say where texts lie in one row.
                Others must be None.

        Raises:
            InputError: for an argument that would change the result and is not served, for positions that
                are no places in the texts, and for ``past_key_values`` in training with gradients.
        """
        packing = {name: options.pop(name, None) for name in PACKING}
        refuse_others(self, {"token_type_ids": token_type_ids, **options}, is_causal=True)
        tokens = read_tokens(input_ids, inputs_embeds)
        cache = self._checked(past_key_values, len(tokens))
        before = 0 if cache is None else cache.length
        mask = read_padding(attention_mask, tokens, cache is not None)
        packed = None
        if cache is None:
            packed = read_packed(type(self).__name__, position_ids, tokens, mask, packing)
        else:
            refuse_others(self, packing)
        if packed is None:
            start = 0 if cache is None else cache.state.position
            check_positions("position_ids", position_ids, tokens, mask, start)
        elif use_cache:
            raise InputError(
                "use_cache=True: several texts in a row are not continued; give each its own row"
            )
        check_positions("cache_position", cache_position, tokens[:1], None, before)
        tokens, kept = without_padding(tokens, mask), read_kept(logits_to_keep)
        states: list[Tensor] | None = None
        if said(output_hidden_states, self.config.output_hidden_states):
            states = []
        if packed is not None:
            x, states = self._hidden_of_packed(tokens, packed, states)
            if labels is not None:
                labels = labels.masked_fill((packed.place == 0).view_as(labels), -100)
        elif cache is not None or said(use_cache, self.config.use_cache and not self.training):
            x, cache = self._read(tokens, mask, cache, states)
        else:
            x = self.model.hidden(tokens, mask, hidden_states=states)
        logits, loss = self.model.logits(x if labels is not None else x[:, kept]), None
        if labels is not None:
            counted = {"num_items_in_batch": options.get("num_items_in_batch")}
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **counted)
            logits = logits[:, kept]
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=None if use_cache is False else cache,  # type: ignore[arg-type]
            hidden_states=None if states is None else (*states, self.model.norm(x)),
        )
        return output if said(return_dict, self.config.return_dict) else output.to_tuple()

    def _hidden_of_packed(
        self, tokens: Tensor, packed: PackedSequences, states: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor] | None]:
        """``hidden`` of tokens (B, N, ...) in whose rows several texts lie, and the hidden states."""
        rows = tokens.shape[:2]
        x = self.model.hidden(tokens.flatten(0, 1)[None], hidden_states=states, cu_seqlens=packed)
        apart = None if states is None else [state[0].unflatten(0, rows) for state in states]
        return x[0].unflatten(0, rows), apart

    def _checked(self, cache: DecodingCache | None, batch: int) -> DecodingCache | None:
        if cache is None:
            return None
        if not isinstance(cache, DecodingCache):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}, expected None or the past_key_values of an "
                "earlier output of this model: its layers keep states of their own"
            )
        if (held := tensors_of(cache.state)) and held[0].size(0) != batch:
            raise InputError(f"past_key_values holds {held[0].size(0)} texts, expected {batch}")
        if self.training and torch.is_grad_enabled():
            raise InputError(
                "past_key_values: tokens that are read after a state have no gradients; train on whole "
                "texts, or decode under torch.no_grad()"
            )
        return cache

    def _read(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        cache: DecodingCache | None,
        states: list[Tensor] | None,
    ) -> tuple[Tensor, DecodingCache]:
        if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
            mask = None
        if cache is None:
            x, state = self.model.read(tokens, attention_mask=mask, hidden_states=states)
            return x, DecodingCache(state, tokens.size(1))
        if mask is not None:
            raise InputError("attention_mask: tokens after past_key_values cannot be padding")
        x, state = self.model.read(tokens, cache.state, hidden_states=states)
        return x, DecodingCache(state, cache.length + tokens.size(1))


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
