"""The layer that the encoders and the causal model are made of: attention and a feed-forward network.

A short convolution may come before the attention, and the feed-forward network may have attention among its
channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.parameters import Device
from kernel_attention.errors import InputError, require_probability, unknown
from kernel_attention.mechanisms import (
    ATTENTION_SPECS,
    AttentionFactory,
    AttentionSpec,
    create_attention,
    get_mechanism,
    make_attention,
)
from kernel_attention.models.sublayers import (
    ACTIVATIONS,
    Activation,
    ShortConvolution,
    SparseExperts,
    feed_forward,
)
from kernel_attention.tensors.dropout import Dropout
from kernel_attention.tensors.packing import PackedSequences, pack_sequences


class ChannelAttention(nn.Module):
    """Weighs the channels of the feed-forward network's output by the tokens before it, as in FAN.

    Fully Attentional Networks: Zhou et al. 2022, "Understanding The Robustness in Vision Transformers", the
    efficient channel attention, from its published formula. FAN's released code was not read, and nothing
    here was compared with it.

    With the tokens Z, N rows of d channels, and their prototype z, the N means over the channels,

        ECA(Z) = sigmoid(W_Q softmax(Z)^T softmax(z) / sqrt(N)) * MLP(Z).

    The paper writes it ECA(Z) = Norm((W_Q' σ(Z)) σ(Z̄)^T / √n) ⊙ MLP(Z) with a prototype that is the mean over
    the channels, and takes the sigmoid for Norm; it applies the weights to the MLP's output. Here σ is the
    softmax over the tokens. A secondary description of the paper reads σ as a sigmoid too, so of all parts of
    the formula this one is the least certain.

    The weights lie in (0, 1), and all tokens of a sequence share them. A
    large weight of one channel does not lower the others, as a softmax over the channels would.

    Args:
        embed_dim: channels d.
        device: where the parameter is made; None: the default device.
        dtype: the parameter's precision; None: the default one.
    """

    def __init__(self, embed_dim: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        values: Tensor,
        attention_mask: Tensor | None = None,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """The values (B, N, d) times the channels' weights of x (B, N, d)."""
        if packed is not None:
            weights = self.channel_weights(packed.unpack(x), packed.attention_mask)
            return values * weights[packed.sequence]
        return values * self.channel_weights(x, attention_mask)[:, None]

    def channel_weights(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, d) -> (B, d) in (0, 1); attention_mask (B, N), True = real token."""
        prototype = x.mean(dim=2)
        if attention_mask is None:
            length: Tensor | int = x.size(1)
        else:
            length = attention_mask.sum(dim=1, keepdim=True).clamp_min(1)
            # The lowest number, not -inf: a sequence without real tokens keeps finite gradients.
            lowest = torch.finfo(x.dtype).min
            prototype = prototype.masked_fill(~attention_mask, lowest)
            x = x.masked_fill(~attention_mask[..., None], lowest)
        correlation = prototype.softmax(dim=1)[:, None] @ x.softmax(dim=1)
        return torch.sigmoid(self.q_proj(correlation[:, 0]) / length**0.5)


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each with dropout, residual and layer norm.

    Args:
        attention: the attention layer; its width is the layer's.
        feedforward_dim: hidden width of the feed-forward network.
        dropout: after the attention, inside and after the feed-forward network.
        norm_first: pre-norm instead of post-norm.
        drop_path: probability of leaving out the attention, or the feed-forward network, of a sample in
            training; see ``StochasticDepth``.
        norm_eps: added to the variance in the layer norms.
        channel_attention: whether channel attention weighs what the feed-forward network returns; see
            ``ChannelAttention``. It has no causal form.
        activation: of the feed-forward network, "gelu" or "relu".
        experts: number of feed-forward networks of a sparse mixture; 0: one network, no mixture. See
            ``SparseExperts``.
        experts_per_token: networks that read a token, where there is a mixture.
        short_convolution: taps of a depth-wise convolution of the attention's input, of any mechanism, which
            starts as the identity; 0: none. See ``ShortConvolution``.
        grid_size: (H, W) of a convolution over H rows of W tokens; None: it is along the sequence.
        class_tokens: tokens in front of the grid, which are not convolved.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    def __init__(
        self,
        attention: AttentionLayer,
        feedforward_dim: int,
        dropout: float = 0.1,
        norm_first: bool = False,
        *,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
        channel_attention: bool = False,
        activation: Activation = "gelu",
        experts: int = 0,
        experts_per_token: int = 2,
        short_convolution: int = 0,
        grid_size: tuple[int, int] | None = None,
        class_tokens: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        width = attention.embed_dim
        self.norm_first = norm_first
        self.activation: Activation = activation
        self.attention = attention
        self.short_convolution: ShortConvolution | None = None
        if short_convolution:
            self.short_convolution = ShortConvolution(
                width, short_convolution, grid_size, class_tokens, **where
            )
        self.linear1 = None if experts else nn.Linear(width, feedforward_dim, **where)
        self.linear2 = None if experts else nn.Linear(feedforward_dim, width, **where)
        self.experts: SparseExperts | None = None
        if experts:
            self.experts = SparseExperts(
                width, feedforward_dim, experts, experts_per_token, dropout=dropout, activation=activation,
                **where,
            )  # fmt: skip
        self.norm1 = nn.LayerNorm(width, norm_eps, **where)
        self.norm2 = nn.LayerNorm(width, norm_eps, **where)
        self.dropout = Dropout(dropout)
        self.drop_path = StochasticDepth(drop_path)
        self.channel_attention = ChannelAttention(width, **where) if channel_attention else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "short_convolution" not in self._modules:  # none, or pickled by a version that had none
            self.short_convolution = None

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """(B, N, d) -> (B, N, d). ``cu_seqlens`` and ``max_seqlen`` are those of ``AttentionLayer``."""
        if is_causal and self.channel_attention is not None:
            raise InputError("is_causal=True, but channel_attention=True reads every token of the sequence")
        packed = None
        options: dict[str, Any] = {"attention_mask": attention_mask, "is_causal": is_causal}
        if cu_seqlens is not None:
            others = {"attention_mask": attention_mask}
            packed = pack_sequences(type(self).__name__, x, cu_seqlens, max_seqlen, **others)
            options = {"cu_seqlens": packed, "is_causal": is_causal}

        def attend(inputs: Tensor) -> Tensor:
            if self.short_convolution is not None:
                inputs = self.short_convolution(inputs, **options)
            return self.attention(inputs, **options)

        return self.around(attend, x, attention_mask, packed)

    def around(
        self,
        attend: Callable[[Tensor], Tensor],
        x: Tensor,
        attention_mask: Tensor | None = None,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """The layer with ``attend`` instead of convolution and attention, (B, ..., d) -> (B, ..., d)."""
        drop = self.drop_path
        if self.norm_first:
            x = x + drop(self.dropout(attend(self.attention_input(x))), packed)
            return x + drop(self._feedforward(self.norm2(x), attention_mask, packed), packed)
        x = self.norm1(x + drop(self.dropout(attend(self.attention_input(x))), packed))
        return self.norm2(x + drop(self._feedforward(x, attention_mask, packed), packed))

    def attention_input(self, x: Tensor) -> Tensor:
        """The tensor that the attention reads, or the convolution before it, (B, N, d) -> (B, N, d)."""
        return self.norm1(x) if self.norm_first else x

    def _feedforward(
        self, x: Tensor, attention_mask: Tensor | None, packed: PackedSequences | None
    ) -> Tensor:
        if self.experts is not None:
            y = self.dropout(self.experts(x, attention_mask))
        else:
            assert self.linear1 is not None
            assert self.linear2 is not None
            y = self.dropout(feed_forward(x, self.linear1, self.linear2, self.activation, self.dropout))
        if self.channel_attention is None:
            return y
        return self.channel_attention(x, y, attention_mask, packed)


class StochasticDepth(nn.Module):
    """Zeroes whole samples in training and scales the others up to the same mean (Huang et al. 2016).

    Args:
        probability: of zeroing a sample.
    """

    def __init__(self, probability: float = 0.0) -> None:
        super().__init__()
        require_probability(drop_path=probability)
        self.probability = probability

    def forward(self, x: Tensor, packed: PackedSequences | None = None) -> Tensor:
        """(B, ...) -> (B, ...); every one of packed sequences (1, N, d) is a sample."""
        if not self.training or self.probability == 0.0:
            return x
        kept = 1.0 - self.probability
        if packed is not None:
            scale = x.new_empty(len(packed.attention_mask), 1).bernoulli_(kept).div_(kept)
            return x * scale[packed.sequence]
        return x * x.new_empty(x.size(0), *[1] * (x.dim() - 1)).bernoulli_(kept).div_(kept)

    def extra_repr(self) -> str:
        """The probability, for print(model)."""
        return f"{self.probability}"


def create_attentions(
    attention: AttentionSpec | AttentionFactory | Sequence[AttentionSpec | AttentionFactory],
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    known: Mapping[str, Any],
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> Iterator[AttentionLayer]:
    """The attention of every layer of a model, one after the other.

    Args:
        attention: one mechanism for all layers or a list with one per layer. A mechanism is a name, ``{name:
            options}``, or a class or function that makes a layer from ``(embed_dim, num_heads, **options)``.
        num_layers: number of layers.
        embed_dim: d.
        num_heads: h.
        known: options that the model gives to each mechanism that has them, unless ``attention`` does.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InputError: for an unknown name or option, or a list without one entry per layer.
    """
    for spec in ATTENTION_SPECS.per_layer(attention, num_layers):
        if callable(spec):
            yield make_attention(spec, embed_dim, num_heads, known, device=device, dtype=dtype)
            continue
        name, options = ATTENTION_SPECS.read(spec)
        given = {key: value for key, value in known.items() if key in get_mechanism(name).options}
        yield create_attention(name, embed_dim, num_heads, device=device, dtype=dtype, **{**given, **options})
