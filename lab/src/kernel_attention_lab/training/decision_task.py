"""The training of policies on recorded episodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.models import Policy
from kernel_attention.training.task import SameLossTask
from kernel_attention_lab.data.decisions.batches import DecisionBatch
from kernel_attention_lab.training.decision_recipe import DecisionRecipe


class DecisionTask(SameLossTask):
    """Mean squared error of the actions, or cross-entropy of discrete ones, over the real steps.

    Logs ``train_loss``, ``val_loss``, each J, and the figures of ``played``, if any, prefixed ``val_``.

    Args:
        model: a policy.
        recipe: optimizer and schedule.
        played: plays a few episodes and returns their figures; called after every evaluation.
    """

    model: Policy

    def __init__(
        self,
        model: Policy,
        recipe: DecisionRecipe,
        played: Callable[[Policy], dict[str, float]] | None = None,
    ) -> None:
        super().__init__(model, recipe.train_settings(), recipe.learning_rate_factor)
        self.played = played

    def on_validation_epoch_end(self) -> None:
        if self.played is not None:
            for name, value in self.trainer.processes.told(self.played(self.model)).items():
                self.log(f"val_{name}", value)

    def weight(self, batch: DecisionBatch) -> int:
        """The real steps."""
        return int(batch.is_real.sum())

    def _log_step(self, stage: str, batch: DecisionBatch) -> Tensor:
        loss = action_loss(self.model(*batch.arguments), batch)
        self.log(f"{stage}_loss", loss.detach(), self.weight(batch))
        return loss


def action_loss(outputs: Tensor, batch: DecisionBatch) -> Tensor:
    """Mean over the real steps of the squared error (B, K, a), or of the cross-entropy of logits."""
    found, targets = outputs.float()[batch.is_real], batch.actions[batch.is_real]
    if targets.dtype == torch.long:
        return F.cross_entropy(found, targets)
    return F.mse_loss(found, targets)
