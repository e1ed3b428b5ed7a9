"""A sparse mixture of experts in place of the feed-forward network of a layer.

Legend: B sequences, N tokens, d model width, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.calls import Objective
from kernel_attention.core.parameters import Device
from kernel_attention.core.penalized import PenalizedModule
from kernel_attention.core.validation import require_positive, require_probability, require_weight
from kernel_attention.errors import InputError, unknown
from kernel_attention.tensors.dropout import Dropout

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
    """``feed_forward`` with weights of its own: one expert.

    Args:
        embed_dim: d.
        feedforward_dim: hidden width.
        dropout: of the hidden units.
        activation: "gelu" or "relu".
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
    """

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
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

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
    """E sum_e f_e P_e of Fedus et al. 2021, a 0-dimensional tensor.

    Args:
        scores: the router's, (tokens, E).
        chosen: the experts of every token, (tokens, k).
        real: (tokens,) bool, the tokens that count; None: all. Without any, the term is 0.
    """
    experts = scores.size(-1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # half precision cannot count tokens
    counted = torch.ones_like(scores[:, 0]) if real is None else real.to(scores.dtype)
    total = counted.sum().clamp_min(1)
    assigned = F.one_hot(chosen, experts).sum(dim=1).to(scores.dtype)
    shares = (counted[:, None] * assigned).sum(dim=0) / (total * chosen.size(-1))
    likelihoods = (counted[:, None] * scores.softmax(dim=-1)).sum(dim=0) / total
    return experts * (shares * likelihoods).sum()
