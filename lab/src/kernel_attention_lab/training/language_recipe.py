"""The recipe of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, Share, Whole
from kernel_attention_lab.training.recipe import StepRecipe


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
