"""The training of classifiers of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.models.vision import VisionTransformer
from kernel_attention.training.task import AveragedTask
from kernel_attention_lab.data.images.augmentation import Augmentation, mix
from kernel_attention_lab.data.images.batches import ImageBatch
from kernel_attention_lab.training.image_recipe import ImageRecipe


class ImageTask(AveragedTask):
    """Cross-entropy of augmented and mixed images (DeiT's training, Touvron et al. 2021).

    Logs per epoch: ``train_loss`` and ``train_accuracy`` (of the augmented images; with mixup or cutmix, for
    the larger part of the mixture), ``objective_layer_i`` (J), and ``val_loss``, ``val_accuracy``.

    Args:
        model: images (B, C, H, W) in [0, 1] -> logits (B, classes).
        recipe: augmentation, optimizer, schedule.
        size: (H, W) of the images that the model takes.
    """

    model: VisionTransformer

    def __init__(self, model: VisionTransformer, recipe: ImageRecipe, size: tuple[int, int]) -> None:
        super().__init__(model, recipe.train_settings())
        self.recipe: ImageRecipe = recipe
        self.augmentation = Augmentation(recipe.augmentation, size, recipe.random_erasing)
        self.start_average(recipe.ema_decay)

    def training_step(self, batch: ImageBatch) -> Tensor:
        """The cross-entropy of augmented images."""
        recipe = self.recipe
        images, targets = mix(
            self.augmentation(batch.pixels, self.model.input_mean, self.model.input_std),
            batch.target,
            self.model.head.out_features,
            recipe.mixup,
            recipe.cutmix,
            recipe.label_smoothing,
        )
        logits = self.model(images).float()
        loss = F.cross_entropy(logits, targets)
        self._log("train", loss, logits, targets.argmax(dim=-1))
        return loss

    def validation_step(self, batch: ImageBatch) -> None:
        """Log loss and accuracy of the evaluated weights."""
        logits = self.evaluated(*batch.arguments).float()
        self._log("val", F.cross_entropy(logits, batch.target), logits, batch.target)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """No weight decay for some parameters, as in DeiT."""
        return decay_groups(self.model)

    def learning_rate_factor(self) -> Callable[[int], float]:
        """The recipe's schedule for this number of batches."""
        steps_per_epoch = -(-self.trainer.total_steps // self.recipe.epochs)
        return lambda step: self.recipe.learning_rate_factor(step, steps_per_epoch)

    def _log(self, stage: str, loss: Tensor, logits: Tensor, target: Tensor) -> None:
        figures = {
            f"{stage}_loss": loss.detach(),
            f"{stage}_accuracy": (logits.argmax(dim=-1) == target).float().mean(),
        }
        self.log_dict(figures, len(target))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups for the optimizer. Biases, norms, positions and the class token have no weight decay (DeiT)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_kept = parameter.dim() <= 1 or name.rpartition(".")[2] in ("positions", "class_token")
        (kept if is_kept else decayed).append(parameter)
    return [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
