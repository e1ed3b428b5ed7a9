"""The trained run that a training starts from, as the key ``start_from`` of a recipe names it.

A segmentation starts with the weights of a classifier of images, a classifier of sentences with those of a
causal language model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.hosts.projections import carry, projections
from kernel_attention.mechanisms import layer_specs
from kernel_attention.models import CausalLanguageModel
from kernel_attention.models.encoder_layer import EncoderLayer
from kernel_attention.models.segmenter import Segmenter
from kernel_attention.models.tokens import TokenClassifier, TokenEncoder
from kernel_attention.models.vision import VisionTransformer
from kernel_attention_lab.data.texts.vocabulary import UNKNOWN, WordVocabulary, vocabulary_from_state
from kernel_attention_lab.training.image_recipe import ImageRecipe
from kernel_attention_lab.training.language_recipe import LanguageRecipe
from kernel_attention_lab.training.recipe import BaseRecipe
from kernel_attention_lab.training.saved import SavedRun, load_run
from kernel_attention_lab.training.segmentation_recipe import SegmentationRecipe
from kernel_attention_lab.training.token_recipe import TokenRecipe

_OF_A_CLASSIFIER = (
    "patch_size", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "channel_attention", "pooling",
)  # fmt: skip
_OF_A_LANGUAGE_MODEL = (
    "embed_dim", "num_heads", "num_layers", "feedforward_dim", "experts", "experts_per_token", "positions",
    "norm_first",
)  # fmt: skip


@contextmanager
def opened_start(start_from: str, kind: type[BaseRecipe]) -> Iterator[SavedRun]:
    """The run in this folder, which must be of a task. Every InputError inside begins with the folder.

    Raises:
        InputError: for a folder that is no run of this task.
    """
    try:
        run = load_run(start_from)
        if not isinstance(run.recipe, kind):
            raise InputError(f"it is of task {run.recipe.task_name} (accepted: {kind.task_name})")
        yield run
    except InputError as error:
        raise InputError(f"start_from={start_from!r}: {error}") from None


def start_model(run: SavedRun, seed: int) -> Any:
    """The model of this seed where the run has it, else that of its first seed."""
    return run.model(seed if seed in run.seeds else None)


def require_alike(trained: BaseRecipe, recipe: BaseRecipe, keys: Sequence[str]) -> None:
    """InputError where two recipes differ in one of these keys."""
    different = [key for key in keys if getattr(trained, key) != getattr(recipe, key)]
    if different:
        said = (
            f"{key} is {getattr(trained, key)} there and {getattr(recipe, key)} here" for key in different
        )
        raise InputError(f"{', '.join(said)}; both must be equal")


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
        require_alike(run.recipe, recipe, _OF_A_CLASSIFIER)
        if layer_specs(run.recipe.attention, run.recipe.num_layers) != layer_specs(
            recipe.attention, recipe.num_layers
        ):
            require_alike(run.recipe, recipe, ("attention",))
        classifier = start_model(run, seed)
        assert isinstance(classifier, VisionTransformer)
        state = classifier.resized(model.encoder.image_size).state_dict()
    kept = {name: value for name, value in model.encoder.state_dict().items() if name.startswith("head.")}
    model.encoder.load_state_dict(state | kept)


def load_language_model(
    model: TokenClassifier, recipe: TokenRecipe, vocabulary: dict[str, Any] | None, seed: int
) -> None:
    """Give the encoder the weights of a language model: embeddings, positions, layers and final norm.

    A word that the language model does not know starts with the embedding of its ``<unk>``. So a causal
    encoder with the same mechanisms computes at first what the language model does. A layer with another
    mechanism has its projections from there, as ``kernel_attention.replace_attention`` carries them over. The
    final norm of a post-norm encoder is new, because such a language model has none.

    Args:
        model: of the recipe.
        recipe: its ``start_from`` is the run folder of the language model.
        vocabulary: of the classifier, in the form of ``Vocabulary.state``.
        seed: of the language model, where the run has it; else the run's first.

    Raises:
        InputError: for data without words, for a folder that is no run of task language on words with a
            trained seed, and for a language model that differs from the encoder or is too short.
    """
    with opened_start(recipe.start_from, LanguageRecipe) as run:
        require_alike(run.recipe, recipe, _OF_A_LANGUAGE_MODEL)
        theirs = vocabulary_from_state(run.facts.get("vocabulary_state"))
        ours = None if vocabulary is None else vocabulary_from_state(vocabulary)
        if not (isinstance(theirs, WordVocabulary) and isinstance(ours, WordVocabulary)):
            raise InputError(
                f"its vocabulary is of kind {theirs.kind}, that of dataset {recipe.dataset} is "
                f"{'none' if ours is None else ours.kind} (accepted: word and word)"
            )
        trained = start_model(run, seed)
        assert isinstance(trained, CausalLanguageModel)
        _copy_input(model.encoder, trained, ours, theirs)
        specs = [layer_specs(each.attention, each.num_layers) for each in (run.recipe, recipe)]
        for number, (old, new) in enumerate(zip(*specs, strict=True)):
            _copy_layer(model.encoder.layers[number], trained.layers[number], is_same=old == new)
        if not isinstance(trained.norm, nn.Identity):
            model.encoder.norm.load_state_dict(trained.norm.state_dict())


@torch.no_grad()
def _copy_input(
    encoder: TokenEncoder, trained: CausalLanguageModel, ours: WordVocabulary, theirs: WordVocabulary
) -> None:
    if trained.max_len < encoder.max_len:
        raise InputError(
            f"it reads at most {trained.max_len} tokens, the sequences here have up to {encoder.max_len} "
            f"(accepted: max_len={trained.max_len} with truncate=true)"
        )
    numbers = {word: number for number, word in enumerate(theirs.words)}
    rows = torch.tensor([numbers.get(word, numbers[UNKNOWN]) for word in ours.words])
    # The encoder multiplies its embeddings by sqrt(d), the language model does not.
    encoder.embed.weight.copy_(trained.embedding.weight[rows] / math.sqrt(encoder.embed_dim))
    encoder.positions.copy_(trained.positions[: encoder.max_len])


def _copy_layer(layer: nn.Module, trained: nn.Module, *, is_same: bool) -> None:
    """Copy a layer's weights; of its attention all where the mechanism is the same, else the projections."""
    assert isinstance(layer, EncoderLayer)
    assert isinstance(trained, EncoderLayer)
    state = trained.state_dict()
    if not is_same:
        carry(layer.attention, dict(projections(trained.attention, trained)))
        own = layer.state_dict()
        state = {name: own[name] if name.startswith("attention.") else state[name] for name in own}
    try:
        layer.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"its layers do not fit ({reason})") from None
