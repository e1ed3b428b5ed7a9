"""The base of the classifier and the regressor of sequences: parameters, training, raw outputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin, is_regressor
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

from kernel_attention.containers import as_targets, require_names
from kernel_attention.errors import InputError, missing_package, require_positive, require_weight
from kernel_attention.estimators.ensemble import member_outputs, plan_members, train_members
from kernel_attention.estimators.files import load_estimator, save_estimator
from kernel_attention.estimators.importance import integrated_gradients
from kernel_attention.estimators.parameters import Callback, member_seeds, refused_in_one_line, threads
from kernel_attention.fields import plain
from kernel_attention.limits import Deadline
from kernel_attention.mechanisms import AttentionFactory, AttentionSpec
from kernel_attention.models import SequenceClassifier
from kernel_attention.models.sequence import Positions
from kernel_attention.models.sequence_classifier import SequencePooling
from kernel_attention.models.series_stem import Stem, View
from kernel_attention.series import SequenceSplit, Standardizer, as_sequences
from kernel_attention.series.augmentation import AugmentationName
from kernel_attention.series.closed_form import ClosedForm
from kernel_attention.series.machines import ClosedFormFit, fit_closed_form
from kernel_attention.series.outputs import model_scale, require_in_range
from kernel_attention.series.sequences import channel_names
from kernel_attention.training.modes import in_plain_modes

_OPTION = "attention__"
_CLOSED_FORM_PART = 0.7  # of the time that a fit may take
_SHARES = tuple(share / 10 for share in range(1, 11))


class AttentionEstimator(TransformerMixin, BaseEstimator):
    """The parameters, training and raw outputs that classification and regression share."""

    feature_names_in_: np.ndarray
    max_len_: int
    equal_length_: bool
    seeds_: list[int]
    history_: list[dict[str, Any]]
    models_: list[SequenceClassifier]
    closed_form_: ClosedForm | None
    closed_form_weights_: dict[str, float]
    member_weight_: float

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
        closed_form: bool = True,
        n_estimators: int = 1,
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
        n_jobs: int | None = None,
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
        self.closed_form = closed_form
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
        self.n_jobs = n_jobs
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
            found.append(integrated_gradients(self._parts(), sequence, answer, nodes).T)
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
        deadline = Deadline(None if self.time_limit is None else float(self.time_limit))
        self._require_trainer()
        earlier = self._earlier(split, num_outputs)
        scale = model_scale(earlier[0]) if earlier else Standardizer.fit(split.sequences)
        split = split.in_precision(scale.dtype)
        validation = None if validation is None else validation.in_precision(scale.dtype)
        seeds = member_seeds(self.random_state, self._count())
        seeds = [*(self.seeds_ if earlier else []), *seeds[len(earlier) :]]
        sequences = [*split.sequences, *(validation.sequences if validation else [])]
        max_len = self._longest(sequences, self.max_len_ if earlier else self.max_len)
        with threads(self.n_jobs):
            plan = plan_members(self, split, validation, seeds, judges=self._can_judge(split))
            closed = self._solve(split, num_outputs, max_len, seeds[0], deadline)
            members, judged = train_members(self, plan, split, num_outputs, max_len, earlier, deadline)
        self._judge_parts(closed, split, judged)
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

    def _solve(
        self, split: SequenceSplit, num_outputs: int, max_len: int, seed: int, deadline: Deadline
    ) -> ClosedFormFit | None:
        """The closed form of the training cases; None where the parameter ``closed_form`` is False."""
        if not isinstance(self.closed_form, bool | np.bool_):
            raise InputError(f"closed_form={self.closed_form!r} must be True or False")
        if not self.closed_form:
            return None

        def say(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        limit = _CLOSED_FORM_PART * deadline.left() if deadline.is_set else None
        return fit_closed_form(
            split, num_outputs, max_len, is_regression=is_regressor(self), seed=seed, max_seconds=limit,
            on_progress=say if self.verbose else None,
        )  # fmt: skip

    def _judge_parts(
        self,
        closed: ClosedFormFit | None,
        split: SequenceSplit,
        judged: list[tuple[Tensor, SequenceSplit]],
    ) -> None:
        """Set the closed form and the weight of the members beside it, and what ``_judge`` sets."""
        self.closed_form_, self.closed_form_weights_, self.member_weight_ = None, {}, 1.0
        if closed is None:
            self._judge(judged)
            return
        self.closed_form_, self.closed_form_weights_ = closed.module, closed.weights
        place = {id(sequence): row for row, sequence in enumerate(split.sequences)}
        pairs = []
        for outputs, held_out in judged:
            rows = [place.get(id(sequence), -1) for sequence in held_out.sequences]
            own = closed.module.predict(held_out.sequences) if min(rows) < 0 else closed.left_out[rows]
            pairs.append((own, outputs))
        if pairs:
            own, outputs = (torch.cat(part) for part in zip(*pairs, strict=True))
            targets = np.concatenate([held_out.targets for _, held_out in judged])
            self.member_weight_ = self._weigh(own, outputs, torch.from_numpy(targets))
        else:  # nothing says which is better
            self.member_weight_ = 0.0 if self.calibrate else 0.5
        mixed = [
            (self._mixed(own, outputs), held_out)
            for (own, outputs), (_, held_out) in zip(pairs, judged, strict=True)
        ]
        if not mixed and self._can_judge(split):  # no time for a member that holds cases out
            mixed = [(closed.left_out, split)]
        self._judge(mixed)

    def _weigh(self, closed: Tensor, members: Tensor, targets: Tensor) -> float:
        """The share of the members with the smallest loss on held-out cases; 0 unless they are surely of use.

        Sure is a loss that is smaller by more than the standard error of the difference.
        """
        without = self._losses(closed, targets)
        best = (0.0, 0.0)
        for share in _SHARES:
            gain = without - self._losses((1 - share) * closed + share * members, targets)
            error = float(gain.std(correction=0)) / len(gain) ** 0.5
            if float(gain.mean()) > max(error, best[1]):
                best = share, float(gain.mean())
        return best[0]

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every case, (n,) float64."""
        raise NotImplementedError

    def _mixed(self, closed: Tensor | float, members: Tensor | float) -> Any:
        """The outputs of both parts together."""
        return (1 - self.member_weight_) * closed + self.member_weight_ * members

    def _parts(self) -> list[tuple[Any, float]]:
        """The modules whose weighted outputs are the answer, those of weight 0 left out."""
        closed, share = self._closed()
        parts: list[tuple[Any, float]] = [(model, share / len(self.models_)) for model in self.models_]
        if closed is not None:
            parts.append((closed, 1 - share))
        return [part for part in parts if part[1]]

    def _closed(self) -> tuple[ClosedForm | None, float]:
        """The closed form and the weight of the members; an estimator of an earlier release has neither."""
        state = vars(self)
        return state.get("closed_form_"), state.get("member_weight_", 1.0)

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
        """Raw outputs for every case of X, of the closed form and the members' mean, (n, outputs) float32."""
        sequences = self._fitting(X)
        closed, share = self._closed()
        with threads(getattr(self, "n_jobs", None)):
            total: Any = 0.0
            if closed is not None:
                total = (1 - share) * closed.predict(sequences)
            if share:
                outputs = [member_outputs(self, model, sequences, self.max_len_) for model in self.models_]
                total = total + share * torch.stack(outputs).mean(dim=0)
        return total

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
