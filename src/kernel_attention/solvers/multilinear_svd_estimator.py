"""The multilinear SVD, of a tensor or of the kernel tensor of D samples, as a scikit-learn estimator."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from kernel_attention.containers import feature_names, require_names
from kernel_attention.errors import InputError, unknown
from kernel_attention.solvers.arrays import give_back, read_array, require_finite, require_range, unmasked
from kernel_attention.solvers.kernel_multilinear_svd import (
    kernel_multilinear_svd,
    kmlsvd_dual_objective,
    kmlsvd_dual_scores,
    kmlsvd_primal_scores,
    mode_scores,
)
from kernel_attention.solvers.multilinear_svd import Method, Ranks, multilinear_svd
from kernel_attention.tensors.features.feature_maps import FeatureMapSpec, get_feature_map
from kernel_attention.tensors.multilinear.kernel_tensors import (
    attention_tensor,
    cubemax_kernel,
    multilinear_kernel,
)

TensorKernel = Callable[[Sequence[Tensor]], Tensor]
_KERNELS = ("precomputed", "features", "cubemax")
_SOLVERS = ("dual", "primal")


class MultilinearSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Multilinear SVD of a tensor of any order D >= 2, or of the kernel tensor of D samples (KMLSVD).

    Numpy or torch in, the same out. A ``sklearn.exceptions.ConvergenceWarning`` says where ``max_iter``
    ends the iteration. Source: Verbeek, "3D Primal Attention", TU Delft 2025, theorem 2.2.

    Args:
        ranks: one for every mode, or a sequence; None: all that there is.
        method: "hosvd", or "hooi" for a stationary point of the truncated problem; see
            ``kernel_attention.solvers.multilinear_svd``.
        kernel: what ``fit`` gets. "precomputed": the tensor itself. Otherwise D samples (N_n, p_n), from
            which K is C x_1 Phi_1 .. x_D Phi_D with "features"; the dual attention's tensor softmax with
            "cubemax"; or what a callable makes of the D samples as tensors, each entry from one row of each.
        solver: "dual" decomposes K; "primal", with "features" only, never forms it. The results are the same.
        feature_map: of "features": a name, ``{name: options}``, or a callable, as the layers take it.
        compatibility: C of "features": None, its superdiagonal, or the tensor.
        tol: of "hooi".
        max_iter: of "hooi".

    Attributes:
        core_: S, (R_1..R_D).
        factors_: U_n, a list of (N_n, R_n).
        singular_values_: mode-n singular values, a list; the primal ends at the width of the features.
        scores_: E_n, a list of (N_n, R_n).
        weights_: W_n = Phi_n^T U_n, a list; of "primal" only.
        objective_: J, a number.
        n_iter_: sweeps done.

    Raises:
        InputError: (a ValueError) for parameters or data that are not accepted.
    """

    weights_: list[Any]

    def __init__(
        self,
        ranks: Ranks = None,
        *,
        method: Method = "hosvd",
        kernel: Literal["precomputed", "features", "cubemax"] | TensorKernel = "precomputed",
        solver: Literal["dual", "primal"] = "dual",
        feature_map: FeatureMapSpec = "identity",
        compatibility: Any = None,
        tol: float = 1e-10,
        max_iter: int = 500,
    ) -> None:
        self.ranks = ranks
        self.method = method
        self.kernel = kernel
        self.solver = solver
        self.feature_map = feature_map
        self.compatibility = compatibility
        self.tol = tol
        self.max_iter = max_iter

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Decompose X: a tensor (I_1..I_D), or D samples (N_n, p_n). ``y`` is ignored."""
        if not callable(self.kernel) and self.kernel not in _KERNELS:
            raise unknown("kernel", self.kernel, _KERNELS)
        if self.solver not in _SOLVERS:
            raise unknown("solver", self.solver, _SOLVERS)
        if hasattr(self, "weights_"):
            del self.weights_  # of an earlier fit by another solver
        options: dict[str, Any] = {"method": self.method, "tol": self.tol, "max_iter": self.max_iter}
        if self.solver == "primal":
            if self.kernel != "features":
                raise InputError(f"solver='primal' needs kernel='features', got kernel={self.kernel!r}")
            self._samples_ = self._samples(X)
            features = self._features(self._samples_)
            found = kernel_multilinear_svd(
                features, self.ranks, compatibility=self._compatibility(features[0]), **options
            )
            svd, scores, objective = found.svd, found.scores, found.objective
            self.weights_ = [give_back(w, X[0]) for w in found.weights]
        else:
            if self.kernel == "precomputed":
                tensor = self._tensor(X, reset=True)
            else:
                self._samples_ = self._samples(X)
                tensor = self._kernel_tensor(self._samples_)
            svd = multilinear_svd(tensor, self.ranks, **options)
            scores = kmlsvd_dual_scores(tensor, svd.factors, svd.core)
            objective = kmlsvd_dual_objective(tensor, svd.factors, svd.core)
            require_range("X", "the scores and J of its tensor", *scores, objective)
        if not svd.converged:
            warnings.warn(f"max_iter={self.max_iter} ended the iteration", ConvergenceWarning, stacklevel=2)
        like = X if self.kernel == "precomputed" else X[0]
        self._svd_ = svd
        self.core_ = give_back(svd.core, like)
        self.factors_ = [give_back(u, like) for u in svd.factors]
        self.singular_values_ = [give_back(s, like) for s in svd.singular_values]
        self.scores_ = [give_back(e, like) for e in scores]
        self.objective_ = objective.item()
        self.n_iter_ = svd.num_iterations
        return self

    def transform(self, X: Any) -> Any:
        """Scores of new data.

        Of a tensor (n, I_2..I_D), new slices of the first mode: E_1, (n, R_1). Of D samples, each (n_m, p_m)
        or None: a list with E_m of each against the fitted samples of the other modes, or None.
        """
        check_is_fitted(self)
        core, factors = self._svd_.core, self._svd_.factors
        if self.kernel == "precomputed":
            tensor = self._tensor(X, reset=False).to(core)
            if tensor.shape[1:] != tuple(u.size(0) for u in factors[1:]):
                raise InputError(
                    f"X has shape {tuple(tensor.shape)}, expected the fitted one but for the first mode, "
                    f"(n, {', '.join(str(u.size(0)) for u in factors[1:])})"
                )
            scores = mode_scores(tensor, factors, core, 0)
            require_range("X", "its scores", scores)
            return give_back(scores, X)
        if len(X) != len(factors):
            raise InputError(
                f"X holds {len(X)} samples, expected {len(factors)}: one, or None, for every mode"
            )
        return [None if sample is None else self._mode_scores(sample, m) for m, sample in enumerate(X)]

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Decompose X and return the scores: ``scores_``, or the first mode's of a tensor."""
        self.fit(X)
        return self.scores_[0] if self.kernel == "precomputed" else self.scores_

    def _mode_scores(self, X: Any, mode: int) -> Any:
        samples, core = list(self._samples_), self._svd_.core
        if "_names_" in vars(self):  # not in what an earlier version pickled
            require_names(feature_names(X), self._names_[mode], f"sample {mode} of X")
        new = _matrix(X, mode).to(samples[mode])
        if new.size(1) != samples[mode].size(1):
            raise InputError(
                f"sample {mode} of X has {new.size(1)} columns, expected {samples[mode].size(1)} as in fit"
            )
        samples[mode] = new
        if self.solver == "primal":
            features = self._features(samples)
            weights = [torch.as_tensor(w).to(core) for w in self.weights_]
            scores = kmlsvd_primal_scores(features, weights, core, compatibility=self._compatibility(core))[
                mode
            ]
        else:
            kernel = self._kernel_tensor(samples, mode)
            scores = mode_scores(kernel, self._svd_.factors, core, mode)
        require_range("X", "its scores", scores)
        return give_back(scores, X)

    def _kernel_tensor(self, samples: Sequence[Tensor], mode: int = 0) -> Tensor:
        """K of the samples, of which that of ``mode`` may be new."""
        kernel = self._any_kernel_tensor(samples, mode)
        require_finite("the kernel tensor of X", kernel)
        return kernel

    def _any_kernel_tensor(self, samples: Sequence[Tensor], mode: int) -> Tensor:
        if callable(self.kernel):
            return self.kernel(samples)
        if self.kernel == "features":
            features = self._features(samples)
            lift = self._compatibility(features[0])
            rows = [phi[None, None] for phi in features]
            return multilinear_kernel(rows, None if lift is None else lift[None])[0, 0]
        normalizer = None
        if mode != 0:  # every slice of the first mode keeps the normaliser that it was fitted with
            known = [sample[None, None] for sample in self._samples_]
            normalizer = attention_tensor(known).flatten(3).logsumexp(dim=-1)
        return cubemax_kernel([sample[None, None] for sample in samples], log_normalizer=normalizer)[0, 0]

    def _features(self, samples: Sequence[Tensor]) -> list[Tensor]:
        maps = [get_feature_map(self.feature_map, sample.size(1)) for sample in samples]
        return [phi(sample[None, None], None, False)[0, 0] for phi, sample in zip(maps, samples, strict=True)]

    def _compatibility(self, like: Tensor) -> Tensor | None:
        if self.compatibility is None:
            return None
        return read_array("compatibility", self.compatibility, ensure_2d=False, allow_nd=True).to(like)

    def _samples(self, X: Any) -> list[Tensor]:
        if isinstance(X, (Tensor, np.ndarray)) or len(X) < 2:
            raise InputError(
                f"X must be a list of two samples (N_n, p_n) or more with kernel={self.kernel!r}"
            )
        samples = [_matrix(sample, n) for n, sample in enumerate(X)]
        names = [feature_names(sample) for sample in X]
        # These kernels multiply entries of the samples that stand in one column.
        if self.kernel == "cubemax" or (self.kernel == "features" and self.compatibility is None):
            known = next((each for each in names if each is not None), None)
            for n, each in enumerate(names):
                require_names(each, known, f"sample {n} of X")
            names = [known] * len(names)
        self._names_ = names
        common = torch.promote_types(torch.float32, samples[0].dtype)
        return [sample.to(samples[0].device, common) for sample in samples]

    def _tensor(self, X: Any, *, reset: bool) -> Tensor:
        if isinstance(X, Tensor):
            if reset:
                self.n_features_in_ = X.size(1) if X.dim() > 1 else 0
            require_finite("X", X)
            return X.detach() if X.is_floating_point() else X.to(torch.float64)
        array = validate_data(self, unmasked(X), reset=reset, dtype=[np.float64, np.float32], allow_nd=True)
        return torch.from_numpy(np.array(array, order="C"))

    @property
    def _n_features_out(self) -> int:
        return self._svd_.core.size(0)


def _matrix(X: Any, mode: int) -> Tensor:
    """One sample as a floating tensor (N_n, p_n)."""
    sample = read_array(f"sample {mode} of X", X, ensure_2d=False, ensure_min_samples=0, allow_nd=True)
    if sample.dim() != 2 or sample.numel() == 0:
        raise InputError(
            f"sample {mode} of X has shape {tuple(sample.shape)}, expected (N_n, p_n), not empty"
        )
    return sample
