"""Classification of token sequences: the data, the model, the figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.models.tokens import TokenClassifier, TokenPairClassifier
from kernel_attention.series.outputs import collect_outputs
from kernel_attention.series.task import SequenceTask
from kernel_attention_lab.data.splits import hold_out
from kernel_attention_lab.data.texts.documents import read_lines
from kernel_attention_lab.data.texts.vocabulary import vocabulary_from_state
from kernel_attention_lab.data.tokens.batches import (
    length_order,
    make_length_loader,
    make_step_loader,
)
from kernel_attention_lab.data.tokens.loading import Limits, encode_texts, load_tokens
from kernel_attention_lab.data.tokens.sets import TokenSplit, fit_length
from kernel_attention_lab.robustness import swap_words
from kernel_attention_lab.training.evaluation import classification_figures
from kernel_attention_lab.training.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.training.start import load_language_model
from kernel_attention_lab.training.step_recorder import StepRecorder
from kernel_attention_lab.training.token_recipe import TokenRecipe

_DIAGNOSED_AT_ONCE = 4


class TokenExperiment(Experiment):
    """Classification of token sequences, or of pairs of them, described by a ``TokenRecipe``."""

    recipe: TokenRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("vocabulary_size", "max_len", "parts")
    has_classes: ClassVar[bool] = True
    divides_sequences: ClassVar[bool] = True

    def __init__(self, recipe: TokenRecipe, data_root: str | Path | None = None) -> None:
        super().__init__(recipe, data_root)
        limits = Limits(recipe.train_cases, recipe.evaluation_cases, recipe.min_count, recipe.max_vocabulary)
        loaded = load_tokens(recipe.dataset, data_root, limits)
        self.data = loaded.data.fitted(recipe.max_len, recipe.truncate)
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

    def check_start(self) -> None:
        for seed in self.recipe.seeds if self.recipe.start_from else ():
            self.prepare(self.build_model(self.recipe, self.facts()), seed)

    def prepare(self, model: TokenClassifier, seed: int) -> None:
        """Copy the weights of ``start_from``, where the recipe names it."""
        if self.recipe.start_from:
            load_language_model(model, self.recipe, self.data.vocabulary, seed)

    def task(self, model: Any) -> SequenceTask:
        return SequenceTask(model, self.recipe.train_settings(), schedule=self.recipe.learning_rate_factor)

    def recorder(self, folder: Path, seed: int) -> StepRecorder:
        return StepRecorder(folder, self.recipe)

    def evaluate(self, model: TokenClassifier) -> dict[str, Any]:
        figures = self._measure(model, self.data.test)
        if self.recipe.swap_rate:
            swapped = self._measure(model, self.swapped_test())
            figures["swap_rate"] = self.recipe.swap_rate
            figures |= {f"swapped_{name}": swapped[name] for name in ("accuracy", "loss")}
        return figures

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
        names = facts["class_names"]
        rows = predict_logits(model, split, recipe.batch_size, recipe.precision).softmax(dim=-1).tolist()
        return [
            {"case": case, "prediction": names[int(np.argmax(row))]}
            | {f"probability_{name}": value for name, value in zip(names, row, strict=True)}
            for case, row in enumerate(rows)
        ]

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
        recipe = self.recipe
        return measure_split(model, split, recipe.batch_size, recipe.precision)


def predict_logits(model: TokenClassifier, split: TokenSplit, batch_size: int, precision: str) -> Tensor:
    """The logits of every case in order, (n, classes); see ``collect_outputs``."""
    by_length = collect_outputs(model, make_length_loader(split, batch_size), precision)
    logits = torch.empty_like(by_length)
    logits[torch.from_numpy(length_order(split))] = by_length
    return logits


def measure_split(
    model: TokenClassifier, split: TokenSplit, batch_size: int, precision: str
) -> dict[str, Any]:
    """Accuracy, loss and the confusion matrix (rows: true classes) of a split."""
    return classification_figures(predict_logits(model, split, batch_size, precision), split.targets)
