"""Semantic segmentation with Segmenter."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import InputError, unknown
from kernel_attention.fields import DIFFERENT, Count, NonNegative, Positive, Probability, Whole
from kernel_attention.mechanisms import layer_specs
from kernel_attention.models.vision import Segmenter, VisionTransformer
from kernel_attention.series.outputs import batch_outputs
from kernel_attention.training.task import TrainingTask
from kernel_attention_lab.data.images.batches import ImageBatch
from kernel_attention_lab.data.segmentation.batches import make_crop_loader, make_whole_loader
from kernel_attention_lab.data.segmentation.sets import (
    VOID,
    SegmentationSplit,
    even_places,
    hold_out_pairs,
    load_segmentation,
)
from kernel_attention_lab.robustness.corruptions import CORRUPTIONS, SMALLEST, corrupt_image
from kernel_attention_lab.tasks.experiment import Loaders, Metric, Trained
from kernel_attention_lab.tasks.recipe import VisionRecipe, require_equal
from kernel_attention_lab.tasks.registry import register_task
from kernel_attention_lab.tasks.vision import VisionExperiment, channel_statistics, decay_groups

_POWER = 0.9  # of the schedule
_OF_A_CLASSIFIER = (
    "patch_size", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "channel_attention", "pooling",
    "short_convolution",
)  # fmt: skip
_METRICS = ("mean_iou", "mean_accuracy", "pixel_accuracy")
_MEASURED = 200  # training images whose statistics standardise the input
_SHOWN = 4  # test images in the report
_GRID = (128, 128)  # of the majority baseline, where label maps differ in size


@dataclass(frozen=True)
class SegmentationRecipe(VisionRecipe):
    """Semantic segmentation with a linear decoder; by default as Segmenter on ADE20K (Strudel et al. 2021).

    The learning rate falls from ``learning_rate`` to ``min_learning_rate`` with the power 0.9 of the share of
    steps that are left.

    Args:
        dataset: camvid240, or another set of images with label maps under the data root, or a folder or an
            archive.
        optimizer: sgd (with momentum 0.9), radam, adam or adamw.
        image_size: length of the short side that every image is resized to; 0 resizes none. Metrics are those
            of the labels' own size, to which the logits are enlarged.
        crop_size: height and width of the crops in training and of the windows in evaluation, or one number
            for both; a multiple of ``patch_size``. Smaller images are padded.
        start_from: run folder of a classification of images, whose weights the encoder starts with: those of
            the same seed where the run has it, else of its first. Empty: trained from the beginning.
        severities: also measure the test split under 15 corruptions at these severities, of 1 to 5.
        corrupted_cases: number of test images that are corrupted, evenly spaced; 0 is all.

    The other keys are those of ``VisionRecipe``.
    """

    task_name: ClassVar[str] = "segmentation"

    batch_size: Count = 8
    optimizer: Literal["sgd", "radam", "adam", "adamw"] = "sgd"  # type: ignore[assignment]
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    patch_size: Count = 16
    drop_path: Probability = 0.1
    epochs: Count = 64
    image_size: Whole = 512
    crop_size: Annotated[list[Count], Field(min_length=1)] = field(default_factory=lambda: [512])
    start_from: str = ""
    severities: Annotated[list[Annotated[int, Field(ge=1, le=5)]], DIFFERENT[0]] = field(default_factory=list)
    corrupted_cases: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.crop_size) > 2 or any(side % self.patch_size for side in self.crop_size):
            raise InputError(
                f"crop_size={self.crop_size} must be one or two multiples of patch_size={self.patch_size}"
            )

    @property
    def crop(self) -> tuple[int, int]:
        """Height and width of the crops."""
        return self.crop_size[0], self.crop_size[-1]

    def learning_rate_factor(self, step: int, steps: int) -> float:
        """The factor of ``learning_rate`` at a step of so many, counted from 0."""
        least = self.min_learning_rate / self.learning_rate
        return least + (1 - least) * max(1 - step / steps, 0.0) ** _POWER


class SegmentationTask(TrainingTask):
    """Cross-entropy of the pixels that have a class.

    Logs per epoch: ``train_loss`` and ``train_pixel_accuracy`` of the crops, ``objective_layer_i`` (J), and
    of all validation pixels together ``val_loss``, ``val_mean_iou``, ``val_mean_accuracy`` and
    ``val_pixel_accuracy``.

    Args:
        model: images (B, C, H, W) in [0, 1] -> logits (B, K, H, W).
        recipe: optimizer and schedule.
    """

    model: Segmenter

    def __init__(self, model: Segmenter, recipe: SegmentationRecipe) -> None:
        super().__init__(model, recipe.train_settings())
        self.recipe: SegmentationRecipe = recipe
        self.classes = model.encoder.head.out_features
        self._counts = torch.zeros(self.classes, self.classes, dtype=torch.int64)

    def training_step(self, batch: ImageBatch) -> Tensor:
        """The cross-entropy of the pixels that have a class."""
        logits = self.model(*batch.arguments).float()
        loss, pixels = pixel_loss(logits, batch.target)
        hits = count_pixels(logits.detach().argmax(dim=1), batch.target, self.classes).diag().sum()
        metrics = {"train_loss": loss.detach(), "train_pixel_accuracy": hits / max(pixels, 1)}
        self.log_dict(metrics, max(pixels, 1))
        return loss

    def weight(self, batch: ImageBatch) -> int:
        """The pixels that have a class."""
        return int((batch.target != VOID).sum())

    def on_validation_epoch_start(self) -> None:
        self._counts.zero_()

    def validation_step(self, batch: ImageBatch) -> None:
        """Log the loss and count the pixels."""
        logits = enlarged(self.model(*batch.arguments).float(), batch.target)
        loss, pixels = pixel_loss(logits, batch.target)
        self.log("val_loss", loss, max(pixels, 1))
        if self.figures.counts:
            self._counts += count_pixels(logits.argmax(dim=1), batch.target, self.classes)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of all pixels: the mean over batches of a ratio is not the ratio of the whole."""
        counts = self.trainer.processes.total(self._counts.flatten().tolist())
        metrics = overlap_metrics(torch.tensor(counts).view_as(self._counts))
        self.log_dict({f"val_{name}": metrics[name] for name in _METRICS})

    def parameter_groups(self) -> list[dict[str, Any]]:
        """No weight decay for some parameters, as in DeiT."""
        return decay_groups(self.model)

    def learning_rate_factor(self) -> Callable[[int], float]:
        """The recipe's schedule for this number of batches."""
        steps = self.trainer.total_steps
        return lambda step: self.recipe.learning_rate_factor(step, steps)


@register_task(SegmentationRecipe)
class SegmentationExperiment(VisionExperiment):
    """Semantic segmentation with Segmenter, described by a ``SegmentationRecipe``."""

    recipe: SegmentationRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("train_cases", "test_cases")
    starts_with: ClassVar[str] = "images"

    def __init__(self, recipe: SegmentationRecipe, data_root: str | Path | None = None) -> None:
        super().__init__(recipe, data_root)
        self.data = load_segmentation(recipe.dataset, data_root, image_size=recipe.image_size)
        self.test = self.data.test.evenly(recipe.evaluation_cases)

    @staticmethod
    def hold_out(
        split: SegmentationSplit, fraction: float, seed: int
    ) -> tuple[SegmentationSplit, SegmentationSplit]:
        return hold_out_pairs(split, fraction, seed)

    @staticmethod
    def build_model(recipe: SegmentationRecipe, facts: dict[str, Any]) -> Segmenter:
        classes = len(facts["class_names"])
        encoder = VisionTransformer(recipe.crop, num_outputs=classes, **recipe.model_options())
        return Segmenter(encoder, classes)

    @property
    def metric(self) -> Metric:
        return Metric("mean_iou", True)

    def facts(self) -> dict[str, Any]:
        data = self.data
        return {
            "dataset": data.name,
            "task": "segmentation",
            "image_sizes": _sizes(data.test),
            "class_names": list(data.class_names),
            "train_cases": len(data.train),
            "validation_cases": 0 if data.validation is None else len(data.validation),
            "test_cases": len(data.test),
        }

    def loaders(self, seed: int) -> Loaders:
        recipe = self.recipe
        train, val = self.split(seed)
        mean, _ = self._scale(train)
        batches = make_crop_loader(
            train,
            recipe.crop,
            recipe.effective_batch,
            fill=(mean * 255).round().int().tolist(),
            seed=seed,
            num_workers=recipe.workers,
        )
        return batches, make_whole_loader(val, recipe.effective_batch)

    def check(self) -> None:
        super().check()
        if self.recipe.severities:
            check_corruptible(self.test)

    def prepare(self, model: Segmenter, seed: int) -> None:
        """Set the scale of the training images."""
        train, _ = self.split(seed)
        model.encoder.set_scale(*self._scale(train))

    def start(self, model: Segmenter, trained: Trained) -> None:
        """Give the encoder the weights and the scale of a classifier, all but the head.

        The positions are interpolated to the grid of the encoder (bicubic, as in the paper).
        """
        theirs, recipe = trained.recipe, self.recipe
        require_equal(theirs, recipe, _OF_A_CLASSIFIER)
        if layer_specs(theirs.attention, theirs.num_layers) != layer_specs(
            recipe.attention, recipe.num_layers
        ):
            require_equal(theirs, recipe, ("attention",))
        state = trained.model.resized(model.encoder.image_size).state_dict()
        kept = {name: value for name, value in model.encoder.state_dict().items() if name.startswith("head.")}
        model.encoder.load_state_dict(state | kept)

    def task(self, model: Any) -> SegmentationTask:
        return SegmentationTask(model, self.recipe)

    def evaluate(self, model: Segmenter) -> dict[str, Any]:
        recipe = self.recipe
        metrics = self._measure(model, self.test)
        metrics |= baseline_metrics(self.data.train, self.test, len(self.data.class_names))
        if recipe.severities:
            metrics |= corrupted_metrics(model, self.test, recipe, len(self.data.class_names))
        return metrics

    def evaluate_split(self, model: Segmenter, split: str) -> dict[str, Any]:
        """The metrics of the training, validation or test split."""
        data = self.data
        splits = {"train": data.train, "validation": data.validation, "test": data.test}
        found = splits.get(split)
        if found is None:
            raise unknown("split", split, [name for name, value in splits.items() if value is not None])
        return self._measure(model, found.evenly(self.recipe.evaluation_cases))

    def batches(self, cases: int) -> Iterable[tuple[Tensor]]:
        return [batch.arguments for batch in make_whole_loader(self.data.test.evenly(cases), 1)]

    @torch.inference_mode()
    def examples(self, model: Segmenter) -> dict[str, np.ndarray]:
        """Test images with their labels and predictions, of the labels' size; smaller ones are padded."""
        split = self.test.evenly(_SHOWN)
        height, width = (max(labels.shape[axis] for labels in split.labels) for axis in (0, 1))
        images = np.full((len(split), height, width, 3), 255, dtype=np.uint8)
        truth = np.full((len(split), height, width), VOID, dtype=np.uint8)
        predicted = truth.copy()
        outputs = batch_outputs(model, make_whole_loader(split, 1), self.recipe.precision)
        for case, (logits, batch) in enumerate(outputs):
            labels = batch.target[0].numpy()
            place = (case, slice(labels.shape[0]), slice(labels.shape[1]))
            shown = Image.fromarray(np.array(split.images[case]))
            images[place] = np.asarray(shown.resize(labels.shape[::-1], Image.Resampling.BILINEAR))
            truth[place] = labels
            predicted[place] = enlarged(logits, batch.target).argmax(dim=1)[0].numpy()
        return {"images": images, "labels": truth, "predictions": predicted}

    def _scale(self, train: SegmentationSplit) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every channel of up to 200 evenly spaced images."""
        images = train.evenly(_MEASURED).images
        return channel_statistics(np.concatenate([image.reshape(-1, 3) for image in images]))

    def _measure(self, model: Segmenter, split: SegmentationSplit) -> dict[str, Any]:
        recipe = self.recipe
        batches = make_whole_loader(split, recipe.batch_size)
        return segmentation_metrics(model, batches, len(self.data.class_names), recipe.precision)


def _sizes(split: SegmentationSplit) -> str:
    """The size of the label maps, or the smallest and the largest."""
    sizes = sorted({(labels.shape[1], labels.shape[0]) for labels in split.labels}, key=lambda s: s[0] * s[1])
    return " to ".join(f"{width} x {height}" for width, height in dict.fromkeys((sizes[0], sizes[-1])))


def count_pixels(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """Pixels by true and predicted class, (K, K) int64; those without a class are left out.

    Args:
        predicted: class numbers of any shape.
        target: of the same shape, ``VOID`` where there is no class.
        classes: K.
    """
    known = target != VOID
    pairs = target[known].long() * classes + predicted[known].long()
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes).cpu()


def overlap_metrics(counts: Tensor) -> dict[str, Any]:
    """Pixel accuracy, mean accuracy and mean intersection over union, all and by class.

    A class that no pixel has is None among the accuracies and left out of their mean. Among the intersections
    over union, this is so for a class that no pixel has and no pixel was predicted to have.

    Args:
        counts: pixels by true and predicted class, (K, K).
    """
    hits, true, predicted = counts.diag().double(), counts.sum(dim=1).double(), counts.sum(dim=0).double()
    accuracy, overlap = hits / true, hits / (true + predicted - hits)  # NaN for 0 / 0
    return {
        "mean_iou": overlap.nanmean().item(),
        "mean_accuracy": accuracy.nanmean().item(),
        "pixel_accuracy": (hits.sum() / true.sum()).item(),
        "class_iou": _or_none(overlap),
        "class_accuracy": _or_none(accuracy),
    }


def _or_none(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def pixel_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Mean cross-entropy over the pixels that have a class, and their number; 0 where there is none.

    Args:
        logits: (B, K, H, W).
        target: (B, H, W) uint8.
    """
    count = int((target != VOID).sum())
    total = F.cross_entropy(logits, target.long(), ignore_index=VOID, reduction="sum")
    return total / max(count, 1), count


def enlarged(logits: Tensor, target: Tensor) -> Tensor:
    """Logits (B, K, h, w) enlarged to the size of the label maps (B, H, W)."""
    if logits.shape[-2:] == target.shape[-2:]:
        return logits
    return F.interpolate(logits, size=target.shape[-2:], mode="bilinear", align_corners=False)


def segmentation_metrics(
    model: nn.Module, batches: Iterable[ImageBatch], classes: int, precision: str
) -> dict[str, Any]:
    """``overlap_metrics`` of a model, its loss, and the counts of pixels as ``confusion_matrix``."""
    counts, total, cases = torch.zeros(classes, classes, dtype=torch.int64), 0.0, 0
    for outputs, batch in batch_outputs(model, batches, precision):
        logits = enlarged(outputs, batch.target)
        loss, count = pixel_loss(logits, batch.target)
        total += loss.item() * count
        counts += count_pixels(logits.argmax(dim=1), batch.target, classes)
        cases += len(batch.x)
    pixels = int(counts.sum())
    return overlap_metrics(counts) | {
        "loss": total / max(pixels, 1),
        "confusion_matrix": counts.tolist(),
        "cases": cases,
        "pixels": pixels,
    }


def baseline_metrics(
    train: SegmentationSplit, test: SegmentationSplit, classes: int
) -> dict[str, float | int]:
    """The metrics of two predictions that look at no image.

    ``constant_``: the most frequent class of the training pixels everywhere. ``majority_``: at every place
    the most frequent class there. Where label maps differ in size, the places are those of a grid of
    128 x 128 cells that is stretched over every image.
    """
    sizes = {labels.shape for labels in train.labels}
    grid = sizes.pop() if len(sizes) == 1 else _GRID
    counts = np.zeros((classes + 1, *grid), dtype=np.int64)
    rows, columns = np.indices(grid)
    for labels in train.labels:
        label = _stretched(labels, grid)
        counts[np.where(label == VOID, classes, label), rows, columns] += 1
    counts = counts[:classes]
    constant = int(counts.sum(axis=(1, 2)).argmax())
    majority = np.where(counts.any(axis=0), counts.argmax(axis=0), constant).astype(np.uint8)
    found = {"constant": np.full(grid, constant, dtype=np.uint8), "majority": majority}
    metrics: dict[str, float | int] = {}
    for name, predicted in found.items():
        pixels = torch.zeros(classes, classes, dtype=torch.int64)
        for labels in test.labels:
            there = torch.from_numpy(_stretched(predicted, labels.shape))
            pixels += count_pixels(there, torch.from_numpy(np.array(labels)), classes)
        for key in ("mean_iou", "mean_accuracy", "pixel_accuracy"):
            metrics[f"{name}_{key}"] = overlap_metrics(pixels)[key]
    return metrics


def _stretched(labels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """The nearest label of every cell of a map of this size."""
    places = (
        ((np.arange(wanted) + 0.5) * found / wanted).astype(np.int64)
        for found, wanted in zip(labels.shape, size, strict=True)
    )
    return np.ascontiguousarray(labels[np.ix_(*places)])


class _Corrupted(Sequence[np.ndarray]):
    """Some images of a split, corrupted when they are asked for; the draws depend on their number in it."""

    def __init__(
        self, images: Sequence[np.ndarray], places: np.ndarray, corruption: str, severity: int
    ) -> None:
        self.images, self.places = images, places
        self.corruption, self.severity = corruption, severity

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, case: Any) -> Any:
        number = int(self.places[case])
        return corrupt_image(np.array(self.images[number]), self.corruption, self.severity, index=number)


def check_corruptible(split: SegmentationSplit) -> None:
    """InputError where the images are too small to be corrupted or a library is missing."""
    smallest = min(min(image.shape[:2]) for image in split.images)
    if smallest < SMALLEST:
        raise InputError(
            f"severities: corruptions need images of at least {SMALLEST} pixels a side, the smallest has "
            f"{smallest}; raise image_size"
        )
    corrupt_image(np.array(split.images[0]), CORRUPTIONS[0], 1)


def corrupted_metrics(
    model: nn.Module, split: SegmentationSplit, recipe: SegmentationRecipe, classes: int
) -> dict[str, Any]:
    """The metrics under every corruption of ImageNet-C at the recipe's severities, and their means.

    The means over all corruptions and severities are ``corrupted_mean_iou`` and so on, as in table 6 of the
    kernel-PCA paper. ``corruptions`` has one record a corruption and severity.

    Args:
        model: of the recipe.
        split: the cases, of which the recipe's ``corrupted_cases`` are taken. The labels stay as they are.
        recipe: severities, number of cases, batch size, precision.
        classes: K.
    """
    records: list[dict[str, Any]] = []
    places = even_places(len(split), recipe.corrupted_cases)
    labels = [split.labels[place] for place in places]
    for corruption in CORRUPTIONS:
        for severity in recipe.severities:
            images = _Corrupted(split.images, places, corruption, severity)
            corrupted = SegmentationSplit(images, labels)
            batches = make_whole_loader(corrupted, recipe.batch_size)
            metrics = segmentation_metrics(model, batches, classes, recipe.precision)
            records.append(
                {"corruption": corruption, "severity": severity} | {name: metrics[name] for name in _METRICS}
            )
    means = {f"corrupted_{name}": statistics.fmean(r[name] for r in records) for name in _METRICS}
    return means | {"corrupted_cases": len(places), "corruptions": records}
