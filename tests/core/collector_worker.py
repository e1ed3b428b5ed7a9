"""Two processes that train a layer called twice, with its collected objectives."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kernel_attention as ka
from kernel_attention.core.sequence_group import SequenceGroup


class Twice(nn.Module):
    """A layer that is called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ka.PrimalAttention(8, 2, rank=2, eta=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, 8) -> (B, N, 8)."""
        return self.attention(self.attention(x))


def step(model: nn.Module, x: torch.Tensor, cases: int, group: SequenceGroup | None) -> torch.Tensor:
    """The loss of a step, whose gradients are left in the model; the objectives averaged over the group."""
    with ka.collect_objectives() as objectives:
        y = model(x)
    if group is not None:
        ka.average_objectives(objectives, cases, group)
    loss = y.square().mean() + objectives.total()
    loss.backward()
    return loss.detach()


def check_collected(rank: int, world: int) -> None:
    """Compare the averaged gradients of the processes with those of one process that has all sequences."""
    torch.manual_seed(0)
    alone, x = Twice().double(), torch.randn(2 * world, 7, 8, dtype=torch.float64)
    models = {"ddp": nn.parallel.DistributedDataParallel(copy.deepcopy(alone)), "fsdp": copy.deepcopy(alone)}
    fully_shard(models["fsdp"], mesh=init_device_mesh("cpu", (world,)))
    whole = step(alone, x, len(x), None)
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    for kind, model in models.items():
        loss = step(model, x[2 * rank : 2 * rank + 2], 2, SequenceGroup())
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / world, whole)
        for name, p in model.named_parameters():
            found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(found, wanted[name.removeprefix("module.")], msg=f"{kind}: {name}")
