"""The recipe of a semantic segmentation with Segmenter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kernel_attention.errors import InputError
from kernel_attention.fields import DIFFERENT, Count, NonNegative, Positive, Probability, Whole
from kernel_attention_lab.training.image_recipe import VisionRecipe

_POWER = 0.9


@dataclass(frozen=True)
class SegmentationRecipe(VisionRecipe):
    """Semantic segmentation with a linear decoder; by default as Segmenter on ADE20K (Strudel et al. 2021).

    The learning rate falls from ``learning_rate`` to ``min_learning_rate`` with the power 0.9 of the share of
    steps that are left.

    Args:
        dataset: camvid240, or another set of images with label maps under the data root, or a folder or an
            archive.
        optimizer: sgd (with momentum 0.9), radam, adam or adamw.
        image_size: length of the short side that every image is resized to; 0 resizes none. Figures are those
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
