"""The inputs of one attention layer on one batch, and what our own layers compute of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.mechanisms import mechanism_name

# Hosts write -inf, finfo.min, -1e9 or -10000 for "ignored".
IGNORED_BELOW = -1e3


@dataclass(frozen=True)
class CapturedAttention:
    """The inputs of a layer's attention: B sequences, h heads, N queries and S keys of width p.

    Attributes:
        name: dotted name of the module.
        mechanism: what it is called; "softmax" for a layer of another library.
        queries: (B, h, N, p), scaled so that the logits are q.k / sqrt(p); None where the layer has none.
        keys: (B, h, S, p); grouped keys are repeated for each of their queries.
        values: (B, h, S, width); None for mechanisms without values.
        real_queries: (B, N) bool, True = a real token.
        real_keys: (B, S) bool.
        is_causal: query i sees keys 0..i only.
        is_softmax: the weights are a softmax of q.k / sqrt(p) over the visible keys, and nothing else.
        bias: what was added to the logits besides, masks included, broadcastable to (B, h, N, S); None for 0.
        layer: the module where it is one of ours.
        x: (B, N, d), the input of a layer of ours.
        context: (B, S, d), the source of the keys of a layer of ours; None: x.
    """

    name: str
    mechanism: str
    queries: Tensor | None
    keys: Tensor | None
    values: Tensor | None
    real_queries: Tensor
    real_keys: Tensor
    is_causal: bool = False
    is_softmax: bool = True
    bias: Tensor | None = None
    layer: AttentionLayer | None = None
    x: Tensor | None = None
    context: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.real_queries.size(0)

    @property
    def is_cross(self) -> bool:
        """True where queries and keys belong to different sequences, judged by their numbers."""
        return self.context is not None or self.real_queries.shape != self.real_keys.shape

    def with_padding(self, real: Tensor) -> CapturedAttention:
        """The same with these (B, S) bool real tokens, where they fit the layer's."""
        if self.layer is not None or real.shape != self.real_keys.shape:
            return self
        real = real.to(self.real_keys.device)
        return dataclasses.replace(
            self, real_keys=real, real_queries=self.real_queries if self.is_cross else real
        )

    def parts(self, case: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Queries, keys and values of one sequence's real tokens, (h, n, p) each, float32 on the CPU."""
        if self.queries is None or self.keys is None:
            return None
        q = _plain(self.queries[case][:, self.real_queries[case]])
        k = _plain(self.keys[case][:, self.real_keys[case]])
        v = None if self.values is None else _plain(self.values[case][:, self.real_keys[case]])
        return q, k, v

    def matrix(self, case: int, rows: Tensor | None = None) -> Tensor | None:
        """The matrix of one sequence's real tokens, (h, n, n) or (h, rows, n), float32 on the CPU.

        Attention weights, or the kernel of a mechanism that has one instead; None where it has neither.

        Args:
            case: which of the B sequences.
            rows: indices among the real queries; None: all of them.
        """
        if self.layer is not None and not self.is_softmax:
            return self._own_matrix(case, rows)
        if self.queries is None or self.keys is None:
            return None
        queries = torch.arange(self.queries.size(2), device=self.queries.device)[self.real_queries[case]]
        queries = queries if rows is None else queries[rows.to(queries.device)]
        real = self.real_keys[case]
        q, k = self.queries[case][:, queries].float(), self.keys[case].float()
        logits = q @ k.mT / math.sqrt(q.size(-1))
        if self.bias is not None:
            bias = self.bias.expand(-1, -1, self.queries.size(2), -1)
            logits = logits + bias[case if bias.size(0) > 1 else 0][:, queries].float()
        ignored = ~real.expand_as(logits)
        if self.is_causal:
            ignored = ignored | (torch.arange(k.size(1), device=k.device) > queries[:, None])
        logits = logits.masked_fill(ignored, -math.inf)
        # A row that sees no key has no weights; hosts fill the rows of padded queries as they like.
        return _plain(logits.softmax(dim=-1).nan_to_num(0.0)[..., real])

    def _own_matrix(self, case: int, rows: Tensor | None) -> Tensor | None:
        if self.layer is None or self.x is None or self.is_causal or self.is_cross:
            return None
        one = slice(case, case + 1)
        found = self.layer.kernel_matrix(self.x[one], attention_mask=self.real_keys[one])
        if found is None:
            return None
        matrix = found[0][:, self.real_queries[case]][..., self.real_keys[case]]
        return _plain(matrix if rows is None else matrix[:, rows.to(matrix.device)])


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().cpu()


def captured_own(
    name: str,
    layer: AttentionLayer,
    x: Tensor,
    *,
    context: Tensor | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> CapturedAttention:
    """The arguments of a layer's call as a ``CapturedAttention``."""
    x = x.detach()
    source = x if context is None else context.detach()
    q, k, v = (_projected(layer, part, at) for part, at in (("q", x), ("k", source), ("v", source)))
    # Symmetric layers have one projection for both.
    q, k = (k if q is None else q), (q if k is None else k)
    real_keys = torch.ones(source.shape[:2], dtype=torch.bool, device=x.device)
    if attention_mask is not None:
        real_keys = attention_mask
    real_queries = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return CapturedAttention(
        name=name,
        mechanism=mechanism_name(layer),
        queries=q,
        keys=k,
        values=v,
        real_queries=real_keys if context is None else real_queries,
        real_keys=real_keys,
        is_causal=is_causal,
        is_softmax=layer.softmax_reading == "exact",
        layer=layer,
        x=x,
        context=None if context is None else source,
    )


def near_softmax(attention: CapturedAttention) -> bool:
    """True where the kernel-PCA reading applies: to softmax attention of the keys, or of cleaned keys."""
    return attention.is_softmax or (
        attention.layer is not None and attention.layer.softmax_reading is not None
    )


def objective_of(attention: CapturedAttention, case: int) -> Tensor | None:
    """J of one sequence, 0-dimensional; None for a layer without an objective or with its weight at 0."""
    layer = attention.layer
    if not isinstance(layer, PenalizedAttention) or attention.x is None:
        return None
    one = slice(case, case + 1)
    found = layer.measure_objective(
        attention.x[one], attention_mask=attention.real_keys[one], is_causal=attention.is_causal
    )
    return None if found is None else found.detach().float().cpu()


def scores(attention: CapturedAttention, case: int) -> dict[str, Tensor]:
    """Projection scores of one sequence's real tokens by name, (h, n, rank) each; empty without any."""
    if attention.layer is None or attention.x is None:
        return {}
    one = slice(case, case + 1)
    found = attention.layer.named_scores(attention.x[one], attention_mask=attention.real_keys[one])
    real = attention.real_queries[case]
    return {f"scores_{name}": part[0][:, real].float().cpu() for name, part in found.items()}


def kernel_tensor(attention: CapturedAttention, case: int, tokens: Tensor | None = None) -> Tensor | None:
    """K of a sequence's real tokens, or of these among them, (h, n, .., n); None for a layer without K."""
    if attention.layer is None or attention.x is None:
        return None
    real = attention.x[case : case + 1][:, attention.real_keys[case]]
    found = attention.layer.kernel_tensor(real if tokens is None else real[:, tokens])
    return None if found is None else found[0].float().cpu()


def _projected(layer: AttentionLayer, part: str, x: Tensor) -> Tensor | None:
    projection = getattr(layer, f"{part}_proj", None)
    return layer.split_heads(projection(x)) if isinstance(projection, nn.Module) else None
