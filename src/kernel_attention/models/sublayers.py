"""Beside the attention of an encoder layer: feed-forward networks, a sparse mixture of them, a short
convolution.

Legend: B sequences, N tokens, d model width or channels, E experts, k experts of a token, K taps.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad

from kernel_attention.core.calls import Objective
from kernel_attention.core.decoding import whole_lengths
from kernel_attention.core.parameters import Device
from kernel_attention.core.penalized import PenalizedModule
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError, require_positive, require_probability, require_weight, unknown
from kernel_attention.limits import require_parameters
from kernel_attention.tensors.convolution import convolve_grid, convolve_sequence, last_rows
from kernel_attention.tensors.dropout import Dropout
from kernel_attention.tensors.packing import PackedSequences, pack_sequences
from kernel_attention.tensors.padding import compaction, zero_padding

Activation = Literal["gelu", "relu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "relu")


def feed_forward(
    x: Tensor, linear1: nn.Linear, linear2: nn.Linear, activation: Activation, dropout: nn.Module
) -> Tensor:
    """Two linear maps with an activation and dropout between them, (..., d) -> (..., d)."""
    hidden = linear1(x)
    hidden = F.relu(hidden) if activation == "relu" else F.gelu(hidden)
    return linear2(dropout(hidden))


class FeedForward(nn.Module):
    """``feed_forward`` with weights of its own: one expert. ``activation`` is "gelu" or "relu"."""

    def __init__(
        self,
        embed_dim: int,
        feedforward_dim: int,
        dropout: float = 0.0,
        activation: Activation = "gelu",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation: Activation = activation
        self.linear1 = nn.Linear(embed_dim, feedforward_dim, **where)
        self.linear2 = nn.Linear(feedforward_dim, embed_dim, **where)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return feed_forward(x, self.linear1, self.linear2, self.activation, self.dropout)


class SparseExperts(PenalizedModule):
    """A sparse mixture of experts: each token is read by k of E feed-forward networks (Shazeer et al. 2017).

    A router without bias scores the experts. The k with the highest scores read the token, and the softmax of
    their k scores weighs what they return. An expert takes any number of tokens, so none is dropped, and a
    token's output depends on that token alone. In training, ``kernel_attention.auxiliary_loss`` adds
    ``balance`` times

        E sum_e f_e P_e

    with f_e the share of the assignments that expert e has, and P_e the mean over the real tokens of its
    softmax over all E scores (Fedus et al. 2021, equations 4 to 6). It is 1 where all experts have equal
    shares.

    Args:
        embed_dim: d.
        feedforward_dim: hidden width of every expert.
        experts: E.
        experts_per_token: k, at most E.
        dropout: of the hidden units.
        activation: of the experts, "gelu" or "relu".
        balance: weight of the balancing term; 0 adds none.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Raises:
        InputError: for sizes out of range.
    """

    def __init__(
        self,
        embed_dim: int,
        feedforward_dim: int,
        experts: int,
        experts_per_token: int = 2,
        *,
        dropout: float = 0.0,
        activation: Activation = "gelu",
        balance: float = 0.01,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive(
            embed_dim=embed_dim, feedforward_dim=feedforward_dim, experts=experts,
            experts_per_token=experts_per_token,
        )  # fmt: skip
        require_probability(dropout=dropout)
        if experts_per_token > experts:
            raise InputError(f"experts_per_token={experts_per_token} exceeds experts={experts}")
        require_weight(balance=balance)
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        self.experts_per_token = experts_per_token
        self.balance = balance
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = nn.Linear(embed_dim, experts, bias=False, **where)
        self.experts = nn.ModuleList(
            FeedForward(embed_dim, feedforward_dim, dropout, activation, **where) for _ in range(experts)
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, ..., d) -> (B, ..., d). The mask (B, ...), True = real token, is for the balancing term."""
        tokens = x.flatten(0, -2)
        scores = self.router(tokens)
        highest, chosen = scores.topk(self.experts_per_token, dim=-1)
        weights = highest.softmax(dim=-1)
        if self.training and self.balance:
            real = None if attention_mask is None else attention_mask.flatten()
            self.record_objective(balancing_term(scores, chosen, real))
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            part = weights[token, place, None] * expert(tokens[token])
            y = y.index_add(0, token, part.to(y.dtype))  # each token at most once, so the sum has one order
        return y.view_as(x)

    @property
    def has_penalty(self) -> bool:
        """True where ``balance`` > 0."""
        return self.balance > 0

    def weigh_objective(self, objective: Objective) -> Tensor:
        """``balance`` times the balancing term."""
        return self.balance * objective.value

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"experts_per_token={self.experts_per_token}, balance={self.balance}"


def balancing_term(scores: Tensor, chosen: Tensor, real: Tensor | None = None) -> Tensor:
    """E sum_e f_e P_e of Fedus et al. 2021, a 0-dimensional tensor; 0 without a token that counts.

    ``scores`` are the router's, (tokens, E), ``chosen`` the experts of every token, (tokens, k), and ``real``
    (tokens,) the tokens that count; None: all.
    """
    experts = scores.size(-1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # half precision cannot count tokens
    counted = torch.ones_like(scores[:, 0]) if real is None else real.to(scores.dtype)
    total = counted.sum().clamp_min(1)
    assigned = F.one_hot(chosen, experts).sum(dim=1).to(scores.dtype)
    shares = (counted[:, None] * assigned).sum(dim=0) / (total * chosen.size(-1))
    likelihoods = (counted[:, None] * scores.softmax(dim=-1)).sum(dim=0) / total
    return experts * (shares * likelihoods).sum()


class ShortConvolution(nn.Module):
    """The tokens, and added to them a depth-wise convolution of each with its neighbours.

    With a kernel w_c of K taps for every channel c, and x zero beyond the ends of the sequence,

        y_ic = x_ic + sum_j w_cj x_{i - front + j, c},    j = 0..K-1,

    where front is K - 1 in causal attention, and K // 2 otherwise: an even number of taps has its extra one
    in front. All w start at zero, so the module is the identity at first.

    Attention by content cannot say "the token before this one" unless its positions and its kernel are sharp
    enough. A short convolution gives every token its neighbours directly, which linear attention needs for
    recall: Arora et al. 2023, Zoology (arXiv 2312.04927), after the shift of H3 (Fu et al. 2023).

    Args:
        channels: d.
        kernel_size: K; over a grid, the side of a kernel of K x K taps.
        grid_size: (H, W), the tokens being H rows of W; None: a sequence.
        class_tokens: tokens in front of the grid, which pass as they are.
        device: where the kernels are made; None: the default device.
        dtype: the kernels' precision; None: the default one.
    """

    sequence_group: SequenceGroup | None = None

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        grid_size: tuple[int, int] | None = None,
        class_tokens: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive(short_convolution=kernel_size)
        shape = (channels, *[kernel_size] * (1 if grid_size is None else 2))
        require_parameters(
            f"short_convolution={kernel_size}",
            channels * kernel_size ** (len(shape) - 1),
            "lower short_convolution",
        )
        self.kernel_size = kernel_size
        self.grid_size = grid_size
        self.class_tokens = class_tokens
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every kernel to zero, as in a new module, which is the identity."""
        nn.init.zeros_(self.weight)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """(B, N, d) -> (B, N, d).

        Args:
            x: the tokens.
            attention_mask: (B, N), True = real token. The neighbours of a token are real ones: a sequence
                gives what its real tokens give alone, wherever its padding stands.
            is_causal: whether token i reads x[:, :i + 1] only.
            cu_seqlens: where the sequences begin that lie end to end in x (1, N, d), see ``AttentionLayer``;
                no token reads one of another sequence.
            max_seqlen: with ``cu_seqlens``, the longest sequence's tokens, or more.

        Raises:
            InputError: for a grid that is to be causal, is packed, or has other tokens than its own, and for
                boundaries that do not divide x.
        """
        if cu_seqlens is not None:
            if self.grid_size is not None or self.sequence_group is not None:
                where = "tokens are a grid" if self.grid_size else "sequences are divided among processes"
                raise InputError(f"short_convolution: cu_seqlens was given, but its {where}")
            others = {"attention_mask": attention_mask}
            packed = pack_sequences("short_convolution", x, cu_seqlens, max_seqlen, **others)
            return x + packed.pack(self._convolve(packed.unpack(x), packed.attention_mask, is_causal))
        real = zero_padding(x, attention_mask)
        if self.grid_size is not None:
            return x + self._over_grid(real, is_causal)
        if self.sequence_group is not None and self.kernel_size > 1:
            return x + self._convolve_part(real, attention_mask, is_causal, self.sequence_group)
        return x + self._convolve(real, attention_mask, is_causal)

    def initial_window(self, batch_size: int) -> Tensor:
        """The inputs that a causal convolution remembers before the first token, (B, K - 1, d) zeros."""
        return self.weight.new_zeros(batch_size, self.kernel_size - 1, self.weight.size(0))

    def window_after(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The last K - 1 real tokens of x (B, N, d), zeros before its first: (B, K - 1, d)."""
        if attention_mask is None:
            return last_rows(x, whole_lengths(x, None), self.kernel_size - 1)
        moved = compaction(attention_mask)
        x = zero_padding(x, attention_mask)
        real = attention_mask.sum(dim=1)
        return last_rows(x if moved is None else moved.apply(x), real, self.kernel_size - 1)

    def read_on(self, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens after those of ``window``, (B, N, d) or (B, d) -> causal outputs, and the next window."""
        if x.dim() == 2:
            y, window = self.read_on(x[:, None], window)
            return y[:, 0], window
        seen = torch.cat([window, x], dim=1)
        y = convolve_sequence(seen, self.weight, is_causal=True)[:, window.size(1) :]
        return x + y.to(x.dtype), seen[:, x.size(1) :]

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """A grid is not cut into parts; the parts of a sequence lend one another their ends."""
        is_grid = self.grid_size is not None
        return f"short_convolution={self.kernel_size}: its tokens are a grid" if is_grid else None

    def _convolve(self, x: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
        """The convolution of the real tokens; padded ones are zero."""
        moved = None if attention_mask is None else compaction(attention_mask)
        y = convolve_sequence(x if moved is None else moved.apply(x), self.weight, is_causal=is_causal)
        return y if moved is None else moved.undo(y)

    def _convolve_part(
        self, x: Tensor, attention_mask: Tensor | None, is_causal: bool, group: SequenceGroup
    ) -> Tensor:
        """``_convolve`` of a rank's part between the ends of the parts beside it."""
        before = self.kernel_size - 1 if is_causal else self.kernel_size // 2
        first, last = group.neighbours(x, attention_mask, before, self.kernel_size - 1 - before)
        if attention_mask is not None:
            ones = attention_mask.new_ones(x.size(0), self.kernel_size - 1)
            attention_mask = torch.cat([ones[:, :before], attention_mask, ones[:, before:]], dim=1)
        y = self._convolve(torch.cat([first, x, last], dim=1), attention_mask, is_causal)
        return y[:, before : before + x.size(1)]

    def _over_grid(self, x: Tensor, is_causal: bool) -> Tensor:
        assert self.grid_size is not None
        height, width = self.grid_size
        if is_causal:
            raise InputError("is_causal=True, but a short convolution over a grid has no causal form")
        if x.size(1) != self.class_tokens + height * width:
            raise InputError(
                f"sequence length {x.size(1)} must be class_tokens={self.class_tokens} plus the tokens of "
                f"grid_size={self.grid_size}, {height * width}"
            )
        grid = x[:, self.class_tokens :].unflatten(1, self.grid_size)
        y = convolve_grid(grid, self.weight).flatten(1, 2)
        return pad(y, (0, 0, self.class_tokens, 0)) if self.class_tokens else y

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        grid = f", grid_size={self.grid_size}, class_tokens={self.class_tokens}" if self.grid_size else ""
        return f"{self.weight.size(0)}, kernel_size={self.kernel_size}{grid}"
