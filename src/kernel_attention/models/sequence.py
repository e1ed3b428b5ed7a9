"""The sequence encoder of the papers' time-series experiments, with any attention mechanism in each layer.

PrimalFormer is ``attention="primal"``; Primal.+ is ``attention=["softmax", "primal"]`` (Primal-Attention,
section 5).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.layer import require_causal_form
from kernel_attention.core.parameters import Device, reset_module
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError, require_positive, require_probability, unknown
from kernel_attention.mechanisms import AttentionFactory, AttentionSpec
from kernel_attention.models.encoder_layer import EncoderLayer, create_attentions
from kernel_attention.models.rocket_stem import RocketStem
from kernel_attention.models.series_stem import (
    STEMS,
    ConvolutionalPositions,
    ConvolutionStem,
    LinearStem,
    Stem,
    View,
    automatic_patch_len,
    require_views,
    series_views,
)
from kernel_attention.tensors.dropout import Dropout
from kernel_attention.tensors.packing import PackedSequences, pack_sequences
from kernel_attention.tensors.pooling import pool_mask

Positions = Literal["learnt", "learnt_normal", "fixed", "time_absolute", "convolutional", "none"]
_POSITIONS = ("learnt", "learnt_normal", "fixed", "time_absolute", "convolutional", "none")
FinalActivation = Literal["gelu", "none"]
_FINAL_ACTIVATIONS = ("gelu", "none")

NUM_HEADS = 8

# Of the spacing of float32 numbers: rounding changes such a deviation in the third digit.
_FEWEST_STEPS = 1000


def is_resolved(mean: Any, std: Any) -> Any:
    """True where float32 numbers at this mean resolve this deviation; entry by entry of arrays or tensors."""
    return abs(mean) * (_FEWEST_STEPS * torch.finfo(torch.float32).eps) <= std


class SequenceEncoder(nn.Module):
    """A stem, positions, encoder layers, final norm and activation; padding zeroed.

    The papers' stem is a linear projection of every step, scaled by sqrt(d).

    Args:
        in_features: channels c of the input.
        max_len: longest sequence.
        attention: one mechanism for all layers or a list with one per layer: a name, ``{name: options}``, or
            a class or function that makes a layer from ``(embed_dim, num_heads, **options)``.
        embed_dim: model width d.
        num_heads: heads of every layer.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: of positions, layers and output, and of the attention weights where a mechanism has them.
        positions: what is added to the tokens. "learnt" (uniform(-0.02, 0.02) at first); "learnt_normal"
            (normal(0, 1) at first, as large as embedded tokens); "fixed" (sinusoidal); "time_absolute"
            (sinusoidal with frequencies times d / N for N tokens, which keeps short series apart; ConvTran,
            Foumani et al. 2024, eq. 13); "convolutional" (relative, see ``ConvolutionalPositions``); "none".
        norm_first: pre-norm layers.
        stem: "linear"; "convolution", see ``ConvolutionStem``; or "rocket", random convolutions, see
            ``RocketStem`` and ``fit_stem``.
        stem_layers: blocks of the convolution stem.
        patch_len: steps per token; 0: as many as it takes to have at most 128 tokens, or 8 of a rocket stem.
            Above 1 the encoder returns ceil(N / patch_len) tokens, and padding must be on the right.
        final_activation: "gelu" as in the papers, or "none", for logits by the weights of an embedding.
        views: what the stem reads, one or more of "raw", "normalized" and "difference"; see ``series_views``.
        experts: networks of a sparse mixture in place of each feed-forward network; 0: no mixture.
        experts_per_token: networks of the mixture that read a token.
        short_convolution: taps of a depth-wise convolution of each attention's input; 0: none. See
            ``ShortConvolution``.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    sequence_group: SequenceGroup | None = None

    positions: Tensor
    input_mean: Tensor
    input_mean_rest: Tensor
    input_std: Tensor

    def __init__(
        self,
        in_features: int,
        max_len: int,
        attention: AttentionSpec | AttentionFactory | Sequence[AttentionSpec | AttentionFactory] = "primal",
        *,
        embed_dim: int = 512,
        num_heads: int = NUM_HEADS,
        num_layers: int = 2,
        feedforward_dim: int = 2048,
        dropout: float = 0.1,
        positions: Positions = "learnt",
        norm_first: bool = False,
        stem: Stem = "linear",
        stem_layers: int = 3,
        patch_len: int = 1,
        final_activation: FinalActivation = "gelu",
        views: Sequence[View] = ("raw",),
        experts: int = 0,
        experts_per_token: int = 2,
        short_convolution: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive(
            in_features=in_features, max_len=max_len, embed_dim=embed_dim, num_layers=num_layers,
            feedforward_dim=feedforward_dim,
        )  # fmt: skip
        require_probability(dropout=dropout)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        require_views(views)
        self.embed_dim = embed_dim
        self.max_len = max_len
        self.in_features = in_features
        self.views = tuple(views)
        if stem not in STEMS:
            raise unknown("stem", stem, STEMS)
        self.patch_len = patch_len if patch_len != 0 else automatic_patch_len(max_len, stem)
        require_positive(patch_len=self.patch_len)
        self.num_tokens = -(-max_len // self.patch_len)
        self._set_input(in_features, stem, stem_layers, dropout, **where)
        self._set_positions(positions, **where)
        shared = {"max_len": self.num_tokens, "dropout": dropout}
        parts: dict[str, Any] = {
            "experts": experts, "experts_per_token": experts_per_token,
            "short_convolution": short_convolution,
        }  # fmt: skip
        self.has_experts = experts > 0
        self.layers = nn.ModuleList()
        for layer in create_attentions(attention, num_layers, embed_dim, num_heads, shared, **where):
            self.layers.append(EncoderLayer(layer, feedforward_dim, dropout, norm_first, **parts, **where))
        self.norm = nn.LayerNorm(embed_dim, **where)
        if final_activation not in _FINAL_ACTIVATIONS:
            raise unknown("final_activation", final_activation, _FINAL_ACTIVATIONS)
        self.final_activation = final_activation
        self.dropout = Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new model; after ``to_empty``, say."""
        self._reset_input()
        self._reset_positions()
        reset_module(self.layers)
        self.norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        hidden_states: list[Tensor] | None = None,
        *,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """(B, N, c) -> (B, N, d); padded positions (attention_mask False) are zero.

        With patches, (B, ceil(N / patch_len), d), and ``token_mask`` says which tokens are real. The input of
        every layer and the result are added to the list ``hidden_states``, if there is one.

        ``cu_seqlens`` and ``max_seqlen`` say where the sequences lie in x (1, N, c), see ``AttentionLayer``.
        Their positions begin at 0 each, and the tokens of the result are those of each sequence, end to end.
        """
        packed = None
        if cu_seqlens is not None:
            packed = self.packed(x, cu_seqlens, max_seqlen, attention_mask=attention_mask)
            x, attention_mask = packed.unpack(x), packed.attention_mask
            packed = packed.in_patches(self.patch_len)
        start = self._checked_start(x)
        if is_causal:
            self._require_causal()
        tokens, mask = self._embed(x, attention_mask), self.token_mask(attention_mask)
        return self._encoded(tokens, mask, start, is_causal, hidden_states, packed)

    def packed(
        self, x: Tensor, cu_seqlens: Tensor | PackedSequences, max_seqlen: int | None, **others: object
    ) -> PackedSequences:
        """The sequences of the row x; the arguments are those of ``pack_sequences``."""
        self._check_input(x)
        return pack_sequences(type(self).__name__, x, cu_seqlens, max_seqlen, **others)

    def features(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Features that the learnt part of a rocket stem reads: (B, N, c) -> (B, ceil(N / patch_len), F).

        No parameter changes it, so training may compute it once; see ``from_features``.
        """
        self._checked_start(x)
        return self._rocket().features(self._viewed(x, attention_mask), attention_mask)

    def from_features(
        self,
        features: Tensor,
        token_mask: Tensor | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """``forward`` from the ``features`` of a rocket stem on: (B, M, F), (B, M) -> (B, M, d)."""
        tokens = self._scaled(self._rocket().linear(features))
        return self._encoded(tokens, token_mask, hidden_states=hidden_states)

    def fit_stem(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Set the thresholds of a rocket stem by training series x, (B, N, c), after ``set_scale``."""
        self._rocket().fit(self._viewed(x, attention_mask), attention_mask)

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why parts of a sequence cannot be encoded by several processes; None where they can."""
        reading = [*self._reads_neighbours(), ("experts", self.has_experts)]
        for option, reads_more in reading:
            if reads_more:
                return f"{option} reads tokens of several parts"
        return None

    def _place(self, x: Tensor) -> tuple[int, int]:
        """(tokens before those of x, tokens of the whole sequence)."""
        if self.sequence_group is None:
            return 0, x.size(1)
        before, total = self.sequence_group.places(torch.tensor([x.size(1)], device=x.device))
        return int(before), int(total)

    def require_causal_form(self) -> None:
        """InputError where the mechanism of a layer has no causal form."""
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            require_causal_form(layer.attention, layer.attention.mechanism_name)

    def token_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """Which tokens hold a real step, (B, N) -> (B, ceil(N / patch_len))."""
        if attention_mask is None or self.patch_len == 1:
            return attention_mask
        return pool_mask(attention_mask, self.patch_len)

    def set_scale(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        """Standardise every input by these statistics of the training data, (c,) each.

        Where a channel lies so far from zero that the parameters' precision rounds its signal away, the mean
        is kept in two parts, and the input should be float64. It is centred before it is rounded.
        """
        mean, std = (torch.as_tensor(each).to(self.input_mean.device) for each in (mean, std))
        self.input_mean.copy_(mean)
        self.input_std.copy_(std)
        self.input_mean_rest.copy_(torch.where(is_resolved(mean, std), 0.0, mean - self.input_mean))

    def scale_in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The mean and the deviation of the training data in this precision, (c,) each."""
        return self.input_mean.to(dtype) + self.input_mean_rest.to(dtype), self.input_std.to(dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        mean, rest = (f"{prefix}{name}" for name in ("input_mean", "input_mean_rest"))
        if mean in state_dict and rest not in state_dict:  # weights of a version that had one part only
            state_dict[rest] = torch.zeros_like(state_dict[mean])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (
            "input_mean" in self._buffers and "input_mean_rest" not in self._buffers
        ):  # pickled by such a version
            self.register_buffer("input_mean_rest", torch.zeros_like(self.input_mean))

    def _set_input(self, in_features: int, stem: str, stem_layers: int, dropout: float, **where: Any) -> None:
        # The training data's scale is part of the model, so it is loaded with the weights.
        self.register_buffer("input_mean", torch.zeros(in_features, **where))
        self.register_buffer("input_mean_rest", torch.zeros(in_features, **where))
        self.register_buffer("input_std", torch.ones(in_features, **where))
        width = in_features * len(self.views)
        self.project: LinearStem | ConvolutionStem | RocketStem
        if stem == "linear":
            self.project = LinearStem(width, self.embed_dim, self.patch_len, **where)
        elif stem == "convolution":
            self.project = ConvolutionStem(
                width, self.embed_dim, stem_layers, self.patch_len, dropout, **where
            )
        else:
            self.project = RocketStem(width, self.embed_dim, self.max_len, self.patch_len, **where)

    def _reset_input(self) -> None:
        self.input_mean.zero_()
        self.input_mean_rest.zero_()
        self.input_std.fill_(1.0)
        reset_module(self.project)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.size(-1) != self.in_features:
            raise InputError(f"x has shape {tuple(x.shape)}, expected (B, N, {self.in_features})")

    def _checked_start(self, x: Tensor) -> int:
        """Tokens of the sequence before those of x; InputError where the model cannot take x."""
        self._check_input(x)
        start, length = self._place(x)
        if length > self.max_len:
            raise InputError(f"sequence length {length} exceeds max_len={self.max_len}")
        return start

    def _embed(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self._scaled(self.project(self._viewed(x, attention_mask), attention_mask))

    def _viewed(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The views of the standardised series, which the stem reads."""
        # Centred in the precision of the input, and then rounded.
        scaled = ((x - self.input_mean) - self.input_mean_rest) / self.input_std
        return series_views(scaled.to(self.input_std.dtype), attention_mask, self.views)

    def _scaled(self, tokens: Tensor) -> Tensor:
        """Tokens of a linear map times sqrt(d), as in the papers' stem."""
        return tokens if isinstance(self.project, ConvolutionStem) else tokens * math.sqrt(self.embed_dim)

    def _encoded(
        self,
        tokens: Tensor,
        token_mask: Tensor | None,
        start: int = 0,
        is_causal: bool = False,
        hidden_states: list[Tensor] | None = None,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """Positions, layers and norm of the tokens, the first of which is number ``start``."""
        x = self._with_positions(tokens, token_mask, start)
        if packed is not None:
            x, token_mask = packed.pack(x), None
        x = self.dropout(x)
        packing = {} if packed is None else {"cu_seqlens": packed}
        for layer in self.layers:
            if hidden_states is not None:
                hidden_states.append(x)
            x = layer(x, token_mask, is_causal, **packing)
        x = self.norm(x)
        x = self.dropout(F.gelu(x) if self.final_activation == "gelu" else x)
        x = x if token_mask is None else x.masked_fill(~token_mask[..., None], 0.0)
        if hidden_states is not None:
            hidden_states.append(x)
        return x

    def _rocket(self) -> RocketStem:
        if not isinstance(self.project, RocketStem):
            raise InputError("only an encoder with stem='rocket' has a stem to fit, and features of it")
        return self.project

    def _require_causal(self) -> None:
        """Raise InputError where a part before the layers reads later steps."""
        for option, reads_later_steps in self._reads_neighbours():
            if reads_later_steps:
                raise InputError(f"is_causal=True, but {option} reads later steps of the series")

    def _reads_neighbours(self) -> list[tuple[str, bool]]:
        """Options of what comes before the layers, and whether each makes it read several steps."""
        return [
            ("stem='convolution'", isinstance(getattr(self, "project", None), ConvolutionStem)),
            ("stem='rocket'", isinstance(getattr(self, "project", None), RocketStem)),
            (f"patch_len={self.patch_len}", self.patch_len > 1),
            (f"views={self.views!r}", self.views != ("raw",)),
            ("positions='convolutional'", self.relative_positions is not None),
        ]

    def _set_positions(self, kind: Positions, **where: Any) -> None:
        if kind not in _POSITIONS:
            raise unknown("positions", kind, _POSITIONS)
        self.positions_kind = kind
        self.relative_positions: ConvolutionalPositions | None = None
        if kind == "convolutional":
            self.relative_positions = ConvolutionalPositions(self.embed_dim, **where)
        elif kind != "none":
            table = torch.empty(self.num_tokens, self.embed_dim, **where)
            if kind in ("learnt", "learnt_normal"):
                self.positions = nn.Parameter(table)
            else:
                self.register_buffer("positions", table)
            self._reset_positions()

    def _with_positions(self, x: Tensor, attention_mask: Tensor | None, start: int = 0) -> Tensor:
        """Tokens with their positions; the first one is token number ``start`` of the sequence."""
        if self.relative_positions is not None:
            return x + self.relative_positions(x, attention_mask)
        return x if self.positions_kind == "none" else x + self.positions[start : start + x.size(1)]

    @torch.no_grad()
    def _reset_positions(self) -> None:
        if self.relative_positions is not None:
            reset_module(self.relative_positions)
        elif self.positions_kind == "learnt":
            self.positions.uniform_(-0.02, 0.02)
        elif self.positions_kind == "learnt_normal":
            self.positions.normal_()
        elif self.positions_kind != "none":
            stretch = self.embed_dim / self.num_tokens if self.positions_kind == "time_absolute" else 1.0
            self.positions.copy_(sinusoidal_positions(self.num_tokens, self.embed_dim, stretch))


def sinusoidal_positions(max_len: int, embed_dim: int, stretch: float = 1.0) -> Tensor:
    """Fixed sine and cosine positions of Vaswani et al. 2017, (max_len, embed_dim), on the CPU.

    ``stretch`` multiplies all frequencies.
    """
    position = torch.arange(max_len, device="cpu")[:, None]
    frequency = torch.exp(torch.arange(0, embed_dim, 2, device="cpu") * (-math.log(10000.0) / embed_dim))
    if stretch != 1.0:
        frequency = frequency * stretch
    table = torch.stack([torch.sin(position * frequency), torch.cos(position * frequency)], dim=-1)
    return table.flatten(1)[:, :embed_dim]
