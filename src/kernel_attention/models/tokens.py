"""Classifiers of token sequences, of pairs of them, and of every position, with the sequence encoder.

The models of Long Range Arena (Tay et al. 2021) as Primal-Attention's experiments use them: embedded
tokens, learnt positions, pre-norm layers, the mean over the real tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.parameters import Device, reset_submodules
from kernel_attention.errors import InputError, require_positive
from kernel_attention.mechanisms import AttentionSpec
from kernel_attention.models.sequence import SequenceEncoder
from kernel_attention.models.sequence_classifier import mean_token
from kernel_attention.tensors.packing import PackedSequences


class TokenEncoder(SequenceEncoder):
    """``SequenceEncoder`` whose input projection is a table of learnt embeddings.

    Args:
        vocabulary_size: number of different tokens V.
        max_len: longest sequence.
        attention: as in ``SequenceEncoder``.
        options: the other arguments of ``SequenceEncoder``, without those of stems, patches and views.
    """

    def __init__(
        self,
        vocabulary_size: int,
        max_len: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "primal",
        **options: Any,
    ) -> None:
        require_positive(vocabulary_size=vocabulary_size)
        super().__init__(vocabulary_size, max_len, attention, **options)

    def _set_input(self, in_features: int, stem: str, stem_layers: int, dropout: float, **where: Any) -> None:
        if stem != "linear" or self.patch_len != 1 or self.views != ("raw",):
            raise InputError(
                f"stem={stem!r}, patch_len={self.patch_len}, views={self.views!r}: tokens have a table of "
                "embeddings (accepted: stem='linear', patch_len=1, views=('raw',))"
            )
        self.embed = nn.Embedding(in_features, self.embed_dim, **where)
        self._scale_embedding()

    def _reset_input(self) -> None:
        self.embed.reset_parameters()
        self._scale_embedding()

    def _scale_embedding(self) -> None:
        # Times sqrt(d), as every encoder's input is, the entries have deviation 1.
        nn.init.normal_(self.embed.weight, std=self.embed_dim**-0.5)

    def _check_input(self, x: Tensor) -> None:
        if not are_tokens(x, self.embed_dim):
            raise InputError(
                f"x has shape {tuple(x.shape)} and dtype {x.dtype}, expected (B, N) whole numbers, or "
                f"embedded tokens (B, N, {self.embed_dim})"
            )

    def _embed(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        return (x if x.is_floating_point() else self.embed(x)) * math.sqrt(self.embed_dim)


def are_tokens(x: Tensor, embed_dim: int) -> bool:
    """True where x holds the numbers of tokens, (B, N), or embedded tokens, (B, N, d)."""
    return x.dim() == 3 and x.size(2) == embed_dim if x.is_floating_point() else x.dim() == 2


class TokenClassifier(nn.Module):
    """Class logits of token sequences: encoder, mean over the real tokens, linear head.

    Args:
        vocabulary_size: number of different tokens.
        num_outputs: classes.
        max_len: longest sequence.
        attention: as in ``TokenEncoder``.
        is_causal: whether a token reads only those up to it, as in a language model.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
        encoder_options: the other arguments of ``TokenEncoder``.

    Raises:
        InputError: for sizes out of range, and where ``is_causal`` for a mechanism without a causal form.
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_outputs: int,
        max_len: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "primal",
        *,
        is_causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **encoder_options: Any,
    ) -> None:
        super().__init__()
        require_positive(num_outputs=num_outputs)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.is_causal = is_causal
        self.encoder = TokenEncoder(vocabulary_size, max_len, attention, **where, **encoder_options)
        if is_causal:
            self.encoder.require_causal_form()
        self.head = self._make_head(self.encoder.embed_dim, num_outputs, **where)

    def reset_parameters(self) -> None:
        """Draw every parameter of the encoder and the classifier anew."""
        reset_submodules(self)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: list[Tensor] | None = None,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Logits (B, num_outputs).

        Args:
            x: (B, N) token numbers, or (B, N, d), what ``encoder.embed`` gives for them.
            attention_mask: (B, N), True = real token.
            hidden_states: see ``SequenceEncoder.forward``.
            cu_seqlens: where S sequences begin in a row x (1, N), whose logits are (S, num_outputs).
            max_seqlen: with ``cu_seqlens``, the longest sequence's tokens, or more.
        """
        if cu_seqlens is not None:
            cu_seqlens = self.encoder.packed(x, cu_seqlens, max_seqlen, attention_mask=attention_mask)
        return self.head(self.pooled(x, attention_mask, hidden_states, cu_seqlens))

    def pooled(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        hidden_states: list[Tensor] | None = None,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """The mean of the encoded real tokens, (B, d); of each of packed sequences, (S, d)."""
        encoded = self.encoder(x, attention_mask, self.is_causal, hidden_states, cu_seqlens=packed)
        if packed is not None:
            encoded, attention_mask = packed.unpack(encoded), packed.attention_mask
        return mean_token(encoded, attention_mask, self.encoder.sequence_group)

    def _make_head(self, width: int, num_outputs: int, **where: Any) -> nn.Module:
        return nn.Linear(width, num_outputs, **where)


class TokenPairClassifier(TokenClassifier):
    """Class logits of pairs of sequences: one encoder for both, a GELU network on [a, b, a * b, a - b].

    The arguments are those of ``TokenClassifier``.
    """

    def _make_head(self, width: int, num_outputs: int, **where: Any) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4 * width, width, **where), nn.GELU(), nn.Linear(width, num_outputs, **where)
        )

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: list[Tensor] | None = None,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """x (B, 2, N) token numbers, attention_mask (B, 2, N) -> (B, num_outputs)."""
        if cu_seqlens is not None or max_seqlen is not None:
            raise InputError("TokenPairClassifier: cu_seqlens was given, but pairs are not packed")
        if x.dim() != 3 or x.size(1) != 2:
            raise InputError(f"x has shape {tuple(x.shape)}, expected (B, 2, N)")
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        a, b = self.pooled(x.flatten(0, 1), mask, hidden_states).unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([a, b, a * b, a - b], dim=-1))


class PositionClassifier(nn.Module):
    """Class logits of every position: encoder, linear head, or the embedding's weights as the head.

    Args:
        in_features: the number of different tokens, or of channels where ``is_real``.
        num_outputs: classes.
        max_len: longest sequence.
        attention: one mechanism for all layers or a list with one per layer; see ``layer_specs``.
        is_real: whether the inputs are vectors (``SequenceEncoder``) or tokens (``TokenEncoder``).
        is_causal: whether a position reads only those up to it.
        tied: whether the logits use the weights of the embedding (Press & Wolf 2017), for tasks whose classes
            are the tokens. The encoder then ends in its norm, as language models do: after a GELU, no output
            could point away from an embedding.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
        encoder_options: the other arguments of ``SequenceEncoder``.

    Raises:
        InputError: for sizes out of range, where ``is_causal`` for a mechanism without a causal form, and
            where ``tied`` for classes that are not the tokens.
    """

    def __init__(
        self,
        in_features: int,
        num_outputs: int,
        max_len: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "softmax",
        *,
        is_real: bool = False,
        is_causal: bool = False,
        tied: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **encoder_options: Any,
    ) -> None:
        super().__init__()
        require_positive(num_outputs=num_outputs)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if tied and (is_real or num_outputs != in_features):
            what = "vectors" if is_real else f"{in_features} tokens"
            raise InputError(
                f"tied=True needs the tokens as classes; there are {num_outputs} classes of {what}"
            )
        self.is_causal = is_causal
        if tied:
            encoder_options.setdefault("final_activation", "none")
        kind = SequenceEncoder if is_real else TokenEncoder
        self.encoder = kind(in_features, max_len, attention, **where, **encoder_options)
        if is_causal:
            self.encoder.require_causal_form()
        self.head = None if tied else nn.Linear(self.encoder.embed_dim, num_outputs, **where)

    def reset_parameters(self) -> None:
        """Draw every parameter of the encoder and the head anew."""
        reset_submodules(self)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """x (B, N) tokens or (B, N, c) vectors -> logits (B, N, num_outputs).

        ``cu_seqlens`` and ``max_seqlen`` are those of ``SequenceEncoder.forward``.
        """
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        return self._logits(self.encoder(x, None, self.is_causal, **packing))

    def logits_at(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The logits of the positions where ``chosen`` (B, N) is True, in order, (positions, num_outputs)."""
        return self._logits(self.encoder(x, None, self.is_causal)[chosen])

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(hidden)
        assert isinstance(self.encoder, TokenEncoder)
        return F.linear(hidden, self.encoder.embed.weight)
