"""Learning from images, and their classification: the data, the model, the figures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kernel_attention.analysis import capture
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.models.vision import VisionTransformer
from kernel_attention.series.outputs import collect_outputs
from kernel_attention_lab.data.images.batches import central, make_image_loader
from kernel_attention_lab.data.images.sets import ImageSplit, load_images
from kernel_attention_lab.data.splits import hold_out
from kernel_attention_lab.training.evaluation import classification_figures
from kernel_attention_lab.training.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.training.image_prediction import labelled_images, predict_images
from kernel_attention_lab.training.image_recipe import ImageRecipe, VisionRecipe
from kernel_attention_lab.training.image_task import ImageTask

_DIAGNOSED_AT_ONCE = 8
_AT_ONCE = 4096  # images whose statistics are taken at a time
EXAMPLES = 12


class VisionExperiment(Experiment):
    """Learning from images, described by a ``VisionRecipe``.

    A subclass sets ``data``, with the splits ``train``, ``validation`` (or None) and ``test``, and ``test``,
    the test cases that are evaluated.
    """

    recipe: VisionRecipe
    has_classes: ClassVar[bool] = True
    data: Any
    test: Any

    @staticmethod
    @abstractmethod
    def hold_out(split: Any, fraction: float, seed: int) -> tuple[Any, Any]:
        """(the rest, about ``fraction`` of the cases), a function of ``seed``."""

    def split(self, seed: int) -> tuple[Any, Any]:
        """(training cases, cases that select the weights) under the recipe's protocol."""
        recipe, data = self.recipe, self.data
        if recipe.protocol == "paper":
            return data.train.evenly(recipe.train_cases), self.test
        if data.validation is not None:
            train, held_out = data.train, data.validation
        else:
            train, held_out = self.hold_out(data.train, recipe.validation_fraction, seed)
        return train.evenly(recipe.train_cases), held_out.evenly(recipe.evaluation_cases)


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
        return self._measure(model, self.test)

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
        """The figures of class folders; ``subset_accuracy`` chooses among the classes that occur in them."""
        found = labelled_images(file, recipe, facts)
        logits = image_logits(model, found.split, recipe.batch_size, recipe.precision)
        figures = image_figures(logits, found.split.targets)
        if len(found.classes) < logits.size(-1):
            best = found.classes[logits[:, found.classes].argmax(dim=-1).numpy()]
            figures["subset_accuracy"] = float((best == found.split.targets).mean())
        return figures

    @staticmethod
    def predict(
        model: VisionTransformer, file: Path, recipe: ImageRecipe, facts: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """One record per image of a file, a folder or an archive."""
        return predict_images(model, file, recipe, facts)

    def batches(self, cases: int) -> Iterable[tuple[Tensor]]:
        loader = make_image_loader(self.data.test.evenly(cases), _DIAGNOSED_AT_ONCE, size=self.size)
        return [batch.arguments for batch in loader]

    def _measure(self, model: VisionTransformer, split: ImageSplit) -> dict[str, Any]:
        logits = image_logits(model, split, self.recipe.batch_size, self.recipe.precision)
        return image_figures(logits, split.targets)


def image_figures(logits: Tensor, targets: np.ndarray) -> dict[str, Any]:
    """The figures of ``classification_figures``; with more than 5 classes the top-5 accuracy too."""
    figures = classification_figures(logits, targets)
    if logits.size(-1) > 5:
        best = logits.topk(5).indices.numpy()
        figures["top5_accuracy"] = float((best == targets[:, None]).any(axis=1).mean())
    return figures


def image_logits(model: VisionTransformer, split: ImageSplit, batch_size: int, precision: str) -> Tensor:
    """The logits of every image in order, (n, classes); see ``collect_outputs``."""
    return collect_outputs(model, make_image_loader(split, batch_size), precision)


def channel_statistics(images: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel of images (n, H, W, C), of values in [0, 1]: (C,) each."""
    sums = np.zeros((2, images.shape[-1]))
    for start in range(0, len(images), _AT_ONCE):
        pixels = images[start : start + _AT_ONCE].reshape(-1, images.shape[-1]) / np.float32(255)
        sums += [pixels.sum(axis=0, dtype=np.float64), (pixels * pixels).sum(axis=0, dtype=np.float64)]
    mean, square = sums / (images.size / images.shape[-1])
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    # A constant channel keeps its values.
    return torch.from_numpy(mean), torch.from_numpy(np.where(deviation > 0, deviation, 1.0))


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
