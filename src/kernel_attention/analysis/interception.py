"""Attention intercepted at the torch functions that it consists of, in any library."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kernel_attention.analysis.captured import IGNORED_BELOW, CapturedAttention

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
