"""The weights that a segmentation starts with: those of a trained classifier of images."""

from __future__ import annotations

from kernel_attention.experiments.training.image_recipe import ImageRecipe
from kernel_attention.experiments.training.segmentation_recipe import SegmentationRecipe
from kernel_attention.experiments.training.start import opened_start, require_alike, start_model
from kernel_attention.mechanisms import layer_specs
from kernel_attention.models.segmenter import Segmenter
from kernel_attention.models.vision import VisionTransformer

_SHARED = (
    "patch_size",
    "embed_dim",
    "num_heads",
    "num_layers",
    "feedforward_dim",
    "channel_attention",
    "pooling",
)


def load_start(model: Segmenter, recipe: SegmentationRecipe, seed: int) -> None:
    """Give the encoder the weights and the scale of a classifier, all but the head.

    The positions are interpolated to the grid of the encoder (bicubic, as in the paper).

    Args:
        model: of the recipe.
        recipe: its ``start_from`` is the run folder of the classifier.
        seed: of the classifier, where the run has it; else the run's first.

    Raises:
        InputError: for a folder that is no run of task images with a trained seed, and for a classifier that
            differs from the encoder.
    """
    with opened_start(recipe.start_from, ImageRecipe) as run:
        require_alike(run.recipe, recipe, _SHARED)
        if layer_specs(run.recipe.attention, run.recipe.num_layers) != layer_specs(
            recipe.attention, recipe.num_layers
        ):
            require_alike(run.recipe, recipe, ("attention",))
        classifier = start_model(run, seed)
        assert isinstance(classifier, VisionTransformer)
        state = classifier.resized(model.encoder.image_size).state_dict()
    kept = {name: value for name, value in model.encoder.state_dict().items() if name.startswith("head.")}
    model.encoder.load_state_dict(state | kept)
