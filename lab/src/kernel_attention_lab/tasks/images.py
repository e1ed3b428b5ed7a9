"""Classification of images with a vision transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.analysis import capture
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.errors import InputError, reading
from kernel_attention.fields import Count, NonNegative, Positive, Probability, Share, Whole
from kernel_attention.models.vision import VisionTransformer
from kernel_attention.series.outputs import collect_outputs
from kernel_attention.training.settings import scheduled_factor
from kernel_attention.training.task import AveragedTask
from kernel_attention_lab.data.images.augmentation import Augmentation, mix
from kernel_attention_lab.data.images.batches import ImageBatch, central, channels_first, make_image_loader
from kernel_attention_lab.data.images.decoding import decode_image
from kernel_attention_lab.data.images.files import IMAGE_SUFFIXES, is_image, read_images
from kernel_attention_lab.data.images.sets import ImageSplit, load_class_subset, load_images
from kernel_attention_lab.data.splits import hold_out
from kernel_attention_lab.robustness import UncertainCases
from kernel_attention_lab.robustness.shifts import uncertain_images
from kernel_attention_lab.tasks.experiment import Loaders, Metric
from kernel_attention_lab.tasks.metrics import class_rows, classification_metrics
from kernel_attention_lab.tasks.recipe import VisionRecipe
from kernel_attention_lab.tasks.registry import register_task
from kernel_attention_lab.tasks.vision import VisionExperiment, channel_statistics, decay_groups

_DIAGNOSED_AT_ONCE = 8
EXAMPLES = 12


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
        metrics = {
            f"{stage}_loss": loss.detach(),
            f"{stage}_accuracy": (logits.argmax(dim=-1) == target).float().mean(),
        }
        self.log_dict(metrics, len(target))


@register_task(ImageRecipe)
class ImageExperiment(VisionExperiment):
    """Classification of images with a vision transformer, described by an ``ImageRecipe``."""

    recipe: ImageRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("height", "width")

    def __init__(self, recipe: ImageRecipe, data_root: str | Path | None = None) -> None:
        super().__init__(recipe, data_root)
        self.data = load_images(recipe.dataset, data_root, image_size=recipe.kept_size)
        kept = self.data.train.images.shape[1:3]
        self.size = (recipe.image_size, recipe.image_size) if recipe.image_size else kept
        self.test = central(self.data.test.evenly(recipe.evaluation_cases), self.size)

    @property
    def whole_test(self) -> ImageSplit:
        """All images of the test split as the model takes them; ``test`` has ``evaluation_cases`` of them."""
        return central(self.data.test, self.size)

    def uncertain_cases(
        self, seed: int, cases: int | None = None, on_progress: Callable[[str], object] | None = None
    ) -> tuple[UncertainCases, dict[str, str]]:
        """``uncertain_images`` of the test split; the images that chose the weights of ``seed`` choose the
        temperature.
        """
        chosen = None if self.recipe.protocol == "paper" else central(self.split(seed)[1], self.size)
        return uncertain_images(
            self.whole_test, chosen, cases=cases, kept_size=self.recipe.kept_size, data_root=self.data_root,
            on_progress=on_progress,
        )  # fmt: skip

    @staticmethod
    def hold_out(split: ImageSplit, fraction: float, seed: int) -> tuple[ImageSplit, ImageSplit]:
        return hold_out(split, fraction, seed)

    @staticmethod
    def build_model(recipe: ImageRecipe, facts: dict[str, Any]) -> VisionTransformer:
        size = (facts["height"], facts["width"])
        return VisionTransformer(size, num_outputs=len(facts["class_names"]), **recipe.model_options())

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", True)

    def facts(self) -> dict[str, Any]:
        data = self.data
        height, width = self.size
        return {
            "dataset": data.name,
            "task": "classification",
            "height": height,
            "width": width,
            "class_names": list(data.class_names),
            "train_cases": len(data.train),
            "test_cases": len(data.test),
        }

    def loaders(self, seed: int) -> Loaders:
        recipe = self.recipe
        train, val = self.split(seed)
        batches = make_image_loader(
            train,
            recipe.effective_batch,
            shuffle=True,
            repeats=recipe.repeats,
            seed=seed,
            num_workers=recipe.workers,
        )
        return batches, make_image_loader(val, recipe.effective_batch, size=self.size)

    def prepare(self, model: VisionTransformer, seed: int) -> None:
        train, _ = self.split(seed)
        model.set_scale(*channel_statistics(train.images))

    def task(self, model: Any) -> ImageTask:
        return ImageTask(model, self.recipe, self.size)

    def evaluate(self, model: VisionTransformer) -> dict[str, Any]:
        return image_metrics(model, self.test, self.recipe)[0]

    def examples(self, model: VisionTransformer) -> dict[str, np.ndarray]:
        return image_examples(model, self.test, self.recipe.precision)

    def cases_text(self, count: int) -> str:
        first = "; token 0 is the class token, and counts as the patches do"
        return (
            f"{count} evenly spaced images of the test split{first if self.recipe.pooling == 'class' else ''}"
        )

    @staticmethod
    def evaluate_file(
        model: VisionTransformer, file: Path, recipe: ImageRecipe, facts: dict[str, Any]
    ) -> dict[str, Any]:
        """The metrics of class folders; ``subset_accuracy`` chooses among the classes that occur in them."""
        kept, size = kept_size(recipe, facts), (facts["height"], facts["width"])
        if not file.exists():
            raise InputError(f"{file}: does not exist (accepted: a folder or an archive of class folders)")
        # An absolute path is no name of a set in the data root.
        found = load_class_subset(str(file.resolve()), tuple(facts["class_names"]), image_size=kept)
        _require_size(found.split.images.shape[1:3], size, kept, f"{file}: has images of")
        metrics, logits = image_metrics(model, central(found.split, size), recipe)
        if len(found.classes) < logits.size(-1):
            best = found.classes[logits[:, found.classes].argmax(dim=-1).numpy()]
            metrics["subset_accuracy"] = float((best == found.split.targets).mean())
        return metrics

    @staticmethod
    def predict(
        model: VisionTransformer, file: Path, recipe: ImageRecipe, facts: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """One record per image, wherever it stands in a folder or an archive: its path, class, probabilities.

        Images are resized and cropped as in training.
        """
        names, size, kept = facts["class_names"], (facts["height"], facts["width"]), kept_size(recipe, facts)
        rows: list[dict[str, Any]] = []
        source = _files(file)
        while files := list(islice(source, recipe.batch_size)):
            pixels = [
                decode_image(content, f"{file}: {path}" if path else str(file), kept)
                for path, content in files
            ]
            for (path, _), image in zip(files, pixels, strict=True):
                _require_size(image.shape[:2], size, kept, f"{file}: {path or file.name} has")
            images = central(ImageSplit(np.stack(pixels), np.zeros(len(pixels), np.int64)), size).images
            batch = ImageBatch(channels_first(images), torch.zeros(len(pixels)))
            chances = collect_outputs(model, [batch], recipe.precision).softmax(dim=-1)
            rows += class_rows(chances, names, [path or file.name for path, _ in files], "file")
        return rows

    def batches(self, cases: int) -> Iterable[tuple[Tensor]]:
        loader = make_image_loader(self.data.test.evenly(cases), _DIAGNOSED_AT_ONCE, size=self.size)
        return [batch.arguments for batch in loader]


def image_metrics(
    model: VisionTransformer, split: ImageSplit, recipe: ImageRecipe
) -> tuple[dict[str, Any], Tensor]:
    """``classification_metrics``, with more than 5 classes the top-5 accuracy too; and the logits."""
    logits = collect_outputs(model, make_image_loader(split, recipe.batch_size), recipe.precision)
    metrics = classification_metrics(logits, split.targets)
    if logits.size(-1) > 5:
        best = logits.topk(5).indices.numpy()
        metrics["top5_accuracy"] = float((best == split.targets[:, None]).any(axis=1).mean())
    return metrics, logits


def image_examples(model: VisionTransformer, split: ImageSplit, precision: str) -> dict[str, np.ndarray]:
    """The content of ``examples.npz``: evenly spaced images of a split, n of them.

    ``images`` (n, H, W, 3) uint8, ``targets`` and ``predictions`` (n,), ``probabilities`` (n,) of the
    predicted classes, ``attention`` (n, h, rows, columns), see ``patch_attention``, which is absent for a
    mechanism without a matrix, and ``attention_text``, what it shows.
    """
    chosen = split.evenly(EXAMPLES)
    loader = make_image_loader(chosen, len(chosen))
    logits = collect_outputs(model, loader, precision)
    found = {
        "images": np.ascontiguousarray(chosen.images),
        "targets": chosen.targets,
        "predictions": logits.argmax(-1).numpy(),
        "probabilities": logits.softmax(-1).amax(-1).numpy(),
    }
    batch = next(iter(loader)).arguments[0].to(model.head.weight.device)
    (attention,) = capture(model, (batch,), "first").values()
    maps = patch_attention(model, attention)
    if maps is None:
        text = f"{attention.mechanism} has no attention matrix, so there is no picture of it"
    elif model.class_tokens:
        text = f"{attention.mechanism}: the attention of the class token to the patches"
    else:
        text = f"{attention.mechanism}: the attention to every patch, mean over the queries"
    if maps is not None:
        found["attention"] = maps
    return found | {"attention_text": np.array(text)}


@torch.no_grad()
def patch_attention(model: VisionTransformer, attention: CapturedAttention) -> np.ndarray | None:
    """The attention to the patches over the image, (n, h, rows, columns) float32; None without a matrix.

    It is the row of the class token, without its weight for itself, or with mean pooling the mean of the
    rows. A mechanism that has a kernel instead of weights shows the kernel.
    """
    maps = []
    for case in range(attention.num_sequences):
        matrix = attention.matrix(case)
        if matrix is None:
            return None
        row = matrix[:, 0] if model.class_tokens else matrix.mean(1)
        maps.append(row[:, model.class_tokens :].unflatten(-1, model.grid_size))
    return torch.stack(maps).numpy()


def kept_size(recipe: ImageRecipe, facts: dict[str, Any]) -> int:
    """The side to which images of a file are resized and cut; 0 where they must have the model's size.

    It is that of training. Where training kept the images' own size, it is the side of these, if square.
    """
    if recipe.kept_size:
        return recipe.kept_size
    return int(facts["height"]) if facts["height"] == facts["width"] else 0


def _require_size(found: tuple[int, ...], size: tuple[int, int], kept: int, what: str) -> None:
    """InputError where images that are not resized have not the model's size."""
    if not kept and found != size:
        raise InputError(
            f"{what} {found[1]} x {found[0]} pixels (accepted: {size[1]} x {size[0]}, the size of the "
            "training images)"
        )


def _files(file: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of the images; the path of a single image is empty."""
    if not (file.is_file() and is_image(file.name)):
        if file.is_file() or file.is_dir():
            yield from read_images(file)
            return
        raise InputError(
            f"{file}: does not exist (accepted: an image, {', '.join(IMAGE_SUFFIXES)}, or a folder or an "
            "archive of images)"
        )
    with reading(f"file {file}"):
        yield "", file.read_bytes()
