"""The recipe of a classification of token sequences: Long Range Arena, sentences, documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_attention.fields import Count, Part, Share, Whole
from kernel_attention_lab.training.recipe import StepRecipe


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
