"""A sharded layer in Lightning: every process is given all sequences and takes its own part of each."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import kernel_attention as ka

STEPS, BATCH, LENGTH, CUT = 3, 2, 23, 9  # the two parts have 9 tokens and 14


def build() -> nn.Module:
    torch.manual_seed(0)
    return ka.PrimalAttention(10, 2, rank=4, eta=0.3).train()


def batches() -> list[Tensor]:
    return list(torch.randn(STEPS, BATCH, LENGTH, 10, generator=torch.Generator().manual_seed(1)))


def loss_of(layer: nn.Module, x: Tensor, world: int) -> Tensor:
    """A rank's loss: its tokens' share in the mean over all, times the number of ranks."""
    share = world * x.size(1) / LENGTH
    return share * (layer(x) - 1.0).square().mean() + ka.auxiliary_loss(layer)


class Sharded(L.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer, self.folder = build(), folder

    def setup(self, stage: str) -> None:
        ka.shard_sequence(self.layer)  # the process group exists by now

    def training_step(self, x: Tensor) -> Tensor:
        part = x[:, :CUT] if self.global_rank == 0 else x[:, CUT:]
        return loss_of(self.layer, part, self.trainer.world_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            torch.save(self.layer.state_dict(), self.folder / "trained.pt")


def fit(folder: Path, num_processes: int) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=num_processes, max_epochs=1, default_root_dir=folder,
        strategy=DDPStrategy(process_group_backend="gloo", start_method="spawn"),
        use_distributed_sampler=False,  # it would give every rank other sequences
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Sharded(folder), torch.utils.data.DataLoader(batches(), batch_size=None))


def trained_alone() -> dict[str, Tensor]:
    layer = build()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for x in batches():
        optimizer.zero_grad()
        loss_of(layer, x, 1).backward()
        optimizer.step()
    return layer.state_dict()
