"""Causal language models, and their perplexity, clean and under the word swap."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.analysis.ngrams import Bigrams, uniform_perplexity, unigram_perplexity
from kernel_attention.analysis.perplexity import Perplexity, perplexity
from kernel_attention.errors import InputError, unknown
from kernel_attention.fields import Count, Share, Whole
from kernel_attention.models import CausalLanguageModel, generate
from kernel_attention.training.task import SameLossTask
from kernel_attention_lab.data.splits import SPLITS
from kernel_attention_lab.data.texts.contexts import TextBatch, ordered_contexts, training_contexts
from kernel_attention_lab.data.texts.text import IGNORED, load_text, read_text
from kernel_attention_lab.data.texts.vocabulary import (
    Vocabulary,
    build_vocabulary,
    require_same_vocabulary,
    vocabulary_from_state,
)
from kernel_attention_lab.robustness import swap_words
from kernel_attention_lab.tasks.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.tasks.recipe import StepRecipe
from kernel_attention_lab.tasks.registry import register_task

_DIAGNOSED_AT_ONCE = 8
_EVALUATION_BATCH = 32  # windows at once; the logits of a large vocabulary take most of the memory


@dataclass(frozen=True)
class LanguageRecipe(StepRecipe):
    """A causal language model on a text with three splits.

    Args:
        dataset: a folder of text files, a folder of Hugging Face's datasets, a text file, or its name under
            the data root.
        vocabulary: word, byte or bpe.
        min_count: rarer words of the training text become <unk>.
        max_vocabulary: largest number of words or byte pairs; 0 is all words, or 8192 byte pairs.
        context: tokens the model reads in training and evaluation.
        max_len: longest text the model can take; 0 is ``context``.
        tied: use one matrix for embedding and logits.
        experts: networks of a sparse mixture in place of each feed-forward network; 0: no mixture.
        experts_per_token: networks of the mixture that read a token.
        stride: tokens by which the evaluation window moves; 0 is ``context``, 1 as in the kernel-PCA paper.
        evaluation_tokens: number of tokens to evaluate, from the first of a split; 0 is all.
        swap_rate: fraction of the words that the word-swap attack replaces; 0 leaves the attack out.
        swap_seed: seed of the attack.

    The other keys are those of ``StepRecipe``.
    """

    task_name: ClassVar[str] = "language"

    attention: Any = "softmax"
    norm_first: bool = True
    positions: Literal["learnt", "fixed"] = "learnt"
    vocabulary: Literal["word", "byte", "bpe"] = "word"
    min_count: Count = 1
    max_vocabulary: Whole = 0
    context: Count = 128
    max_len: Whole = 0
    tied: bool = True
    experts: Whole = 0
    experts_per_token: Count = 2
    stride: Whole = 0
    evaluation_tokens: Whole = 0
    swap_rate: Share = 0.1
    swap_seed: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_len and self.context > self.max_len:
            raise InputError(f"context={self.context} exceeds max_len={self.max_len}")
        if self.stride > self.context:
            raise InputError(
                f"stride={self.stride} exceeds context={self.context}: tokens between windows would be lost"
            )
        if self.evaluation_tokens == 1:
            raise InputError("evaluation_tokens=1 must be at least 2 (0: all)")
        if self.protocol != "holdout":
            raise InputError(f"protocol={self.protocol!r}: a text has a validation split, use holdout")

    @property
    def protocol_text(self) -> str:
        return "the best step is chosen on the validation split; the test split is read once, at the end"

    def encoder_options(self) -> dict[str, Any]:
        """Also the mixture of experts."""
        return super().encoder_options() | {
            "experts": self.experts,
            "experts_per_token": self.experts_per_token,
        }

    def model_options(self) -> dict[str, Any]:
        """The keys that ``kernel_attention.models.CausalLanguageModel`` takes."""
        return self.encoder_options() | {"max_len": self.max_len or self.context, "tied": self.tied}


class LanguageTask(SameLossTask):
    """The cross-entropy of the next token, in nats. It logs ``train_loss``, ``val_loss`` and each J."""

    def weight(self, batch: TextBatch) -> int:
        """The predicted tokens."""
        return int((batch.targets != IGNORED).sum())

    def _log_step(self, stage: str, batch: TextBatch) -> Tensor:
        assert isinstance(self.model, CausalLanguageModel)
        loss = self.model.loss(batch.inputs, batch.targets, IGNORED)
        self.log(f"{stage}_loss", loss.detach(), self.weight(batch))
        return loss


@register_task(LanguageRecipe)
class LanguageExperiment(Experiment):
    """A causal language model on a text, described by a ``LanguageRecipe``."""

    recipe: LanguageRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("vocabulary_size",)

    def __init__(self, recipe: LanguageRecipe, data_root: str | Path | None = None) -> None:
        super().__init__(recipe, data_root)
        self.text = load_text(recipe.dataset, data_root)
        self.vocabulary = build_vocabulary(
            recipe.vocabulary,
            self.text.train,
            min_count=recipe.min_count,
            max_size=recipe.max_vocabulary or None,
        )
        self.tokens = {split: self.vocabulary.encode(self.text.split(split)) for split in SPLITS}

    @staticmethod
    def build_model(recipe: LanguageRecipe, facts: dict[str, Any]) -> CausalLanguageModel:
        return CausalLanguageModel(facts["vocabulary_size"], **recipe.model_options())

    @classmethod
    def check_facts(cls, facts: Any, path: Path) -> None:
        super().check_facts(facts, path)
        described = facts.get("vocabulary")
        try:
            require_same_vocabulary(
                read_vocabulary(facts).describe(), described if isinstance(described, dict) else {}
            )
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @property
    def metric(self) -> Metric:
        return Metric("perplexity", False)

    @property
    def selection_metric(self) -> Metric:
        return Metric("val_loss", False)  # its logarithm

    def facts(self) -> dict[str, Any]:
        return {
            "dataset": self.text.name,
            "task": "language",
            "vocabulary_size": self.vocabulary.size,
            "vocabulary": self.vocabulary.describe(),
            **{f"{split}_tokens": len(self.tokens[split]) for split in SPLITS},
            "vocabulary_state": self.vocabulary.state(),
        }

    def loaders(self, seed: int) -> Loaders:
        recipe, tokens = self.recipe, self.tokens
        train = training_contexts(
            tokens["train"], recipe.context, recipe.effective_batch, recipe.steps_per_round, seed
        )
        return train, ordered_contexts(tokens["validation"], recipe.context, recipe.effective_batch)

    def batches(self, cases: int) -> list[tuple[Tensor]]:
        """Evenly spaced windows of ``context`` tokens of the test split."""
        text = self.tokens["test"]
        length = min(self.recipe.context, len(text))
        starts = np.linspace(0, len(text) - length, min(cases, len(text) - length + 1)).round().astype(int)
        windows = torch.stack([torch.from_numpy(text[start : start + length]) for start in starts])
        return [(part,) for part in windows.split(_DIAGNOSED_AT_ONCE)]

    def task(self, model: nn.Module) -> LanguageTask:
        return LanguageTask(model, self.recipe.train_settings(), self.recipe.learning_rate_factor)

    @functools.cached_property
    def bigrams(self) -> Bigrams:
        """The bigram counts of the training text."""
        return Bigrams(self.tokens["train"], self.vocabulary.size)

    def evaluate(self, model: CausalLanguageModel) -> dict[str, Any]:
        """The metrics of the test split, and those of the validation split prefixed ``validation_``."""
        test, validation = (self.evaluate_split(model, split) for split in ("test", "validation"))
        shared = ("context", "stride", "swap_rate", "uniform_perplexity", "bigram_k")
        return test | {f"validation_{key}": validation[key] for key in validation if key not in shared}

    def evaluate_split(self, model: CausalLanguageModel, split: str) -> dict[str, Any]:
        """The perplexities of one split: of the model, clean and attacked, and of counts."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        metrics = text_metrics(model, self.text.split(split), self.vocabulary, self.recipe)
        text, train, size = self.tokens[split], self.tokens["train"], self.vocabulary.size
        text = text[: self.recipe.evaluation_tokens or None]
        k = self.bigrams.choose_smoothing(self.tokens["validation"])
        return metrics | {
            "uniform_perplexity": uniform_perplexity(size),
            "unigram_perplexity": unigram_perplexity(train, text, size),
            "bigram_perplexity": self.bigrams.perplexity(text, k),
            "bigram_k": k,
        }

    @staticmethod
    def evaluate_file(model: Any, file: Path, recipe: Any, facts: dict[str, Any]) -> dict[str, Any]:
        return text_metrics(model, read_text(file), read_vocabulary(facts), recipe)

    @staticmethod
    def generate(
        model: CausalLanguageModel,
        prompt: str,
        recipe: LanguageRecipe,
        facts: dict[str, Any],
        *,
        tokens: int = 50,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        vocabulary = read_vocabulary(facts)
        read = torch.from_numpy(vocabulary.encode(prompt))
        if not len(read):
            raise InputError(f"prompt={prompt!r} has no token to begin with")
        generator = torch.Generator().manual_seed(seed)
        follow = generate(
            model, read[None], tokens, temperature=temperature, top_k=top_k, generator=generator
        )
        return vocabulary.decode([*read.tolist(), *(int(token) for token in follow)])


def read_vocabulary(facts: dict[str, Any]) -> Vocabulary:
    """The vocabulary in the facts of a run."""
    return vocabulary_from_state(facts.get("vocabulary_state"))


def text_metrics(
    model: CausalLanguageModel, text: str, vocabulary: Vocabulary, recipe: LanguageRecipe
) -> dict[str, Any]:
    """Perplexity of a text, clean and attacked.

    ``attacked_perplexity`` is that of the attacked text, where swapped words are predicted too, as in the
    kernel-PCA paper. ``attacked_inputs_perplexity`` predicts the clean words from the attacked ones; it
    exists where tokens are words, so that the two texts have the same number of them.
    """
    if vocabulary.size != model.vocabulary_size:
        raise InputError(
            f"tokenizer mismatch: the vocabulary has {vocabulary.size} tokens, the model "
            f"{model.vocabulary_size}"
        )
    clean = _encoded(text, vocabulary, recipe)
    result = _measure(model, clean, recipe)
    metrics: dict[str, Any] = {
        "perplexity": result.perplexity,
        "loss": result.loss,
        "tokens": result.tokens,
        "context": recipe.context,
        "stride": recipe.stride or recipe.context,
    }
    if not recipe.swap_rate:
        return metrics
    attacked = _encoded(swap_words(text, recipe.swap_rate, recipe.swap_seed), vocabulary, recipe)
    metrics["swap_rate"] = recipe.swap_rate
    metrics["attacked_perplexity"] = _measure(model, attacked, recipe).perplexity
    if vocabulary.kind == "word":
        against = _measure(model, attacked, recipe, torch.from_numpy(clean[1:]))
        metrics["attacked_inputs_perplexity"] = against.perplexity
    return metrics


def _encoded(text: str, vocabulary: Vocabulary, recipe: LanguageRecipe) -> np.ndarray:
    tokens = vocabulary.encode(text)
    if len(tokens) < 2:
        raise InputError(f"text of {len(tokens)} tokens: at least 2 are needed to predict one")
    return tokens[: recipe.evaluation_tokens or None]


def _measure(
    model: CausalLanguageModel, tokens: np.ndarray, recipe: LanguageRecipe, targets: Tensor | None = None
) -> Perplexity:
    return perplexity(
        model,
        torch.from_numpy(tokens),
        context=recipe.context,
        stride=recipe.stride or None,
        batch_size=_EVALUATION_BATCH,
        targets=targets,
        precision=recipe.precision,
    )
