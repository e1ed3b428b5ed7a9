"""Our classifiers as models of Hugging Face transformers.

Legend: B sequences or images, N tokens, d model width, c channels.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from kernel_attention.hosts.hugging_face.arguments import (
    check_positions,
    read_padding,
    read_tokens,
    refuse_others,
    said,
    without_padding,
)
from kernel_attention.hosts.hugging_face.models import KernelAttentionConfig, KernelAttentionModel
from kernel_attention.models import SequenceClassifier, TokenClassifier, VisionTransformer


class _Classifier(KernelAttentionModel):
    """A model whose outputs are the logits of classes, or the values of a regression."""

    def _classified(
        self,
        *inputs: Tensor | None,
        labels: Tensor | None,
        output_hidden_states: bool | None,
        return_dict: bool | None,
        num_items_in_batch: Tensor | int | None = None,
        **_: None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        states: list[Tensor] | None = None
        if said(output_hidden_states, self.config.output_hidden_states):
            states = []
        logits, loss = self.model(*inputs, hidden_states=states), None
        if labels is not None:
            counted = {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **counted)
        output = SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=None if states is None else tuple(states),
        )
        return output if said(return_dict, self.config.return_dict) else output.to_tuple()


class KernelAttentionForSequenceClassification(_Classifier):
    """``TokenClassifier``: classes of texts."""

    kind = TokenClassifier

    def get_input_embeddings(self) -> nn.Module:
        """The table of embeddings."""
        return self.model.encoder.embed

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, num_labels). A switch that is None is the configuration's.

        Args:
            input_ids: (B, N) tokens.
            attention_mask: (B, N), 1 = real token.
            labels: (B,) classes, or what ``config.problem_type`` says.
            return_dict: False returns a tuple.
            inputs_embeds: (B, N, d), what ``get_input_embeddings()`` gives, in the place of ``input_ids``.
            position_ids: (B, N), the places of the tokens in their rows, which are also the default.
            token_type_ids: zeros.
            output_hidden_states: whether to return the input of every layer and the encoder's output,
                (B, N, d) each.
            options: ``num_items_in_batch`` of the trainer. Others must be None.

        Raises:
            InputError: for an argument that would change the result and is not served.
        """
        refuse_others(self, {"token_type_ids": token_type_ids, **options}, self.model.is_causal)
        tokens = read_tokens(input_ids, inputs_embeds)
        mask = read_padding(attention_mask, tokens)
        check_positions("position_ids", position_ids, tokens, None)
        return self._classified(
            *(without_padding(tokens, mask), mask),
            labels=labels,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **options,
        )


class KernelAttentionForImageClassification(_Classifier):
    """``VisionTransformer``: classes of images."""

    kind = VisionTransformer
    main_input_name = "pixel_values"

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        *,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, num_labels). A switch that is None is the configuration's.

        Args:
            pixel_values: (B, C, H, W) in [0, 1]; the model standardises them itself.
            labels: (B,) classes, or what ``config.problem_type`` says.
            return_dict: False returns a tuple.
            output_hidden_states: whether to return the input of every layer and the tokens after the final
                norm, (B, N, d) each.
            options: ``num_items_in_batch`` of the trainer. Others must be None.

        Raises:
            InputError: for an argument that would change the result and is not served.
        """
        refuse_others(self, options)
        return self._classified(
            pixel_values,
            labels=labels,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **options,
        )


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
        return_dict: bool | None = None,
        *,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, num_labels). A switch that is None is the configuration's.

        Args:
            past_values: (B, N, c), the name that transformers' time-series models give their input.
            attention_mask: (B, N), 1 = real step.
            labels: (B,) classes, or what ``config.problem_type`` says.
            return_dict: False returns a tuple.
            output_hidden_states: whether to return the input of every layer and the encoder's output.
            options: ``num_items_in_batch`` of the trainer. Others must be None.

        Raises:
            InputError: for an argument that would change the result and is not served.
        """
        refuse_others(self, options)
        return self._classified(
            *(past_values, read_padding(attention_mask, past_values)),
            labels=labels,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **options,
        )
