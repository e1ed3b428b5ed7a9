"""The causal language model, a decoder with any causal mechanism in each layer, and the text that it writes.

Primal-Attention's WikiText-103 model is ``attention=["softmax"] * 5 + ["primal"]`` (supplement, table 5), the
kernel-PCA paper's ``[{"rpc": {"iterations": 4, "lam": 4.0}}] * 4 + ["symmetric"] * 12`` (appendix A).

Legend: B texts, N tokens, d model width, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.layer import require_causal_form
from kernel_attention.core.parameters import Device, reset_module
from kernel_attention.errors import InputError, require_positive, require_probability, require_weight, unknown
from kernel_attention.mechanisms import AttentionSpec
from kernel_attention.models.encoder_layer import EncoderLayer, create_attentions
from kernel_attention.models.language.cross_entropy import linear_cross_entropy
from kernel_attention.models.language.decoding import (
    DecodingState,
    initial_state,
    read_on,
    state_after,
    step_through,
)
from kernel_attention.models.sequence import sinusoidal_positions
from kernel_attention.models.tokens import are_tokens
from kernel_attention.tensors.dropout import Dropout
from kernel_attention.tensors.packing import PackedSequences, pack_sequences
from kernel_attention.tensors.padding import is_exporting

_DEVIATION = 0.02  # of the embedding and the positions at first


class CausalLanguageModel(nn.Module):
    """Token embedding and positions, causal layers, final norm (pre-norm layers), logits.

    Args:
        vocabulary_size: V.
        max_len: longest context.
        attention: one mechanism for all layers or a list with one per layer; see ``layer_specs``.
        embed_dim: model width d.
        num_heads: heads of every layer.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: of embeddings and layers, and of the attention weights where a mechanism has them.
        positions: "learnt" (normal, deviation 0.02, at first) or "fixed" (sinusoidal).
        norm_first: pre-norm layers with a norm after the last, else post-norm layers.
        tied: whether the logits use the weights of the embedding (Press & Wolf 2017).
        experts: networks of a sparse mixture in place of each feed-forward network; 0: no mixture.
        experts_per_token: networks of the mixture that read a token.
        short_convolution: taps of a depth-wise convolution of each attention's input; 0: none. See
            ``ShortConvolution``.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Raises:
        InputError: for a mechanism or options without a causal form, and for sizes out of range.
    """

    supports_sharding = False  # every part of a sequence would get the positions of the first part

    positions: Tensor
    output_weight: nn.Parameter | None

    def __init__(
        self,
        vocabulary_size: int,
        max_len: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "softmax",
        *,
        embed_dim: int = 512,
        num_heads: int = 8,
        num_layers: int = 6,
        feedforward_dim: int = 2048,
        dropout: float = 0.1,
        positions: Literal["learnt", "fixed"] = "learnt",
        norm_first: bool = True,
        tied: bool = True,
        experts: int = 0,
        experts_per_token: int = 2,
        short_convolution: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive(
            vocabulary_size=vocabulary_size, max_len=max_len, embed_dim=embed_dim, num_layers=num_layers,
            feedforward_dim=feedforward_dim,
        )  # fmt: skip
        require_probability(dropout=dropout)
        self.vocabulary_size = vocabulary_size
        self.max_len = max_len
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(vocabulary_size, embed_dim, **where)
        nn.init.normal_(self.embedding.weight, std=_DEVIATION)
        self._set_positions(positions, embed_dim, **where)
        shared = {"max_len": max_len, "dropout": dropout}
        parts: dict[str, Any] = {
            "experts": experts, "experts_per_token": experts_per_token,
            "short_convolution": short_convolution,
        }  # fmt: skip
        self.layers = nn.ModuleList()
        for layer in create_attentions(attention, num_layers, embed_dim, num_heads, shared, **where):
            require_causal_form(layer, layer.mechanism_name)
            self.layers.append(EncoderLayer(layer, feedforward_dim, dropout, norm_first, **parts, **where))
        self.norm = nn.LayerNorm(embed_dim, **where) if norm_first else nn.Identity()
        self.dropout = Dropout(dropout)
        self.output_bias = nn.Parameter(torch.empty(vocabulary_size, **where))
        own = None if tied else nn.Parameter(torch.empty(vocabulary_size, embed_dim, **where))
        self.register_parameter("output_weight", own)
        self._reset_output()

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new model; after ``to_empty``, say."""
        self.embedding.reset_parameters()
        nn.init.normal_(self.embedding.weight, std=_DEVIATION)
        self._reset_positions()
        reset_module(self.layers)
        reset_module(self.norm)
        self._reset_output()

    def _reset_output(self) -> None:
        nn.init.zeros_(self.output_bias)
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=_DEVIATION)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        *,
        last: int | None = None,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Logits of the token after each of the last ``last`` positions (default: of all).

        Args:
            tokens: (B, N) whole numbers below V.
            attention_mask: (B, N) bool, True = real token; a text has the logits that it has alone.
            last: how many positions.
            cu_seqlens: where the texts begin that lie end to end in tokens (1, N), see ``AttentionLayer``;
                the positions of each begin at 0.
            max_seqlen: with ``cu_seqlens``, the longest text's tokens, or more.

        Returns:
            (B, last, V); those of a position depend on the tokens up to it.

        Raises:
            InputError: for another shape or type, or more than max_len tokens.
        """
        x = self.hidden(tokens, attention_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        return self.logits(x if last is None else x[:, -last:])

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        *,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Mean cross-entropy of the targets (B, N), in nats, without all logits at once.

        See ``kernel_attention.models.language.cross_entropy.linear_cross_entropy``, and ``forward``.
        """
        x = self.hidden(tokens, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        x = self.dropout(self.norm(x)).flatten(0, 1)
        return linear_cross_entropy(x, self._weight(), self.output_bias, targets.flatten(), ignore_index)

    def hidden(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: list[Tensor] | None = None,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Tokens and their mask -> (B, N, d) after the last layer, which ``logits`` takes.

        Args:
            tokens: (B, N) whole numbers, or (B, N, d), what ``embedding`` gives for them.
            attention_mask: (B, N) bool, True = real token.
            hidden_states: a list to which the input of every layer is added, (B, N, d) each.
            cu_seqlens: see ``forward``.
            max_seqlen: see ``forward``.
        """
        self.check_tokens(tokens)
        packed = None
        if cu_seqlens is None:
            x = self.embed(tokens, 0, attention_mask)
        else:
            others = {"attention_mask": attention_mask}
            packed = pack_sequences(type(self).__name__, tokens, cu_seqlens, max_seqlen, **others)
            self.check_length(packed.max_length)
            x = self._placed(tokens, self.positions[packed.place])
        packing = {} if packed is None else {"cu_seqlens": packed}
        for layer in self.layers:
            if hidden_states is not None:
                hidden_states.append(x)
            x = layer(x, attention_mask, True, **packing)
        return x

    def embed(self, tokens: Tensor, start: int | Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N), or (B, N, d), that follow the first ``start``, one number or (B,), -> (B, N, d).

        With a mask (B, N; True = real token), positions count the real tokens.
        """
        if isinstance(start, int) and attention_mask is None:
            self.check_length(start + tokens.size(1))
            positions = self.positions[start : start + tokens.size(1)]
        else:
            index = self._positions_of(tokens, start, attention_mask)
            # An exported program finds out when it reads the table, and a short text cannot have too many.
            if not is_exporting() and (isinstance(start, Tensor) or tokens.size(1) > self.max_len):
                self.check_length(int(index.max()) + 1)
            positions = self.positions[index]
        return self._placed(tokens, positions)

    def _placed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The embedded tokens with their positions, (B, N, d)."""
        return self.dropout((tokens if tokens.is_floating_point() else self.embedding(tokens)) + positions)

    @staticmethod
    def _positions_of(tokens: Tensor, start: int | Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, N) int64; padded tokens have any position."""
        if attention_mask is None:
            real = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        else:
            real = attention_mask.long()
        start = start[:, None] if isinstance(start, Tensor) else start
        return (real.cumsum(dim=1) - 1).clamp_min(0) + start

    def logits(self, x: Tensor) -> Tensor:
        """(..., d) after the last layer -> (..., V)."""
        return F.linear(self.dropout(self.norm(x)), self._weight(), self.output_bias)

    def _weight(self) -> Tensor:
        """The weight of the logits' map, (V, d)."""
        return self.embedding.weight if self.output_weight is None else self.output_weight

    def check_tokens(self, tokens: Tensor) -> None:
        """InputError for anything but tokens (B, N), or embedded ones (B, N, d), with N at least 1."""
        width = self.embedding.embedding_dim
        if not are_tokens(tokens, width) or tokens.size(1) == 0:
            raise InputError(
                f"tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}, expected whole numbers of "
                f"shape (B, N), or embedded tokens (B, N, {width}), with N at least 1"
            )

    def check_length(self, length: int) -> None:
        """InputError for a text that is longer than the model accepts."""
        if length > self.max_len:
            raise InputError(f"sequence length {length} exceeds max_len={self.max_len}")

    def initial_state(self, batch_size: int = 1) -> DecodingState:
        """The state of decoding before the first token."""
        return initial_state(self, batch_size)

    def prefill(
        self, tokens: Tensor, state: DecodingState | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, DecodingState]:
        """Read (B, N) tokens -> logits after the last one (B, V), and the state after it.

        Texts of different length have a mask (B, N; True = real token), at the beginning of the text alone.
        The logits of each are those after its last real token.
        """
        x, state = self.read(tokens, state, attention_mask)
        if attention_mask is None:
            return self.logits(x[:, -1]), state
        places = torch.arange(1, tokens.size(1) + 1, device=tokens.device) * attention_mask
        return self.logits(x[torch.arange(len(x), device=x.device), places.argmax(dim=1)]), state

    def read(
        self,
        tokens: Tensor,
        state: DecodingState | None = None,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: list[Tensor] | None = None,
    ) -> tuple[Tensor, DecodingState]:
        """As ``prefill``, with all of (B, N, d) after the last layer, which ``logits`` takes.

        ``tokens`` and ``hidden_states`` are those of ``hidden``. At the beginning of a text the output is
        that of ``hidden`` and has its gradients. After a state it has none. The state never has any.
        """
        state = self.initial_state(tokens.size(0)) if state is None else state
        self.check_tokens(tokens)
        starts = isinstance(state.position, int) and state.position == 0
        if attention_mask is not None:
            if attention_mask.shape != tokens.shape[:2] or attention_mask.dtype != torch.bool:
                raise InputError(
                    f"attention_mask has shape {tuple(attention_mask.shape)} and dtype "
                    f"{attention_mask.dtype}, expected {tuple(tokens.shape[:2])} and torch.bool (True = real "
                    "token)"
                )
            if not starts:
                raise InputError("attention_mask: only the beginning of a text can be padded")
        count = tokens.size(1) if attention_mask is None else attention_mask.sum(dim=1)
        x = self.embed(tokens, state.position, attention_mask)
        if not starts:
            x, after = read_on(self.layers, x, state.layers, hidden_states)
            return x, DecodingState(state.position + count, after)
        states = []
        for layer in self.layers:
            if hidden_states is not None:
                hidden_states.append(x)
            states.append(state_after(layer, x, attention_mask))  # type: ignore[arg-type]
            x = layer(x, attention_mask, True)
        return x, DecodingState(count, tuple(states))

    def step(self, tokens: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read one token (B,) -> logits of the next one (B, V), and the state after it.

        The time and memory of a step are constant where every mechanism has a recurrent form; a layer
        without one keeps its inputs and attends to all of them again.
        """
        x, state = self.advance(tokens, state)
        return self.logits(x), state

    def advance(self, tokens: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """As ``step``, with (B, d) after the last layer, which ``logits`` takes."""
        x = self.embed(tokens[:, None], state.position)[:, 0]
        x, states = step_through(self.layers, x, state.layers)
        return x, DecodingState(state.position + 1, states)

    def _set_positions(self, kind: str, embed_dim: int, **where: Any) -> None:
        table = torch.empty(self.max_len, embed_dim, **where)
        if kind == "learnt":
            self.positions = nn.Parameter(table)
        elif kind == "fixed":
            self.register_buffer("positions", table, persistent=False)
        else:
            raise unknown("positions", kind, ("learnt", "fixed"))
        self._reset_positions()

    @torch.no_grad()
    def _reset_positions(self) -> None:
        if isinstance(self.positions, nn.Parameter):
            self.positions.normal_(std=_DEVIATION)
        else:  # scaled like the embedding
            self.positions.copy_(_DEVIATION * sinusoidal_positions(*self.positions.shape))


def generate(
    model: CausalLanguageModel,
    prompt: Tensor,
    count: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The tokens that follow a prompt, one after the other.

    Args:
        model: put it into evaluation mode first; its dropout is not switched off here.
        prompt: (B, N) tokens, N at least 1.
        count: how many tokens to generate.
        temperature: 0 takes the most likely token; otherwise draws from softmax(logits / temperature).
        top_k: draw among the most likely tokens only.
        generator: for the draws; None: PyTorch's global one.

    Yields:
        (B,) tokens. They are not kept here: the memory is that of the state.

    Raises:
        InputError: before the first token, for arguments out of range and a text beyond max_len.
    """
    if count < 0:
        raise InputError(f"count={count} must be at least 0")
    require_weight(temperature=temperature)
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    if prompt.dim() != 2 or prompt.size(1) == 0:
        raise InputError(f"prompt has shape {tuple(prompt.shape)}, expected (B, N) with N at least 1")
    model.check_length(prompt.size(1) + max(count - 1, 0))
    return _generate(model, prompt, count, temperature, top_k, generator)


def _generate(
    model: CausalLanguageModel,
    prompt: Tensor,
    count: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    state: DecodingState | None = None
    tokens = prompt
    for _ in range(count):
        with torch.inference_mode():  # not around yield: the caller keeps its own gradient mode
            if state is None:
                logits, state = model.prefill(prompt)
            else:
                logits, state = model.step(tokens, state)
            tokens = draw_tokens(logits, temperature, top_k, generator)
        yield tokens


def draw_tokens(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """The next tokens (B,) from logits (B, V), most likely or drawn as ``generate`` says."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
