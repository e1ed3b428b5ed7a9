"""Classification of token sequences, or of pairs of them: Long Range Arena, sentences, documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, Part, Share, Whole
from kernel_attention.hosts.projections import carry, projections
from kernel_attention.mechanisms import layer_specs
from kernel_attention.models.encoder_layer import EncoderLayer
from kernel_attention.models.language.causal import CausalLanguageModel
from kernel_attention.models.tokens import TokenClassifier, TokenEncoder, TokenPairClassifier
from kernel_attention.series.outputs import collect_outputs
from kernel_attention.series.task import SequenceTask
from kernel_attention_lab.data.splits import hold_out
from kernel_attention_lab.data.texts.documents import read_lines
from kernel_attention_lab.data.texts.vocabulary import UNKNOWN, WordVocabulary, vocabulary_from_state
from kernel_attention_lab.data.tokens.batches import (
    length_order,
    make_length_loader,
    make_step_loader,
)
from kernel_attention_lab.data.tokens.loading import Limits, encode_texts, load_tokens
from kernel_attention_lab.data.tokens.sets import TokenSplit, fit_length, shifted_images
from kernel_attention_lab.robustness import UncertainCases, swap_words
from kernel_attention_lab.robustness.uncertain_texts import uncertain_texts
from kernel_attention_lab.tasks.experiment import Experiment, Loaders, Metric, Trained
from kernel_attention_lab.tasks.metrics import class_rows, classification_metrics
from kernel_attention_lab.tasks.recipe import StepRecipe, require_equal
from kernel_attention_lab.tasks.registry import register_task

_DIAGNOSED_AT_ONCE = 4
_OF_A_LANGUAGE_MODEL = (
    "embed_dim", "num_heads", "num_layers", "feedforward_dim", "experts", "experts_per_token", "positions",
    "norm_first", "short_convolution",
)  # fmt: skip


@dataclass(frozen=True)
class TokenRecipe(StepRecipe):
    """Classification of token sequences, or of pairs of them.

    Args:
        dataset: lra/listops, lra/text, lra/retrieval, lra/image, lra/pathfinder32, listops_100, pathfinder16,
            sst2, sst5 or imdb.
        max_len: largest number of tokens of a sequence; 0 is the data set's own.
        truncate: cut longer sequences instead of refusing them.
        min_count: rarer words of the training text become <unk> (sst2, sst5, imdb).
        max_vocabulary: largest number of words; 0 is all.
        train_cases: number of training cases, evenly spaced; 0 is all. Generated sets are generated in this
            size.
        evaluation_cases: the same for the validation and the test split.
        validation_fraction: fraction of the training split held out where there is no validation split.
        swap_rate: also measure the test split with this fraction of its words swapped (sst2, sst5, imdb); 0
            does not.
        swap_seed: seed of the swap.
        shift: shift the rows and the columns of every image cyclically, by numbers drawn for it alone
            (lra/image, lra/pathfinder32, pathfinder16).
        experts: networks of a sparse mixture in place of each feed-forward network; 0: no mixture.
        experts_per_token: networks of the mixture that read a token.
        is_causal: whether a token reads only those up to it, as in a language model.
        start_from: run folder of a language model on words, whose weights the classifier starts with: those
            of the same seed where the run has it, else of its first. Empty: trained from the beginning.

    The other keys are those of ``StepRecipe``.
    """

    task_name: ClassVar[str] = "tokens"

    attention: Any = "softmax"
    norm_first: bool = True
    max_len: Whole = 0
    truncate: bool = False
    min_count: Count = 1
    max_vocabulary: Whole = 0
    train_cases: Whole = 0
    evaluation_cases: Whole = 0
    validation_fraction: Part = 0.1
    swap_rate: Share = 0.0
    swap_seed: Whole = 0
    shift: bool = False
    experts: Whole = 0
    experts_per_token: Count = 2
    is_causal: bool = False
    start_from: str = ""

    def encoder_options(self) -> dict[str, Any]:
        """Also the mixture of experts."""
        return super().encoder_options() | {
            "experts": self.experts,
            "experts_per_token": self.experts_per_token,
        }


@register_task(TokenRecipe)
class TokenExperiment(Experiment):
    """Classification of token sequences, or of pairs of them, described by a ``TokenRecipe``."""

    recipe: TokenRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("vocabulary_size", "max_len", "parts")
    has_classes: ClassVar[bool] = True
    divides_sequences: ClassVar[bool] = True
    starts_with: ClassVar[str] = "language"

    def __init__(self, recipe: TokenRecipe, data_root: str | Path | None = None) -> None:
        super().__init__(recipe, data_root)
        limits = Limits(recipe.train_cases, recipe.evaluation_cases, recipe.min_count, recipe.max_vocabulary)
        loaded = load_tokens(recipe.dataset, data_root, limits)
        self.data = loaded.data.fitted(recipe.max_len, recipe.truncate)
        if recipe.shift:
            self.data = shifted_images(self.data)
        self.test_texts = loaded.test_texts
        if recipe.swap_rate and self.test_texts is None:
            raise InputError(
                f"swap_rate={recipe.swap_rate}: dataset {recipe.dataset} has no words (accepted: 0)"
            )

    @staticmethod
    def build_model(recipe: TokenRecipe, facts: dict[str, Any]) -> TokenClassifier:
        kind = TokenPairClassifier if facts["parts"] == 2 else TokenClassifier
        shape = (facts["vocabulary_size"], len(facts["class_names"]), facts["max_len"])
        return kind(*shape, is_causal=recipe.is_causal, **recipe.encoder_options())

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", True)

    def facts(self) -> dict[str, Any]:
        data = self.data
        return {
            "dataset": data.name,
            "task": "classification",
            "vocabulary_size": data.vocabulary_size,
            "max_len": data.max_len,
            "parts": data.train.parts,
            "class_names": list(data.class_names),
            "train_cases": len(data.train),
            "test_cases": len(data.test),
            "vocabulary": data.vocabulary,
        }

    def loaders(self, seed: int) -> Loaders:
        recipe = self.recipe
        train, val = self._split(seed)
        batches = make_step_loader(train, recipe.effective_batch, recipe.steps_per_round, seed)
        return batches, make_length_loader(val, recipe.effective_batch)

    def start(self, model: TokenClassifier, trained: Trained) -> None:
        """Give the encoder the weights of a language model: embeddings, positions, layers and final norm.

        A word that the language model does not know starts with the embedding of its ``<unk>``. So a causal
        encoder with the same mechanisms computes at first what the language model does. A layer with another
        mechanism has its projections from there, as ``kernel_attention.replace_attention`` carries them over.
        The final norm of a post-norm encoder is new, because such a language model has none.
        """
        recipe, vocabulary = self.recipe, self.data.vocabulary
        require_equal(trained.recipe, recipe, _OF_A_LANGUAGE_MODEL)
        theirs = vocabulary_from_state(trained.facts.get("vocabulary_state"))
        ours = None if vocabulary is None else vocabulary_from_state(vocabulary)
        if not (isinstance(theirs, WordVocabulary) and isinstance(ours, WordVocabulary)):
            raise InputError(
                f"its vocabulary is of kind {theirs.kind}, that of dataset {recipe.dataset} is "
                f"{'none' if ours is None else ours.kind} (accepted: word and word)"
            )
        _copy_input(model.encoder, trained.model, ours, theirs)
        specs = [layer_specs(each.attention, each.num_layers) for each in (trained.recipe, recipe)]
        for number, (old, new) in enumerate(zip(*specs, strict=True)):
            _copy_layer(model.encoder.layers[number], trained.model.layers[number], is_same=old == new)
        if not isinstance(trained.model.norm, nn.Identity):
            model.encoder.norm.load_state_dict(trained.model.norm.state_dict())

    def task(self, model: Any) -> SequenceTask:
        return SequenceTask(model, self.recipe.train_settings(), schedule=self.recipe.learning_rate_factor)

    def evaluate(self, model: TokenClassifier) -> dict[str, Any]:
        metrics = self._measure(model, self.data.test)
        if self.recipe.swap_rate:
            swapped = self._measure(model, self.swapped_test())
            metrics["swap_rate"] = self.recipe.swap_rate
            metrics |= {f"swapped_{name}": swapped[name] for name in ("accuracy", "loss")}
        return metrics

    def swapped_test(self) -> TokenSplit:
        """The test split with words swapped for a generic one; each case has its own generator."""
        assert self.test_texts is not None
        recipe = self.recipe
        texts = [
            swap_words(text, recipe.swap_rate, recipe.swap_seed + case)
            for case, text in enumerate(self.test_texts)
        ]
        vocabulary = vocabulary_from_state(self.data.vocabulary)
        # A swap can change the number of tokens: "do n't" is two words and becomes two generic words, but
        # "well-made" is one word and three tokens.
        return fit_length(
            encode_texts(texts, self.data.test.targets, vocabulary),
            self.data.max_len,
            True,
            "swapped test split",
        )

    def uncertain_cases(self, seed: int, cases: int | None = None) -> tuple[UncertainCases, dict[str, str]]:
        """``uncertain_texts`` of the test split; what chose the weights of ``seed`` chooses the temperature.

        Raises:
            InputError: for a data set without words.
        """
        if self.test_texts is None:
            raise InputError(f"dataset {self.data.name} has no words (accepted: sst2, sst5, imdb)")
        vocabulary = vocabulary_from_state(self.data.vocabulary)

        def encode(texts: Sequence[str], targets: np.ndarray) -> TokenSplit:
            return fit_length(encode_texts(texts, targets, vocabulary), self.data.max_len, True, "texts")

        return uncertain_texts(
            self.test_texts, self.data.test.targets, encode,
            None if self.recipe.protocol == "paper" else self._split(seed)[1],
            cases=cases, data_root=self.data_root,
        )  # fmt: skip

    def check(self) -> None:
        self.check_model()
        self._split(self.recipe.seeds[0])

    def batches(self, cases: int) -> Iterable[tuple[Tensor, Tensor]]:
        loader = make_length_loader(self.data.test.evenly(cases), _DIAGNOSED_AT_ONCE)
        return [(batch.x, batch.attention_mask) for batch in loader]

    @staticmethod
    def predict(
        model: TokenClassifier, file: Path, recipe: TokenRecipe, facts: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """One record per line of a text file; only for models of text."""
        if facts.get("vocabulary") is None or facts["parts"] != 1:
            raise InputError(f"dataset {recipe.dataset}: predictions of a file need a model of single texts")
        texts = [text for _, text in read_lines(file)]
        split = encode_texts(texts, [0] * len(texts), vocabulary_from_state(facts["vocabulary"]))
        split = fit_length(split, facts["max_len"], recipe.truncate, f"file {file}")
        chances = predict_logits(model, split, recipe).softmax(dim=-1)
        return class_rows(chances, facts["class_names"])

    def _split(self, seed: int) -> tuple[TokenSplit, TokenSplit]:
        """(training cases, cases that select the weights) under the recipe's protocol."""
        data, recipe = self.data, self.recipe
        if recipe.protocol == "paper":
            return data.train, data.test
        if data.validation is not None:
            return data.train, data.validation
        rest, held_out = hold_out(data.train, recipe.validation_fraction, seed)
        return rest, held_out.evenly(recipe.evaluation_cases)

    def _measure(self, model: TokenClassifier, split: TokenSplit) -> dict[str, Any]:
        return classification_metrics(predict_logits(model, split, self.recipe), split.targets)


def predict_logits(model: TokenClassifier, split: TokenSplit, recipe: TokenRecipe) -> Tensor:
    """The logits of every case in order, (n, classes); see ``collect_outputs``."""
    by_length = collect_outputs(model, make_length_loader(split, recipe.batch_size), recipe.precision)
    logits = torch.empty_like(by_length)
    logits[torch.from_numpy(length_order(split))] = by_length
    return logits


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
