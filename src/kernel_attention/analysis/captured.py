"""The inputs of one attention layer on one batch: of our own layers, and of any library's.

The latter are intercepted at the torch functions that attention consists of.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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


MakeCaptured = Callable[[str], CapturedAttention]

_PRODUCTS = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__}
_SOFTMAXES = {torch.softmax, torch.Tensor.softmax, F.softmax}
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass
class _Pending:
    """An attention seen in part: the product of queries and keys, and then its softmax."""

    first: Tensor
    second: Tensor
    logits: Tensor | None = None


class Interception(TorchFunctionMode):
    """Inside the block, ``tell(module, make)`` is called for every attention of the running model.

    ``attending`` returns the running module, None where its calls are to be ignored; ``make`` makes a
    ``CapturedAttention`` of a name.
    """

    def __init__(
        self, attending: Callable[[], nn.Module | None], tell: Callable[[nn.Module, MakeCaptured], None]
    ) -> None:
        super().__init__()
        self.attending = attending
        self.tell = tell
        self.pending: dict[int, _Pending] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watched = func in _PRODUCTS or func in _SOFTMAXES
        if not watched and func not in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            return func(*args, **kwargs)
        module = self.attending()
        if module is None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            call = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
            self.tell(module, lambda name: _from_sdpa(name, **call))
        elif func is F.multi_head_attention_forward:
            bound = _MULTI_HEAD.bind(*args, **kwargs)
            bound.apply_defaults()
            self.tell(module, lambda name: _from_multi_head(name, **bound.arguments))
        elif func in _PRODUCTS:
            self._product(module, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAXES:
            self._softmax(module, args[0] if args else kwargs["input"], result)
        return result

    def _product(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(tensors) != 2 or min(tensor.dim() for tensor in tensors) < 3:
            return
        first, second = tensors
        seen = self.pending.get(id(module))
        if seen is not None and seen.logits is not None and first.shape == seen.logits.shape:
            logits = seen.logits
            del self.pending[id(module)]
            self.tell(
                module,
                lambda name: _from_products(name, seen.first, seen.second, logits, second),
            )
        else:
            self.pending[id(module)] = _Pending(first, second)

    def _softmax(self, module: nn.Module, logits: Tensor, weights: Tensor) -> None:
        seen = self.pending.get(id(module))
        if seen is not None and logits.shape == (*seen.first.shape[:-1], seen.second.size(-1)):
            seen.logits = logits


def _from_sdpa(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> CapturedAttention:
    q, k, v = (_four_dimensional(x.detach()) for x in (query, key, value))
    if scale is not None:
        q = q * (scale * math.sqrt(q.size(-1)))
    bias = None
    if attn_mask is not None:
        mask = attn_mask.detach()
        bias = _four_dimensional(_additive(mask, ignored=~mask) if mask.dtype == torch.bool else mask)
    return _captured(name, q, k, v, bias, is_causal)


def _from_multi_head(name: str, **call: Any) -> CapturedAttention:
    """The arguments of F.multi_head_attention_forward: tensors are (N, B, d), True in a mask = ignored."""
    inputs = [call[part].detach() for part in ("query", "key", "value")]
    inputs = [x[:, None] if x.dim() == 2 else x for x in inputs]
    if call["use_separate_proj_weight"]:
        weights = [call[f"{part}_proj_weight"] for part in ("q", "k", "v")]
    else:
        weights = call["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if call["in_proj_bias"] is None else call["in_proj_bias"].chunk(3)
    parts = [F.linear(x, weight, b) for x, weight, b in zip(inputs, weights, biases, strict=True)]
    q, k, v = (x.unflatten(-1, (call["num_heads"], -1)).permute(1, 2, 0, 3) for x in parts)
    bias, padding = None, call["key_padding_mask"]
    if (mask := call["attn_mask"]) is not None:
        mask = mask.detach()
        mask = _additive(mask, ignored=mask) if mask.dtype == torch.bool else mask
        bias = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (q.size(0), -1))
    if padding is not None:
        padding = padding[None] if padding.dim() == 1 else padding
        padding = _additive(q, ignored=padding) if padding.dtype == torch.bool else padding
        padding = padding.detach()[:, None, None, :]
        bias = padding if bias is None else bias + padding
    return _captured(name, q, k, v, bias, call["is_causal"] and bias is None)


def _from_products(
    name: str, first: Tensor, second: Tensor, logits: Tensor, values: Tensor
) -> CapturedAttention:
    """The attention with logits = scale first @ second + bias, whose scale and bias are inferred."""
    q, k = _four_dimensional(first.detach()).float(), _four_dimensional(second.detach()).float().mT
    v, given = _four_dimensional(values.detach()), _four_dimensional(logits.detach()).float()
    product = q @ k.mT
    seen = given > IGNORED_BELOW
    scale = _scale(product, given, seen, q.size(-1))
    bias = torch.where(seen, given - scale * product, given)
    added = bool(bias.abs().max() > 1e-4 * given.abs().max())
    q = q * (scale * math.sqrt(q.size(-1)))
    return _captured(name, q, k, v, bias if added else None, False)


def _scale(product: Tensor, logits: Tensor, seen: Tensor, width: int) -> float:
    """The scale of the product before a bias of unknown form was added to it."""
    known = (1.0, width**-0.5)
    a, b = product[seen], logits[seen]
    if not a.numel():
        return known[1]
    for scale in known:
        if torch.allclose(scale * a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max())):
            return scale
    a = a - a.mean()
    fitted = float((a * b).sum() / a.square().sum().clamp_min(torch.finfo(a.dtype).tiny))
    if torch.allclose(fitted * product[seen], b, rtol=1e-3, atol=1e-3 * float(b.abs().max())):
        return fitted
    return min(known, key=lambda scale: abs(scale - fitted))


def _captured(
    name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool
) -> CapturedAttention:
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    batch = max(x.size(0) for x in (q, k))
    q, k, v = (x.expand(batch, -1, -1, -1) for x in (q, k, v))
    queries, keys = q.size(2), k.size(2)
    real_keys = torch.ones(batch, keys, dtype=torch.bool, device=q.device)
    is_mask = True
    if bias is not None:
        kept = bias > IGNORED_BELOW
        size = 1e-4 * float(bias.masked_fill(~kept, 0.0).abs().max().clamp_min(1.0))
        is_mask = not bool((bias.masked_fill(~kept, 0.0).abs() > size).any())
        real_keys = kept.any(dim=2).any(dim=1).expand(batch, -1)
        ahead = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
        if queries == keys > 1 and kept.size(2) == queries and not bool((kept & ahead).any()):
            is_causal = True
        if is_mask:
            seen = real_keys[:, None, None, :] & ~(ahead if is_causal else torch.zeros_like(ahead))
            rows = real_keys[:, None, :, None] if queries == keys else torch.ones_like(seen[..., :1])
            is_mask = bool(((kept == seen) | ~rows).all())
    real_queries = real_keys if queries == keys else real_keys.new_ones(batch, queries)
    return CapturedAttention(
        name, "softmax", q, k, v, real_queries, real_keys, is_causal, is_mask, None if is_mask else bias
    )


def _additive(like: Tensor, ignored: Tensor) -> Tensor:
    dtype = like.dtype if like.is_floating_point() else torch.float32
    return torch.zeros(ignored.shape, dtype=dtype, device=ignored.device).masked_fill(ignored, -math.inf)


def _four_dimensional(x: Tensor) -> Tensor:
    """(N, p) or (B, N, p) with one head, or more leading dimensions folded into the first."""
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x[None, None] if x.dim() == 2 else x[:, None] if x.dim() == 3 else x
