"""The base of the classifier and the regressor of sequences: parameters, training, raw outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

from kernel_attention.containers import as_targets, require_names
from kernel_attention.core.validation import require_positive, require_weight
from kernel_attention.errors import InputError, missing_package
from kernel_attention.estimators.ensemble import member_outputs, plan_members, train_members
from kernel_attention.estimators.files import load_estimator, save_estimator
from kernel_attention.estimators.importance import integrated_gradients
from kernel_attention.estimators.parameters import Callback, member_seeds, refused_in_one_line
from kernel_attention.fields import plain
from kernel_attention.mechanisms import AttentionFactory, AttentionSpec
from kernel_attention.models import SequenceClassifier
from kernel_attention.models.sequence import Positions
from kernel_attention.models.sequence_pooling import SequencePooling
from kernel_attention.models.series_stem import Stem, View
from kernel_attention.series import SequenceSplit, Standardizer, as_sequences
from kernel_attention.series.augmentation import AugmentationName
from kernel_attention.series.outputs import model_scale, require_in_range
from kernel_attention.series.sequences import channel_names
from kernel_attention.training.modes import in_plain_modes

_OPTION = "attention__"
FEWEST_JUDGED = 20
"""Training cases below which none is held out for probabilities or intervals."""


class AttentionEstimator(TransformerMixin, BaseEstimator):
    """The parameters, training and raw outputs that classification and regression share."""

    feature_names_in_: np.ndarray
    max_len_: int
    equal_length_: bool
    seeds_: list[int]
    history_: list[dict[str, Any]]
    models_: list[SequenceClassifier]

    def __init__(
        self,
        attention: AttentionSpec | AttentionFactory | list[AttentionSpec | AttentionFactory] = "primal",
        attention_options: Mapping[str, Any] | None = None,
        *,
        embed_dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        feedforward_dim: int = 128,
        dropout: float = 0.1,
        short_convolution: int = 0,
        stem: Stem | Sequence[Stem] | None = None,
        stem_layers: int = 3,
        patch_len: int = 0,
        views: Sequence[View] = ("raw", "normalized"),
        positions: Positions = "time_absolute",
        pooling: SequencePooling = "mean_max",
        readout: bool = False,
        max_len: int | None = None,
        n_estimators: int = 4,
        members: Sequence[Mapping[str, Any]] | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        optimizer: Literal["radam", "adam", "adamw"] = "adamw",
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        warmup: float = 0.1,
        schedule: Literal["constant", "cosine"] = "cosine",
        gradient_clip: float = 4.0,
        label_smoothing: float = 0.1,
        augmentation: Sequence[AugmentationName] | Sequence[Sequence[AugmentationName]] | None = None,
        mixup: float = 0.0,
        ema_decay: float = 0.0,
        validation_fraction: float | None = None,
        patience: int = 0,
        refit: bool = False,
        calibrate: bool = True,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        time_limit: float | None = None,
        missing: Literal["error", "interpolate"] = "error",
        warm_start: bool = False,
        callbacks: Callback | Sequence[Callback] | None = None,
        random_state: int | np.random.RandomState | None = None,
        accelerator: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.attention = attention
        self.attention_options = attention_options
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.feedforward_dim = feedforward_dim
        self.dropout = dropout
        self.short_convolution = short_convolution
        self.stem = stem
        self.stem_layers = stem_layers
        self.patch_len = patch_len
        self.views = views
        self.positions = positions
        self.pooling = pooling
        self.readout = readout
        self.max_len = max_len
        self.n_estimators = n_estimators
        self.members = members
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.schedule = schedule
        self.gradient_clip = gradient_clip
        self.label_smoothing = label_smoothing
        self.augmentation = augmentation
        self.mixup = mixup
        self.ema_decay = ema_decay
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.refit = refit
        self.calibrate = calibrate
        self.class_weight = class_weight
        self.time_limit = time_limit
        self.missing = missing
        self.warm_start = warm_start
        self.callbacks = callbacks
        self.random_state = random_state
        self.accelerator = accelerator
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = []  # embeddings are float32
        tags.input_tags.allow_nan = self.missing == "interpolate"
        return tags

    @property
    def model_(self) -> SequenceClassifier:
        """The first of ``models_``."""
        if "models_" not in vars(self):
            raise AttributeError(f"this {type(self).__name__} is not fitted yet: it has no model_")
        return self.models_[0]

    def set_params(self, **params: Any) -> Self:
        """As in scikit-learn; ``attention__rank=10`` sets an option of the mechanism, in searches too."""
        options = {name: value for name, value in params.items() if name.startswith(_OPTION)}
        super().set_params(**{name: value for name, value in params.items() if name not in options})
        if options:
            named = {name.removeprefix(_OPTION): value for name, value in options.items()}
            self.attention_options = {**(self.attention_options or {}), **named}
        return self

    @in_plain_modes
    def transform(self, X: Any) -> np.ndarray:
        """The vectors that the members' classifiers read, side by side, (n, width) float32.

        A sequence longer than ``max_len_`` has the mean of its windows' vectors.
        """
        sequences = self._fitting(X)
        parts = [member_outputs(self, model, sequences, self.max_len_, pooled=True) for model in self.models_]
        return torch.cat(parts, dim=-1).numpy()

    @in_plain_modes
    def feature_importance(
        self, X: Any, nodes: int = 64, output: int | None = None
    ) -> np.ndarray | list[np.ndarray]:
        """The share of every value of X in the answer, by integrated gradients; see ``integrated_gradients``.

        The answer is the log-probability of the predicted class, or the predicted value. The entries of a
        case sum to the difference between its answer and that of the mean of the training data.

        Args:
            X: sequences of at most ``max_len_`` steps.
            nodes: gradients along the way; more are more exact.
            output: the column of ``predict_proba``, or of several targets, that is explained. None: the
                predicted class, or the first target.

        Returns:
            (n, c, time) float64, or a list of arrays (c, n_i) where lengths differ.
        """
        require_positive(nodes=nodes)
        sequences = self._fitting(X)
        columns = self.model_options_[0]["num_outputs"]
        if output is not None and output not in range(columns):
            raise InputError(f"output={output!r} must be a whole number from 0 to {columns - 1}")
        longest = max(len(sequence) for sequence in sequences)
        if longest > self.max_len_:
            raise InputError(f"X has a sequence of {longest} steps, the model takes at most {self.max_len_}")
        found = []
        for sequence, raw in zip(sequences, self._outputs(X), strict=True):
            answer = self._answer(raw, output)
            found.append(integrated_gradients(self.models_, sequence, answer, nodes).T)
        lengths = {part.shape[1] for part in found}
        return np.stack(found) if len(lengths) == 1 else found

    def _answer(self, output: Tensor, column: int | None) -> Callable[[Tensor], Tensor]:
        """The answer that ``feature_importance`` explains, from the outputs: (B, k) -> (B,)."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a file, as safetensors with JSON; ``load`` reads it."""
        check_is_fitted(self)
        save_estimator(self, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator in a file of ``save``. Nothing in the file is executed."""
        return load_estimator(cls, Path(path))

    def _checked(self, X: Any, y: Any) -> tuple[list[np.ndarray], np.ndarray]:
        """Sequences and their targets; InputError where they are none, or not as many."""
        raise NotImplementedError

    def _checked_pair(self, data: Any, names: list[str] | None) -> tuple[list[np.ndarray], np.ndarray]:
        """``_checked`` of held-out cases, whose channels have these names."""
        if not isinstance(data, list | tuple) or len(data) != 2:
            raise InputError("validation_data must be a pair (X, y)")
        require_names(channel_names(data[0]), names, "validation_data")
        return self._checked(*data)

    def _names(self, X: Any) -> list[str] | None:
        """The names of the channels of the X of a fit, which are those of the fit that it continues."""
        names = channel_names(X)
        if self.warm_start and "models_" in vars(self):
            known = getattr(self, "feature_names_in_", None)
            require_names(names, known)
            return names if known is None else list(known)
        return names

    def _remember_names(self, names: list[str] | None) -> None:
        if names is not None:
            self.feature_names_in_ = np.array(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def _weighted(
        self, sequences: list[np.ndarray], y: np.ndarray, sample_weight: Any
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray | None]:
        """The cases whose weight is above 0, and their weights with mean 1; None where all are the same."""
        if sample_weight is None:
            return sequences, y, None
        with refused_in_one_line("sample_weight"):
            given = as_targets(sample_weight, "sample_weight")
            weights = _check_sample_weight(given, y, dtype=np.float64, ensure_non_negative=True)
        kept = np.flatnonzero(weights)
        if not len(kept):
            raise InputError("sample_weight is 0 for every case: at least one must count")
        sequences, y, weights = [sequences[index] for index in kept], y[kept], weights[kept]
        if (weights == weights[0]).all():
            return sequences, y, None
        return sequences, y, (weights / weights.mean()).astype(np.float32)

    @in_plain_modes
    def _train(self, split: SequenceSplit, num_outputs: int, validation: SequenceSplit | None = None) -> None:
        """Fit ``models_`` and set the fitted attributes. If training fails, no attribute is set."""
        if self.patience and validation is None and self.validation_fraction is None:
            raise InputError(
                f"patience={self.patience!r} needs held-out cases: validation_fraction, or validation_data"
            )
        if self.time_limit is not None:
            require_weight(time_limit=self.time_limit)
        self._require_trainer()
        earlier = self._earlier(split, num_outputs)
        scale = model_scale(earlier[0]) if earlier else Standardizer.fit(split.sequences)
        split = split.in_precision(scale.dtype)
        validation = None if validation is None else validation.in_precision(scale.dtype)
        seeds = member_seeds(self.random_state, self._count())
        seeds = [*(self.seeds_ if earlier else []), *seeds[len(earlier) :]]
        sequences = [*split.sequences, *(validation.sequences if validation else [])]
        max_len = self._longest(sequences, self.max_len_ if earlier else self.max_len)
        plan = plan_members(self, split, validation, seeds, judges=self._can_judge(split))
        members, judged = train_members(self, plan, split, num_outputs, max_len, earlier)
        self._judge(judged)
        members = members[: self._count()]
        self.models_ = [member.model for member in members]
        self.seeds_ = seeds
        self.max_len_ = max_len
        was_equal = not earlier or self.equal_length_
        self.equal_length_ = was_equal and all(len(sequence) == max_len for sequence in split.sequences)
        self.n_features_in_ = split.sequences[0].shape[1]
        self.model_options_ = [
            {"in_features": self.n_features_in_, "num_outputs": num_outputs, "max_len": max_len, **options}
            for options in (member.options for member in members)
        ]
        self.history_ = [row for member in members for row in member.rows]
        self.best_epoch_ = members[0].best_epoch
        self.best_epochs_ = [member.best_epoch for member in members]

    def _require_trainer(self) -> None:
        """ImportError with the extra that installs the trainer, which only ``fit`` needs."""
        try:
            import lightning_fabric  # noqa: F401
        except ModuleNotFoundError as error:
            raise ImportError(missing_package(error, f"{type(self).__name__}.fit")) from None

    def _earlier(self, split: SequenceSplit, num_outputs: int) -> list[SequenceClassifier]:
        """The members of the last fit, where this one continues them."""
        if not self.warm_start or "models_" not in vars(self):
            return []
        found = {
            "channels in X": (self.n_features_in_, split.sequences[0].shape[1]),
            "classes or targets in y": (self.model_options_[0]["num_outputs"], num_outputs),
        }
        for what, (was, now) in found.items():
            if was != now:
                raise InputError(f"warm_start=True continues a model of {was} {what}, there are {now} now")
        if self._count() < len(self.models_):
            raise InputError(
                f"n_estimators={self.n_estimators} with warm_start=True must be at least "
                f"{len(self.models_)}, the members of the last fit"
            )
        return self.models_

    def _can_judge(self, split: SequenceSplit) -> bool:
        """True where held-out cases are wanted for ``_judge`` and there are enough."""
        return False

    def _judge(self, judged: list[tuple[Tensor, SequenceSplit]]) -> None:
        """Set what follows from the outputs on held-out cases."""

    def _count(self) -> int:
        count = plain(self.n_estimators)
        require_positive(n_estimators=count)
        return count

    @staticmethod
    def _longest(sequences: Sequence[np.ndarray], max_len: int | None) -> int:
        longest = max(len(sequence) for sequence in sequences)
        max_len = longest if max_len is None else plain(max_len)
        require_positive(max_len=max_len)
        if max_len < longest:
            raise InputError(f"max_len={max_len} must be at least {longest}, the longest sequence of X")
        return max_len

    @in_plain_modes
    def _outputs(self, X: Any) -> Tensor:
        """Raw outputs for every case of X, the mean over the members, (n, outputs) float32."""
        sequences = self._fitting(X)
        outputs = [member_outputs(self, model, sequences, self.max_len_) for model in self.models_]
        return torch.stack(outputs).mean(dim=0)

    def _fitting(self, X: Any) -> list[np.ndarray]:
        """X as sequences that the fitted model takes."""
        check_is_fitted(self)
        require_names(channel_names(X), getattr(self, "feature_names_in_", None))
        sequences = as_sequences(X, self.missing)
        channels = sequences[0].shape[1]
        if channels != self.n_features_in_:
            raise InputError(f"X has {channels} channels, expected {self.n_features_in_} as in fit")
        for case, sequence in enumerate(sequences):
            if self.equal_length_ and len(sequence) > self.max_len_:
                raise InputError(
                    f"case {case} of X has {len(sequence)} steps, and every sequence in fit had "
                    f"{self.max_len_}; fit with max_len={len(sequence)} or more to leave room"
                )
        scale = model_scale(self.model_)
        require_in_range(sequences, scale.mean, scale.std, "X")
        return sequences
