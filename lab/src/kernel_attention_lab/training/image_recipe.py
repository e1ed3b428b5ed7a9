"""The recipes with a vision transformer: what they have in common, and the classification of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, NonNegative, Part, Positive, Probability, Share, Whole
from kernel_attention.training.settings import scheduled_factor
from kernel_attention_lab.training.recipe import EpochRecipe


@dataclass(frozen=True)
class VisionRecipe(EpochRecipe):
    """The common keys of recipes with a vision transformer, whose sizes are those of DeiT-tiny by default.

    Args:
        patch_size: side of the patches, each of which becomes a token.
        pooling: what the classifier reads: a class token, or the mean over all tokens.
        channel_attention: whether the channels of the feed-forward networks are weighed as in FAN.
        drop_path: largest rate of stochastic depth; it grows linearly from 0 in the first layer.
        min_learning_rate: the learning rate at the end of the schedule.
        train_cases: number of training images, evenly spaced; 0 is all.
        evaluation_cases: the same for the validation and the test split.
        workers: processes that read batches while the model trains; 0 reads them in between.

    The other keys are those of ``EpochRecipe``.
    """

    attention: Any = "softmax"
    embed_dim: Count = 192
    num_heads: Count = 3
    num_layers: Count = 12
    feedforward_dim: Count = 768
    dropout: Probability = 0.0
    norm_first: bool = True
    gradient_clip: NonNegative = 0.0
    protocol: Literal["holdout", "paper"] = "holdout"
    patch_size: Count = 4
    pooling: Literal["class", "mean"] = "class"
    channel_attention: bool = False
    drop_path: Probability = 0.0
    min_learning_rate: NonNegative = 1e-5
    train_cases: Whole = 0
    evaluation_cases: Whole = 0
    validation_fraction: Part = 0.1
    workers: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.norm_first or self.positions != "learnt":
            raise InputError("a vision transformer has norm_first=true and positions=learnt")
        if self.min_learning_rate > self.learning_rate:
            raise InputError(
                f"min_learning_rate={self.min_learning_rate} exceeds learning_rate={self.learning_rate}"
            )

    def model_options(self) -> dict[str, Any]:
        """The keys that ``kernel_attention.models.vision.VisionTransformer`` takes."""
        names = (
            "patch_size", "attention", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout",
            "drop_path", "pooling", "channel_attention",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ImageRecipe(VisionRecipe):
    """Classification of images.

    Args:
        dataset: cifar10, tiny_imagenet100, another image set under the data root, or a folder or an archive.
        image_size: side of the images; their short side is resized to it and the middle is cut out. 0 keeps
            the size of the images, which must then be the same for all.
        crop_ratio: with an image_size, images are kept larger, with image_size / crop_ratio pixels a side.
            Augmentation crops out of all of it, and the middle is evaluated. DeiT has 0.875: 224 of 256.
        warmup_epochs: epochs in which the learning rate grows linearly to ``learning_rate``.
        schedule: after the warm-up: falling along a cosine to ``min_learning_rate``, or constant.
        min_learning_rate: the rate at the end of the cosine; the warm-up begins at a tenth of it.
        augmentation: none; crop_flip: a shifted crop (an eighth of the side) and a mirror image; deit: a crop
            of random size, a mirror image, RandAugment (rand-m9-mstd0.5-inc1), as in DeiT's training.
        random_erasing: probability that a rectangle of an image is replaced by noise.
        mixup: alpha of mixup's Beta distribution; 0 switches it off.
        cutmix: alpha of cutmix's Beta distribution; 0 switches it off. With both, a batch has either, at even
            odds.
        label_smoothing: weight of the uniform distribution in the targets.
        ema_decay: the evaluated weights are an exponential moving average with this decay; 0 evaluates the
            trained weights themselves.
        repeats: differently augmented copies of an image in a batch (repeated augmentation); an epoch keeps
            its number of images.

    The other keys are those of ``VisionRecipe``.
    """

    task_name: ClassVar[str] = "images"

    batch_size: Count = 128
    optimizer: Literal["radam", "adam", "adamw"] = "adamw"
    learning_rate: Positive = 5e-4
    weight_decay: NonNegative = 0.05
    image_size: Whole = 0
    crop_ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    warmup_epochs: Whole = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    augmentation: Literal["none", "crop_flip", "deit"] = "crop_flip"
    random_erasing: Share = 0.0
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    label_smoothing: Probability = 0.0
    ema_decay: Probability = 0.0
    repeats: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_epochs >= self.epochs:
            raise InputError(f"warmup_epochs={self.warmup_epochs} must be below epochs={self.epochs}")
        if self.crop_ratio < 1 and not self.image_size:
            raise InputError(f"crop_ratio={self.crop_ratio} needs an image_size (accepted without one: 1)")

    @property
    def kept_size(self) -> int:
        """The side of the images before they are cropped; 0 where they keep their own."""
        return round(self.image_size / self.crop_ratio)

    def learning_rate_factor(self, step: int, steps_per_epoch: int) -> float:
        """The factor of ``learning_rate`` at step number ``step``, counted from 0."""
        least = self.min_learning_rate / self.learning_rate
        warmup, steps = self.warmup_epochs * steps_per_epoch, self.epochs * steps_per_epoch
        return scheduled_factor(self.schedule, step, warmup, steps, least)
