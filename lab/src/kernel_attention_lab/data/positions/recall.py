"""Recall of what stood beside a token: multi-query associative recall, and induction heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, Positive
from kernel_attention_lab.data.positions.task import PositionTask, distinct, unlabelled

FILLER = 0  # the token between the queries of associative recall


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(PositionTask):
    """Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology", section 4).

    A sequence begins with pairs of a key and its value. Every key then stands once more, and the value of its
    pair is the label of that position. Keys are tokens 1 to vocabulary / 2 - 1, values are the tokens from
    vocabulary / 2 on; keys and values of a sequence differ from one another. The queries stand at even
    distances 2 g from the end of the pairs, g drawn without replacement with probability proportional to
    (g + 1)^(power - 1); token 0 fills the rest, as in the paper's figure 2.

    Args:
        length: positions, an even number of at least 4 times ``items``.
        items: pairs.
        vocabulary: tokens; 8192 in the paper.
        power: exponent of the law of the gaps; 1 is uniform.
    """

    items: Count = 4
    vocabulary: Count = 256
    power: Positive = 0.01

    def check(self) -> None:
        if self.length % 2 or self.length < 4 * self.items:
            raise InputError(
                f"length={self.length} must be even and at least 4 * items = {4 * self.items}: two tokens a "
                "pair, two a query"
            )
        if self.vocabulary // 2 - 1 < self.items:
            raise InputError(
                f"vocabulary={self.vocabulary} must be at least 2 * (items + 1) = {2 * (self.items + 1)}"
            )

    @property
    def in_features(self) -> int:
        return self.vocabulary

    def draw(self, cases: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        half, pairs = self.vocabulary // 2, self.items
        keys = 1 + distinct(generator, cases, half - 1, pairs)
        values = half + distinct(generator, cases, self.vocabulary - half, pairs)
        inputs = np.full((cases, self.length), FILLER, dtype=np.int64)
        inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = keys, values
        places = 2 * pairs + 2 * self._gaps(cases, generator)
        targets = unlabelled(cases, self.length)
        np.put_along_axis(inputs, places, keys, axis=1)
        np.put_along_axis(targets, places, values, axis=1)
        return inputs, targets

    def _gaps(self, cases: int, generator: np.random.Generator) -> np.ndarray:
        """(cases, items) numbers, drawn one after the other without replacement.

        The order of log p + Gumbel noise is that of such draws (Efraimidis & Spirakis 2006).
        """
        space = (self.length - 2 * self.items) // 2
        weights = (self.power - 1) * np.log(np.arange(1, space + 1))
        order = np.argsort(-(weights + generator.gumbel(size=(cases, space))), axis=1)
        return order[:, : self.items]


@dataclass(frozen=True, kw_only=True)
class InductionHeads(PositionTask):
    """The token after the special token (Olsson et al. 2022; Fu et al. 2023, section 3; Gu & Dao 2023).

    Random tokens; the special token stands once among them and once at the end, where the label is the token
    that followed it the first time. The special token has the number ``vocabulary``.

    Args:
        length: positions, at least 3.
        vocabulary: ordinary tokens; 16 in Gu & Dao.
    """

    vocabulary: Count = 16

    def check(self) -> None:
        if self.length < 3:
            raise InputError(
                f"length={self.length} must be at least 3: the special token, its answer, its end"
            )

    @property
    def in_features(self) -> int:
        return self.vocabulary + 1

    def draw(self, cases: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.integers(self.vocabulary, size=(cases, self.length))
        every, first = np.arange(cases), generator.integers(self.length - 2, size=cases)
        inputs[every, first] = inputs[:, -1] = self.vocabulary
        targets = unlabelled(cases, self.length)
        targets[:, -1] = inputs[every, first + 1]
        return inputs, targets
