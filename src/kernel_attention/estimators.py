"""Classifier and regressor of sequences with the interface of scikit-learn. Needs the extra ``train``.

Legend of shapes: n cases, c channels, n_i time steps of case i, k classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_regressor
from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from kernel_attention.core.validation import require_positive
from kernel_attention.errors import InputError
from kernel_attention.experiments.data import (
    SequenceSplit,
    Standardizer,
    as_sequences,
    make_loader,
    stratified_split,
    windows_of,
)
from kernel_attention.experiments.notes import note_once
from kernel_attention.experiments.training import Recipe, SequenceTask, predict_outputs
from kernel_attention.experiments.training.fit import fit, private_generators, training_device
from kernel_attention.experiments.training.memory import MemoryRecorder
from kernel_attention.experiments.training.ranges import require_in_range
from kernel_attention.mechanisms import AttentionSpec, layer_specs
from kernel_attention.models import SequenceClassifier


class _AttentionEstimator(BaseEstimator):
    """The parameters, training and raw outputs that classification and regression share."""

    max_len_: int
    equal_length_: bool
    model_: SequenceClassifier

    def __init__(
        self,
        attention: AttentionSpec | list[AttentionSpec] = "primal",
        attention_options: Mapping[str, Any] | None = None,
        *,
        embed_dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        feedforward_dim: int = 128,
        dropout: float = 0.1,
        positions: Literal["learnt", "fixed"] = "learnt",
        pooling: Literal["flatten", "mean"] = "flatten",
        max_len: int | None = None,
        epochs: int = 100,
        batch_size: int = 16,
        optimizer: Literal["radam", "adam", "adamw"] = "radam",
        learning_rate: float = 1e-3,
        gradient_clip: float = 4.0,
        validation_fraction: float | None = None,
        missing: Literal["error", "interpolate"] = "error",
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
        self.positions = positions
        self.pooling = pooling
        self.max_len = max_len
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.gradient_clip = gradient_clip
        self.validation_fraction = validation_fraction
        self.missing = missing
        self.random_state = random_state
        self.accelerator = accelerator
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = self.missing == "interpolate"
        return tags

    def _checked(self, X: Any, y: Any) -> tuple[list[np.ndarray], np.ndarray]:
        sequences, y = as_sequences(X, self.missing), column_or_1d(y, warn=True)
        check_consistent_length(sequences, y)
        assert_all_finite(y, input_name="y")
        return sequences, y

    def _train(self, split: SequenceSplit, num_outputs: int) -> None:
        """Fit ``model_`` and set the fitted attributes. If training fails, no attribute is set."""
        seed = _seed(self.random_state)
        recipe = self._recipe(seed)
        for remark in recipe.remarks():
            note_once(remark)
        max_len = self._longest(split.sequences)
        num_features = split.sequences[0].shape[1]
        task = "regression" if is_regressor(self) else "classification"
        kept, held_out = split, None
        if self.validation_fraction is not None:
            kept, held_out = stratified_split(split, self.validation_fraction, seed, task)
        scale = Standardizer.fit(kept.sequences)
        recorder = MemoryRecorder(None if held_out is None else float(np.var(held_out.targets)))
        with private_generators(seed, training_device(self.accelerator)):
            model = SequenceClassifier(num_features, num_outputs, max_len, **recipe.encoder_options())
            model.encoder.set_scale(torch.from_numpy(scale.mean), torch.from_numpy(scale.std))
            fit(
                SequenceTask(model, recipe, is_regression=task == "regression"),
                make_loader(kept, recipe.batch_size, shuffle=True, seed=seed),
                None if held_out is None else make_loader(held_out, recipe.batch_size),
                callbacks=[recorder],
                progress=bool(self.verbose),
            )
        if recorder.weights is not None:
            model.load_state_dict(recorder.weights)
        model.zero_grad(set_to_none=True)
        self.model_ = model.cpu().eval()
        self.max_len_ = max_len
        self.equal_length_ = all(len(sequence) == max_len for sequence in split.sequences)
        self.n_features_in_ = num_features
        self.history_ = recorder.rows
        self.best_epoch_ = recorder.best_epoch or len(recorder.rows)

    def _recipe(self, seed: int) -> Recipe:
        """The parameters as a recipe of the trainer; the recipe also checks them."""
        shared = (
            "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout", "positions", "pooling",
            "epochs", "batch_size", "optimizer", "learning_rate", "gradient_clip", "accelerator",
        )  # fmt: skip
        options = {name: _plain(getattr(self, name)) for name in shared}
        if self.validation_fraction is not None:
            options["validation_fraction"] = self.validation_fraction
        return Recipe(dataset="array", attention=self._attention(), seeds=[seed], **options)

    def _attention(self) -> Any:
        """``attention`` with ``attention_options`` merged in."""
        if not self.attention_options:
            return self.attention
        if not isinstance(self.attention_options, Mapping):
            raise InputError(f"attention_options={self.attention_options!r} must be a dict or None")
        if isinstance(self.attention, list):
            raise InputError(
                f"attention_options={self.attention_options!r} cannot serve attention={self.attention!r}: "
                "in a list, give each layer its options as {name: options}"
            )
        ((name, options),) = layer_specs(self.attention, 1)
        merged = {**options, **self.attention_options}
        return {name: {key: _plain(value) for key, value in merged.items()}}

    def _longest(self, sequences: Sequence[np.ndarray]) -> int:
        longest = max(len(sequence) for sequence in sequences)
        max_len = longest if self.max_len is None else _plain(self.max_len)
        require_positive(max_len=max_len)
        if max_len < longest:
            raise InputError(f"max_len={max_len} must be at least {longest}, the longest sequence of X")
        return max_len

    def _outputs(self, X: Any) -> Tensor:
        """Raw outputs of the model for every case of X, (n, outputs) float32."""
        check_is_fitted(self)
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
        scale = self.model_.encoder
        require_in_range(sequences, scale.input_mean.numpy(), scale.input_std.numpy(), "X")
        windows, counts = windows_of(sequences, self.max_len_)
        # The model is kept on the CPU, so that an estimator pickled on a GPU machine opens on any other.
        try:
            model = self.model_.to(training_device(self.accelerator))
            outputs = predict_outputs(model, windows, self.batch_size)
        finally:
            self.model_.cpu()
        return torch.stack([part.mean(dim=0) for part in outputs.split(counts)])


class AttentionClassifier(ClassifierMixin, _AttentionEstimator):
    """Classifier of sequences: an encoder with the attention mechanism of your choice.

    ``X`` is an array (n, c, time), an array (n, time) of one channel, or a list of arrays (c, n_i) of any
    lengths. ``y`` holds n labels of any type. The model standardises the channels by the training data.
    Fitting does not change the global random generators.

    Where the lengths of the training sequences differ, a sequence to predict may be longer than ``max_len_``,
    as in a fold of a cross-validation. It is then cut into ceil(n_i / max_len_) windows of ``max_len_``
    steps, evenly spaced from its first step to its last; windows may overlap. Its output (logits, or the
    value of a regressor) is the mean over the windows.

    Args:
        attention: a mechanism's name, ``{name: options}``, or a list with one per layer.
            A name alone has the mechanism's default options: eta is 0, so there is no auxiliary objective,
            and the first fit of a process says so. ``{"primal": {"eta": 0.1}}`` adds the objective.
        attention_options: options that override those in ``attention``, which must not be a list. A grid
            search takes ``{"attention_options": [{"rank": 10}, {"rank": 20}]}``.
        embed_dim: model width d.
        num_heads: attention heads; divides ``embed_dim``.
        num_layers: encoder layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: dropout probability.
        positions: "learnt" or "fixed" (sinusoidal).
        pooling: "flatten" all positions, or take their "mean".
        max_len: longest sequence that the model takes whole; None: the longest training sequence.
        epochs: passes over the training data.
        batch_size: sequences per step, in prediction too.
        optimizer: "radam", "adam" or "adamw".
        learning_rate: the learning rate, which is constant.
        gradient_clip: largest norm of the gradient; 0 switches clipping off.
        validation_fraction: None trains on all cases and keeps the last epoch. A number holds out a
            stratified part of the cases, and the epoch that is best on this part is kept.
        missing: "error" refuses NaN, "interpolate" fills it linearly within its case and channel.
        random_state: a whole number gives the same model every time, bit for bit on a CPU; None gives a new
            one.
        accelerator: Lightning's accelerator: "auto", "cpu", "gpu" or "mps".
        verbose: show a progress bar.

    Attributes:
        classes_: the labels, sorted, (k,).
        n_features_in_: channels c.
        max_len_: longest sequence that the model takes whole.
        equal_length_: whether all training sequences had ``max_len_`` steps; longer sequences are then
            refused.
        model_: the trained ``kernel_attention.models.SequenceClassifier``, on the CPU.
        history_: a dict for every epoch: ``train_loss``, ``train_accuracy``, ``objective_layer_i``, and
            ``val_loss`` and ``val_accuracy`` where cases are held out.
        best_epoch_: the epoch whose weights were kept, counted from 1.

    Raises:
        InputError: (a ValueError) for parameters or data that are not accepted.
    """

    classes_: np.ndarray

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X and its labels y, (n,)."""
        sequences, y = self._checked(X, y)
        check_classification_targets(y)
        classes, indices = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise InputError(
                f"y holds one class, {classes.tolist()[0]!r}: a classifier needs at least 2 classes"
            )
        self._train(SequenceSplit(sequences, indices.astype(np.int64)), len(classes))
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of every class, (n, k) float64, columns in the order of ``classes_``."""
        return self._outputs(X).double().softmax(dim=-1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of every case, (n,)."""
        indices = self._outputs(X).argmax(dim=-1).numpy()
        return self.classes_[indices]


class AttentionRegressor(RegressorMixin, _AttentionEstimator):
    """Regressor of sequences: an encoder with the attention mechanism of your choice.

    Parameters, ``X`` and errors are those of ``AttentionClassifier``; ``y`` holds n numbers. The loss is the
    mean squared error of standardised targets. ``model_`` and ``history_`` (``train_rmse``, ``val_rmse``,
    ``val_r2``) are in units of ``target_scale_``, predictions in the units of y.

    Attributes:
        target_mean_: mean of the training targets.
        target_scale_: their standard deviation; 1 where they are constant.
        others: those of ``AttentionClassifier`` without ``classes_``.
    """

    target_mean_: float
    target_scale_: float

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X and its targets y, (n,)."""
        sequences, y = self._checked(X, y)
        y = y.astype(np.float64)
        mean, scale = float(y.mean()), float(y.std()) or 1.0
        self._train(SequenceSplit(sequences, ((y - mean) / scale).astype(np.float32)), 1)
        self.target_mean_, self.target_scale_ = mean, scale
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The value of every case, (n,) float64."""
        return self._outputs(X).double().squeeze(-1).numpy() * self.target_scale_ + self.target_mean_


def _plain(value: Any) -> Any:
    """A NumPy number, such as a search draws, as a Python number."""
    return value.item() if isinstance(value, np.generic) else value


def _seed(random_state: int | np.random.RandomState | None) -> int:
    """A whole number is the seed itself, as in a recipe; None takes fresh entropy from the system."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    generator = check_random_state(random_state)
    return int(random_state) if isinstance(random_state, Integral) else int(generator.randint(2**31))
