"""The weights with which the training of a converted layer starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import AttentionCall
from kernel_attention.analysis.distillation import primal_values_from_softmax
from kernel_attention.analysis.output_map import ridge_solution
from kernel_attention.hosts.interface import InterfaceAttention
from kernel_attention.hosts.projections import carry
from kernel_attention.hosts.replace import PlannedLayer
from kernel_attention.mechanisms import create_attention

_RIDGE = 1e-3
_MOST_ATTENTION = 2**22  # numbers of the attention matrices that a fit forms


@torch.no_grad()
def start_layer(
    start: str, plan: PlannedLayer, layer: nn.Module, calls: Sequence[AttentionCall], seed: int
) -> None:
    """Set the weights of a replaced layer, which holds the carried ones; see ``convert_attention``."""
    if start == "random":
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            plan.layer.reset_parameters()
    if start != "fitted" or plan.site.host_class is InterfaceAttention:
        return
    if plan.name == "primal_values":
        _fit_scores(plan, calls, seed)
    _fit_output(plan, layer, calls)


def _fit_scores(plan: PlannedLayer, calls: Sequence[AttentionCall], seed: int) -> None:
    """The old attention's truncated SVD between the features' spans, by the mean Gram matrices of sequences.

    There are as many sequences as ``_MOST_ATTENTION`` allows. A descent of each sequence's own objective
    from there takes minutes, and the transfer after it ends no lower.
    """
    x, real = _sequences(plan, calls)
    like = plan.host
    teacher = create_attention("softmax", like.embed_dim, like.num_heads, bias=like.bias)
    carry(teacher.to(x.device, x.dtype), like.sources)
    names = ("rank", "feature_map", "normalize")
    options: dict[str, Any] = {name: plan.layer.option_value(name) for name in names}
    fitted = primal_values_from_softmax(teacher, x, attention_mask=real, steps=0, seed=seed, **options)
    plan.layer.load_state_dict(fitted.layer.state_dict())


def _sequences(plan: PlannedLayer, calls: Sequence[AttentionCall]) -> tuple[Tensor, Tensor]:
    """The layer's inputs, padded to one length, (B, N, d) and (B, N)."""
    length = max(_batch_first(plan, call.real).size(1) for call in calls)
    most = max(1, _MOST_ATTENTION // (plan.host.num_heads * length**2))
    inputs, masks = [], []
    for call in calls:
        x = _batch_first(plan, next(iter((*call.arguments, *call.named.values()))))
        real = _batch_first(plan, call.real)
        more = length - x.size(1)
        inputs.append(nn.functional.pad(x, (0, 0, 0, more)))
        masks.append(nn.functional.pad(real, (0, more)))
    chosen = slice(0, None, max(1, sum(map(len, inputs)) // most))
    return torch.cat(inputs)[chosen], torch.cat(masks)[chosen]


def _batch_first(plan: PlannedLayer, x: Tensor) -> Tensor:
    """A tensor (B, N, ...) of a host that may have (N, B, ...)."""
    return x.transpose(0, 1) if getattr(plan.site.module, "batch_first", True) is False else x


def _fit_output(plan: PlannedLayer, layer: nn.Module, calls: Sequence[AttentionCall]) -> None:
    """``out_proj`` by ridge regression of the old outputs on what reaches it."""
    out = getattr(plan.layer, "out_proj", None)
    if not isinstance(out, nn.Linear):
        return
    seen: list[Tensor] = []
    rows = out.in_features + (out.bias is not None)
    gram = out.weight.new_zeros(rows, rows, dtype=torch.float64)
    cross = gram.new_zeros(rows, out.out_features)
    handle = out.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        for call in calls:
            seen.clear()
            layer(*call.arguments, **call.named)
            real, wanted = _batch_first(plan, call.real), _batch_first(plan, call.output)
            z, y = seen[0][real].double(), wanted[real].double()
            if out.bias is not None:
                z = nn.functional.pad(z, (0, 1), value=1.0)
            gram, cross = gram + z.mT @ z, cross + z.mT @ y
    finally:
        handle.remove()
    weight = ridge_solution(gram, cross, _RIDGE).to(out.weight.dtype)
    if out.bias is not None:
        out.bias.copy_(weight[-1])
        weight = weight[:-1]
    out.weight.copy_(weight.mT)
