"""The classifier of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import assert_all_finite, check_consistent_length, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor
from torch.nn import functional

from kernel_attention.analysis.predictive import has_samples, sampling
from kernel_attention.containers import as_targets
from kernel_attention.errors import InputError, unknown
from kernel_attention.estimators.base import AttentionEstimator
from kernel_attention.estimators.ensemble import FEWEST_JUDGED, member_outputs
from kernel_attention.estimators.parameters import refused_in_one_line
from kernel_attention.series import SequenceSplit, as_sequences
from kernel_attention.series.closed_form import fit_temperature


class AttentionClassifier(ClassifierMixin, AttentionEstimator):
    """Classifier of sequences: an ensemble of encoders with the attention mechanism of your choice.

    ``X`` is an array (n, c, time), an array (n, time) of one channel, or a list of arrays (c, n_i) of any
    lengths. ``y`` holds n labels of any type. The model standardises the channels by the training data.
    Fitting does not change the global random generators.

    Where the lengths of the training sequences differ, a sequence to predict may be longer than ``max_len_``,
    as in a fold of a cross-validation. It is then cut into ceil(n_i / max_len_) windows of ``max_len_``
    steps, evenly spaced from its first step to its last; windows may overlap. Its output (logits, or the
    value of a regressor) is the mean over the windows.

    Args:
        attention: a mechanism's name, ``{name: options}``, a layer's class or any function that makes a layer
            from ``(embed_dim, num_heads, **options)``, or a list with one of these per layer.
            A name alone has the mechanism's default options: eta is 0, so there is no auxiliary objective,
            and the first fit of a process says so. ``{"primal": {"eta": 0.1}}`` adds the objective.
        attention_options: options that override those in ``attention``, which must not be a list. A grid
            search takes ``{"attention__rank": [10, 20]}``.
        embed_dim: model width d.
        num_heads: attention heads; divides ``embed_dim``.
        num_layers: encoder layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: dropout probability.
        short_convolution: taps of a depth-wise convolution of the tokens in front of every attention, which
            starts as the identity; 0: none. See ``kernel_attention.models.ShortConvolution``.
        stem: how steps become tokens: a "linear" projection, multi-scale "convolution", or "rocket", random
            convolutions (MiniRocket's) counted over patches. A list of these is used in turn by the members.
            None: "rocket", and "convolution" in the second of every three members where no series has more
            than 256 steps.
        stem_layers: blocks of the convolution stem.
        patch_len: steps per token; 0: as many as leave at most 128 tokens of the longest series, or 8 of a
            rocket stem.
        views: what the stem reads: one or more of "raw", "normalized" (per series) and "difference".
        positions: "learnt", "learnt_normal" (larger at first), "fixed" (sinusoidal), "time_absolute",
            "convolutional" (relative) or "none".
        pooling: "flatten" all positions, take their "mean", "mean_max" for mean and maximum, or "attention".
        readout: whether members with a rocket stem average their outputs with those of a least-squares
            support vector machine on the same random convolutions, averaged over time. It is solved on the
            training cases in closed form. Its leave-one-out predictions choose its penalty and temperature.
        max_len: longest sequence that the model takes whole; None: the longest training sequence.
        closed_form: whether least-squares SVMs on views of the series answer too: random convolutions, of the
            whole series, competing kernels, shapelets, quantiles of intervals, spectra and covariances of the
            channels, and for up to 512 cases time-warped distances. Where lengths differ, each series is read
            at its own pace, and its length counts too. They are solved in closed form.
            Members, which then train on at most 4096 cases, join them with the share that held-out cases
            favour, ``member_weight_``. False: the members alone.
        n_estimators: members of the ensemble, which differ in their seeds. Their outputs are averaged.
        members: parameters of single members: a list of dicts, used in turn, such as
            ``[{}, {"attention": "softmax"}]``. None: all members have the same parameters.
        epochs: passes over the training data; None: 400 steps beside the closed form and at least 3 passes;
            without it 1000 to 1500 steps, fewer the more tokens a batch has, and at least 20 passes.
        batch_size: sequences per step; None: a sixteenth of the training cases, from 8 to 64.
        optimizer: "radam", "adam" or "adamw".
        learning_rate: the largest learning rate.
        weight_decay: weight decay of the optimizer.
        warmup: part of the epochs in which the learning rate grows to ``learning_rate``.
        schedule: of the learning rate after the warm-up: "cosine", falling to 0, or "constant".
        gradient_clip: largest norm of the gradient; 0 switches clipping off.
        label_smoothing: weight of the uniform distribution in the targets of training.
        augmentation: what changes the series in training: any of "jitter", "scale", "time_warp", "window" and
            "cut", each applied to half of the series of a batch. A list of such lists is used in turn by the
            members. A rocket stem reads the series and up to seven changed copies, made before training.
            None: the first four, but no augmentation in two of three members with a rocket stem.
        mixup: alpha of mixup's Beta distribution; 0 switches it off.
        ema_decay: the model's weights are an exponential moving average with this decay; 0: of the last step.
        validation_fraction: None trains on all cases and keeps the last epoch. A number holds out a
            stratified part of the cases, another one for each member, and the epoch that is best on this part
            is kept.
        patience: with held-out cases, training ends after this many epochs without a better one; 0: never
            early.
        refit: with held-out cases, train each member anew on all cases for as many epochs as were best.
        calibrate: whether probabilities are those of softmax(logits / ``temperature_``). Held-out cases give
            the temperature, and the share of the members beside a closed form. Without
            ``validation_fraction`` and validation data, the last member trains on four fifths of the cases
            and the rest gives both; without a closed form, a single member has a second model for this.
            Fewer than 20 cases, or a class of one case, have temperature 1.
        class_weight: "balanced" gives all classes the same weight; a dict gives the weight of every label.
        time_limit: seconds of the clock for a fit. Every stage is timed on a few cases before: a view of the
            closed form that would take too long has fewer kernels or is left out, members read a part of the
            cases, and their schedule follows the clock where that is ahead. A member that fewer than 20
            held-out cases could judge has no share. The first view and one step of every member are always
            computed, and the first fit of a process also loads its libraries.
        missing: "error" refuses missing values (NaN, ``None``, ``pd.NA``, masked), "interpolate" fills them
            linearly within their case and channel.
        warm_start: whether ``fit`` continues the members of the last fit, with their scale and ``max_len_``,
            for ``epochs`` more; the classes must be the same. Members beyond those start anew, and so does
            the second model that gives a single member its temperature. The learning rate warms up and falls
            again.
        callbacks: a callable or a list of them. Each is called after every epoch of every member with the
            rows of ``history_`` of that member so far; one that returns True ends the training of the member,
            whose weights stay as they are, or with held-out cases as they were at their best.
        random_state: a whole number gives the same model every time, bit for bit on a CPU (without a
            ``time_limit``); None gives a new one.
        accelerator: where models are trained: "auto", "cpu", "gpu" or "mps".
        n_jobs: threads of ``fit`` and of the predictions; -1: one for every CPU; None: as many as torch has.
        verbose: show a progress bar, and what is solved in closed form.

    Attributes:
        classes_: the labels, sorted, (k,).
        n_features_in_: channels c.
        feature_names_in_: the names of the columns of X, where it was a frame with names of text. They are
            then compared with those of a frame to predict.
        max_len_: longest sequence that the model takes whole.
        seeds_: the seed of every member.
        equal_length_: whether all training sequences had ``max_len_`` steps; longer sequences are then
            refused.
        models_: the trained members, each a ``kernel_attention.models.SequenceClassifier``, on the CPU.
        model_: the first of them.
        closed_form_: the closed form, a module on the CPU; None without one.
        closed_form_weights_: the weight of every machine in it, by view; "all" is that on all views together.
        member_weight_: share of the members in the outputs; 1 without a closed form.
        temperature_: what divides the logits in ``predict_proba``.
        history_: a dict for every epoch of every member: ``member``, ``epoch``, ``train_loss``,
            ``train_accuracy``, ``objective_layer_i``, and ``val_loss`` and ``val_accuracy`` where cases are
            held out.
        best_epochs_: for every member, the epoch whose weights were kept, counted from 1.
        best_epoch_: that of the first member.

    Raises:
        InputError: (a ValueError) for parameters or data that are not accepted.
    """

    classes_: np.ndarray
    temperature_: float

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, validation_data: tuple[Any, Any] | None = None
    ) -> Self:
        """Train on X and its labels y, (n,).

        Args:
            X: the sequences.
            y: their labels.
            sample_weight: (n,) weights of at least 0; a case of weight 0 takes no part.
            validation_data: (X, y) of held-out cases, which choose the epoch instead of a
                ``validation_fraction``.
        """
        names = self._names(X)
        sequences, y = self._checked(X, y)
        sequences, y, weights = self._weighted(sequences, y, sample_weight)
        classes, indices = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise InputError(
                f"y holds one class, {classes.tolist()[0]!r}: a classifier needs at least 2 classes"
            )
        if self.warm_start and "models_" in vars(self) and not np.array_equal(classes, self.classes_):
            raise InputError(
                f"warm_start=True continues a classifier of the classes {self.classes_.tolist()}, y has "
                f"{classes.tolist()}"
            )
        weights = self._class_weighted(classes, y, weights)
        split = SequenceSplit(sequences, indices.astype(np.int64), weights)
        self._train(split, len(classes), self._validation(validation_data, classes, names))
        self.classes_ = classes
        self._remember_names(names)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of every class, (n, k) float64, columns in the order of ``classes_``."""
        return self._log_probabilities(X).exp().numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithm of the probability of every class, (n, k) float64."""
        return self._log_probabilities(X).numpy()

    def decision_function(self, X: Any) -> np.ndarray:
        """Confidence of every class, (n, k): log-probabilities. For two classes (n,), the log-odds."""
        scores = self._log_probabilities(X)
        return (scores[:, 1] - scores[:, 0] if scores.size(1) == 2 else scores).numpy()

    def sampled_logits(self, X: Any, samples: int = 1) -> Tensor:
        """Logits / ``temperature_`` of the closed form with every member, (S, n, k).

        For ``predict_distribution``. A member with layers that sample is asked ``samples`` times, any other
        one once.
        """
        sequences = self._fitting(X)
        closed, share = self._closed()
        own = 0.0 if closed is None else (1 - share) * closed.predict(sequences)
        found = []
        for model in self.models_:
            with sampling(model):
                for _ in range(samples if has_samples(model) else 1):
                    found.append(own + share * member_outputs(self, model, sequences, self.max_len_))
        return torch.stack(found) / self.temperature_

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of every case, (n,)."""
        indices = self._outputs(X).argmax(dim=-1).numpy()
        return self.classes_[indices]

    def _checked(self, X: Any, y: Any) -> tuple[list[np.ndarray], np.ndarray]:
        sequences = as_sequences(X, self.missing)
        with refused_in_one_line("y"):
            y = column_or_1d(as_targets(y), warn=True)
            check_consistent_length(sequences, y)
            _require_one_type(y)
            assert_all_finite(y, input_name="y")
            check_classification_targets(y)
        return sequences, y

    def _answer(self, output: Tensor, column: int | None) -> Callable[[Tensor], Tensor]:
        """The log-probability of a class, the predicted one unless ``column`` says which."""
        explained = int(output.argmax()) if column is None else column
        return lambda outputs: (outputs / self.temperature_).log_softmax(dim=-1)[:, explained]

    def _log_probabilities(self, X: Any) -> Tensor:
        return (self._outputs(X).double() / self.temperature_).log_softmax(dim=-1)

    def _class_weighted(
        self, classes: np.ndarray, y: np.ndarray, weights: np.ndarray | None
    ) -> np.ndarray | None:
        if self.class_weight is None:
            return weights
        if isinstance(self.class_weight, Mapping):
            unseen = [label for label in self.class_weight if label not in classes]
            if unseen:
                raise InputError(
                    f"class_weight={self.class_weight!r} names labels that y does not have: {unseen}"
                )
        elif self.class_weight != "balanced":
            raise unknown("class_weight", self.class_weight, ("balanced",))
        by_class = compute_sample_weight(self.class_weight, y)
        product = by_class if weights is None else by_class * weights
        if not (np.isfinite(product).all() and (product >= 0).all() and product.any()):
            raise InputError(f"class_weight={self.class_weight!r} must give finite weights above 0")
        return (product / product.mean()).astype(np.float32)

    def _validation(
        self, data: tuple[Any, Any] | None, classes: np.ndarray, names: list[str] | None
    ) -> SequenceSplit | None:
        if data is None:
            return None
        sequences, y = self._checked_pair(data, names)
        unseen = sorted({str(label) for label in y if label not in classes})
        if unseen:
            raise InputError(f"validation_data has labels that y does not have: {', '.join(unseen)}")
        return SequenceSplit(sequences, np.searchsorted(classes, y).astype(np.int64))

    def _can_judge(self, split: SequenceSplit) -> bool:
        counts = np.unique(split.targets, return_counts=True)[1]
        return bool(self.calibrate and len(split) >= FEWEST_JUDGED and counts.min() >= 2)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        temperature = fit_temperature(outputs, targets)
        return functional.cross_entropy(outputs.double() / temperature, targets, reduction="none")

    def _judge(self, judged: list[tuple[Tensor, SequenceSplit]]) -> None:
        self.temperature_ = 1.0
        if self.calibrate and judged and self.member_weight_:  # a closed form alone is calibrated
            logits = torch.cat([outputs for outputs, _ in judged])
            targets = np.concatenate([split.targets for _, split in judged])
            self.temperature_ = fit_temperature(logits, torch.from_numpy(targets))


def _require_one_type(y: np.ndarray) -> None:
    """InputError for labels that have no order."""
    try:
        np.unique(y)
    except TypeError:
        kinds = ", ".join(sorted({type(label).__name__ for label in y}))
        raise InputError(
            f"y has labels of types that cannot be sorted together ({kinds}); make them of one type"
        ) from None
