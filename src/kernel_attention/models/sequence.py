"""The sequence encoder of the papers' time-series experiments, with any attention mechanism in each layer.

PrimalFormer is ``attention="primal"``; Primal.+ is ``attention=["softmax", "primal"]`` (Primal-Attention,
section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.layer import require_causal_form
from kernel_attention.core.parameters import Device, reset_module, reset_submodules
from kernel_attention.core.validation import require_positive, require_probability
from kernel_attention.errors import InputError, unknown
from kernel_attention.mechanisms import AttentionSpec
from kernel_attention.models.encoder_layer import EncoderLayer, create_attentions


class SequenceEncoder(nn.Module):
    """Input projection scaled by sqrt(d), positions, encoder layers, final norm, GELU; padding zeroed.

    Args:
        in_features: channels c of the input.
        max_len: longest sequence.
        attention: one mechanism for all layers or a list with one per layer; see ``layer_specs``.
        embed_dim: model width d.
        num_heads: heads of every layer.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: of positions, layers and output, and of the attention weights where a mechanism has them.
        positions: "learnt" (uniform(-0.02, 0.02) at first) or "fixed" (sinusoidal).
        norm_first: pre-norm layers.
        experts: networks of a sparse mixture in place of each feed-forward network; 0: no mixture.
        experts_per_token: networks of the mixture that read a token.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
    """

    supports_sharding = False  # every part of a sequence would get the positions of the first part

    positions: Tensor
    input_mean: Tensor
    input_std: Tensor

    def __init__(
        self,
        in_features: int,
        max_len: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "primal",
        *,
        embed_dim: int = 512,
        num_heads: int = 8,
        num_layers: int = 2,
        feedforward_dim: int = 2048,
        dropout: float = 0.1,
        positions: Literal["learnt", "fixed"] = "learnt",
        norm_first: bool = False,
        experts: int = 0,
        experts_per_token: int = 2,
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
        self.embed_dim = embed_dim
        self.max_len = max_len
        self._set_input(in_features, **where)
        self._set_positions(positions, **where)
        shared = {"max_len": max_len, "dropout": dropout}
        mixture: dict[str, Any] = {"experts": experts, "experts_per_token": experts_per_token}
        self.layers = nn.ModuleList()
        for layer in create_attentions(attention, num_layers, embed_dim, num_heads, shared, **where):
            self.layers.append(EncoderLayer(layer, feedforward_dim, dropout, norm_first, **mixture, **where))
        self.norm = nn.LayerNorm(embed_dim, **where)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new model; after ``to_empty``, say."""
        self._reset_input()
        self._reset_positions()
        reset_module(self.layers)
        self.norm.reset_parameters()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, N, c) -> (B, N, d); padded positions (attention_mask False) are zero."""
        self._check_input(x)
        if x.size(1) > self.max_len:
            raise InputError(f"sequence length {x.size(1)} exceeds max_len={self.max_len}")
        x = self._embed(x) * math.sqrt(self.embed_dim)
        x = self.dropout(x + self.positions[: x.size(1)])
        for layer in self.layers:
            x = layer(x, attention_mask, is_causal)
        x = self.dropout(F.gelu(self.norm(x)))
        return x if attention_mask is None else x.masked_fill(~attention_mask[..., None], 0.0)

    def require_causal_form(self) -> None:
        """InputError where the mechanism of a layer has no causal form."""
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            require_causal_form(layer.attention, layer.attention.mechanism_name)

    def set_scale(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        """Standardise every input by these statistics of the training data, (c,) each."""
        self.input_mean.copy_(torch.as_tensor(mean))
        self.input_std.copy_(torch.as_tensor(std))

    def _set_input(self, in_features: int, **where: Any) -> None:
        # The training data's scale is part of the model, so it is loaded with the weights.
        self.register_buffer("input_mean", torch.zeros(in_features, **where))
        self.register_buffer("input_std", torch.ones(in_features, **where))
        self.project = nn.Linear(in_features, self.embed_dim, **where)

    def _reset_input(self) -> None:
        self.input_mean.zero_()
        self.input_std.fill_(1.0)
        self.project.reset_parameters()

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.size(-1) != self.project.in_features:
            raise InputError(f"x has shape {tuple(x.shape)}, expected (B, N, {self.project.in_features})")

    def _embed(self, x: Tensor) -> Tensor:
        return self.project((x - self.input_mean) / self.input_std)

    def _set_positions(self, kind: str, **where: Any) -> None:
        table = torch.empty(self.max_len, self.embed_dim, **where)
        if kind == "learnt":
            self.positions = nn.Parameter(table)
        elif kind == "fixed":
            self.register_buffer("positions", table)
        else:
            raise unknown("positions", kind, ("learnt", "fixed"))
        self._reset_positions()

    @torch.no_grad()
    def _reset_positions(self) -> None:
        if isinstance(self.positions, nn.Parameter):
            self.positions.uniform_(-0.02, 0.02)
        else:
            self.positions.copy_(sinusoidal_positions(self.max_len, self.embed_dim))


class SequenceClassifier(nn.Module):
    """The encoder with a linear head: class logits, or regression values.

    Args:
        in_features: channels c of the input.
        num_outputs: classes, or regression targets.
        max_len: longest sequence.
        attention: as in ``SequenceEncoder``.
        pooling: "flatten" joins all positions into one vector (the papers' head, fixed to max_len), "mean"
            averages over the real tokens.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
        encoder_options: the other arguments of ``SequenceEncoder``.
    """

    def __init__(
        self,
        in_features: int,
        num_outputs: int,
        max_len: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "primal",
        *,
        pooling: Literal["flatten", "mean"] = "flatten",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **encoder_options: Any,
    ) -> None:
        super().__init__()
        require_positive(num_outputs=num_outputs)
        if pooling not in ("flatten", "mean"):
            raise unknown("pooling", pooling, ("flatten", "mean"))
        self.pooling = pooling
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.encoder = SequenceEncoder(in_features, max_len, attention, **where, **encoder_options)
        width = self.encoder.embed_dim * (max_len if pooling == "flatten" else 1)
        self.head = nn.Linear(width, num_outputs, **where)

    def reset_parameters(self) -> None:
        """Draw every parameter of the encoder and the classifier anew."""
        reset_submodules(self)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """x (B, N, c), attention_mask (B, N; True = real token) -> (B, num_outputs)."""
        encoded = self.encoder(x, attention_mask)
        if self.pooling == "flatten":
            # The positions a short batch lacks are zero, as padded ones are.
            missing = self.encoder.max_len - encoded.size(1)
            return self.head(F.pad(encoded, (0, 0, 0, missing)).flatten(1))
        return self.head(mean_token(encoded, attention_mask))


def mean_token(encoded: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean over the real tokens of encoded (B, N, d), zero at padded ones: (B, d)."""
    if attention_mask is None:
        return encoded.mean(dim=1)
    return encoded.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True).clamp_min(1)


def sinusoidal_positions(max_len: int, embed_dim: int) -> Tensor:
    """Fixed sine and cosine positions of Vaswani et al. 2017, (max_len, embed_dim), on the CPU."""
    position = torch.arange(max_len, device="cpu")[:, None]
    frequency = torch.exp(torch.arange(0, embed_dim, 2, device="cpu") * (-math.log(10000.0) / embed_dim))
    table = torch.stack([torch.sin(position * frequency), torch.cos(position * frequency)], dim=-1)
    return table.flatten(1)[:, :embed_dim]
