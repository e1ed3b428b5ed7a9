"""The weights that a segmentation starts with: those of a trained classifier of images."""

from __future__ import annotations

from kernel_attention.errors import InputError
from kernel_attention.experiments.training.image_recipe import ImageRecipe
from kernel_attention.experiments.training.saved import load_run
from kernel_attention.experiments.training.segmentation_recipe import SegmentationRecipe
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
    where = f"start_from={recipe.start_from!r}"
    try:
        run = load_run(recipe.start_from)
        if not isinstance(run.recipe, ImageRecipe):
            raise InputError(f"it is of task {run.recipe.task_name} (accepted: images)")
        _check_alike(run.recipe, recipe)
        classifier = run.model(seed if seed in run.seeds else None)
        assert isinstance(classifier, VisionTransformer)
        state = classifier.resized(model.encoder.image_size).state_dict()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    kept = {name: value for name, value in model.encoder.state_dict().items() if name.startswith("head.")}
    model.encoder.load_state_dict(state | kept)


def _check_alike(trained: ImageRecipe, recipe: SegmentationRecipe) -> None:
    different = [key for key in _SHARED if getattr(trained, key) != getattr(recipe, key)]
    if not different:
        layers = [layer_specs(each.attention, each.num_layers) for each in (trained, recipe)]
        different = ["attention"] if layers[0] != layers[1] else []
    if different:
        said = (
            f"{key} is {getattr(trained, key)} there and {getattr(recipe, key)} here" for key in different
        )
        raise InputError(f"{', '.join(said)}; both must be equal")
