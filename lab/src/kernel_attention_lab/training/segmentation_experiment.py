"""Semantic segmentation: the data, the model and the weights it starts from, the figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kernel_attention.errors import unknown
from kernel_attention.models.segmenter import Segmenter
from kernel_attention.models.vision import VisionTransformer
from kernel_attention.series.outputs import batch_outputs
from kernel_attention_lab.data.segmentation.batches import make_crop_loader, make_whole_loader
from kernel_attention_lab.data.segmentation.sets import (
    VOID,
    SegmentationSplit,
    hold_out_pairs,
    load_segmentation,
)
from kernel_attention_lab.training.experiment import Loaders, Metric
from kernel_attention_lab.training.image_experiment import VisionExperiment, channel_statistics
from kernel_attention_lab.training.recorder import RunRecorder
from kernel_attention_lab.training.segmentation_figures import (
    baseline_figures,
    check_corruptible,
    corrupted_figures,
    enlarged,
    segmentation_figures,
)
from kernel_attention_lab.training.segmentation_recipe import SegmentationRecipe
from kernel_attention_lab.training.segmentation_task import SegmentationTask
from kernel_attention_lab.training.start import load_start

_MEASURED = 200  # training images whose statistics standardise the input
_SHOWN = 4  # test images in the report


class SegmentationExperiment(VisionExperiment):
    """Semantic segmentation with Segmenter, described by a ``SegmentationRecipe``."""

    recipe: SegmentationRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("train_cases", "test_cases")

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

    def check_start(self) -> None:
        for seed in self.recipe.seeds if self.recipe.start_from else ():
            self.prepare(self.build_model(self.recipe, self.facts()), seed)

    def prepare(self, model: Segmenter, seed: int) -> None:
        """Copy the weights and the scale of ``start_from``, or else set the scale of the training images."""
        if self.recipe.start_from:
            load_start(model, self.recipe, seed)
        else:
            train, _ = self.split(seed)
            model.encoder.set_scale(*self._scale(train))

    def task(self, model: Any) -> SegmentationTask:
        return SegmentationTask(model, self.recipe)

    def recorder(self, folder: Path, seed: int) -> RunRecorder:
        return RunRecorder(folder, self.recipe, quality=self.metric.name)

    def evaluate(self, model: Segmenter) -> dict[str, Any]:
        recipe = self.recipe
        figures = self._measure(model, self.test)
        figures |= baseline_figures(self.data.train, self.test, len(self.data.class_names))
        if recipe.severities:
            figures |= corrupted_figures(model, self.test, recipe, len(self.data.class_names))
        return figures

    def evaluate_split(self, model: Segmenter, split: str) -> dict[str, Any]:
        """The figures of the training, validation or test split."""
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
        return segmentation_figures(model, batches, len(self.data.class_names), recipe.precision)


def _sizes(split: SegmentationSplit) -> str:
    """The size of the label maps, or the smallest and the largest."""
    sizes = sorted({(labels.shape[1], labels.shape[0]) for labels in split.labels}, key=lambda s: s[0] * s[1])
    return " to ".join(f"{width} x {height}" for width, height in dict.fromkeys((sizes[0], sizes[-1])))
