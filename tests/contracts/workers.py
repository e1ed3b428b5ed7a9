"""Data parallelism of two processes, which core/sharding_worker.py starts."""

from __future__ import annotations

import torch
from contracts.cases import BATCH, CASES, Case, inputs, right_padding
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kernel_attention import auxiliary_loss


def loss_of(call: nn.Module, layer: nn.Module, x: Tensor, mask: Tensor, form: dict[str, bool]) -> Tensor:
    return call(x, attention_mask=mask, **form)[mask].square().mean() + auxiliary_loss(layer)


def shards() -> list[tuple[Tensor, Tensor]]:
    """The part of the batch each process gets; the parts differ in size and in their padding."""
    torch.manual_seed(5)
    x, mask = inputs(), right_padding()
    return [(x[: BATCH // 2], mask[: BATCH // 2]), (x[BATCH // 2 :], mask[BATCH // 2 :])]


def train_one_step(rank: int) -> None:
    """Every mechanism under DistributedDataParallel: gradients are the mean of the shards' own gradients.

    That the loss reaches the parameters of every variant is `every_parameter_is_trained`.
    """
    for case in CASES:
        for form in () if case.variant_name else case.call_forms():
            _check(case, rank, form)


def _check(case: Case, rank: int, form: dict[str, bool]) -> None:
    layer = case.build()
    parallel = DistributedDataParallel(layer)
    for _ in range(2):  # an unused parameter is complained about at the second forward
        layer.zero_grad()
        loss_of(parallel, layer, *shards()[rank], form).backward()
    expected = []
    for shard in shards():
        alone = case.build()
        loss_of(alone, alone, *shard, form).backward()
        expected.append([p.grad for p in alone.parameters()])
    for p, *gradients in zip(layer.parameters(), *expected, strict=True):
        torch.testing.assert_close(
            p.grad, torch.stack(gradients).mean(0), msg=lambda text: f"{case} {form}: {text}"
        )
