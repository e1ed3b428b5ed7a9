"""Asymmetric kernel SVD as a scikit-learn estimator of two samples."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from kernel_attention.containers import feature_names, require_names
from kernel_attention.errors import InputError, unknown
from kernel_attention.solvers.arrays import (
    features,
    fitted,
    give_back,
    make_generator,
    read_array,
    read_first,
    read_second,
    require_range,
)
from kernel_attention.solvers.kernel_svd import (
    SingularDirections,
    SvdMethod,
    check_components,
    column_signs,
    kernel_svd,
    sketched_weights,
)
from kernel_attention.solvers.operators import KernelOperator, centered, is_operator
from kernel_attention.solvers.primal_kernel_svd import (
    FrequentDirections,
    compatible,
    primal_kernel_svd,
    stochastic_kernel_svd,
)
from kernel_attention.tensors.features.feature_maps import FeatureMapSpec
from kernel_attention.tensors.features.kernel_functions import (
    KernelFunction,
    get_kernel_function,
    parameters_of,
)

_SOLVERS = ("dual", "primal", "primal_stochastic")
_NAMED = ("gamma", "degree", "coef0")


class KernelSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Asymmetric kernel SVD of two samples X and Z: the singular value decomposition of k(x_i, z_j).

    Each point gets s scores: e(x) = sum_j h_r,j k(x, z_j) as a member of X, r(z) = sum_i h_e,i k(x_i, z) as
    one of Z. For a symmetric positive kernel and Z = X this is kernel PCA without centring.

    Source: Chen, Tao, Tonin, Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in
    Primal Representation", NeurIPS 2023 (theorem 3.2, remark 3.3, lemma 4.2).

    Args:
        n_components: s.
        kernel: "rbf", "linear", "cosine", "polynomial", "exponential", the row-normalised (asymmetric)
            "softmax" and "sne", "precomputed" (``fit`` gets the matrix, or an operator with ``shape`` and
            ``matmul`` and ``rmatmul`` or SciPy's ``matmat`` and ``rmatmat``), or a callable on tensors
            (n, p), (m, q) -> (n, m). The primal solvers do not read it: their kernel is that of the features.
        gamma: of the named kernels that have it; None is the kernel's default, 1/p or 1/sqrt(p).
        degree: of the polynomial kernel.
        coef0: of the polynomial kernel.
        kernel_params: parameters of a callable kernel.
        solver: "dual" decomposes the kernel matrix; "primal" works in closed form on explicit features,
            O((n + m) p^2); "primal_stochastic" on mini-batches of them, in the memory of O(p s) and a batch.
        svd_method: of the dual: "dense", "truncated", "matrix_free", or "auto" by size; see
            ``kernel_attention.solvers.kernel_svd``.
        feature_map: of the primal: "cosine", "identity", "elu", "relu", a map with options, or a callable on
            tensors (n, d) -> (n, p) that treats every row alone.
        feature_map_z: the map of Z; None: that of X.
        compatibility: C (p, q) where the features of X and Z have different widths; the kernel is
            Phi_x C Phi_z^T.
        center: take the means off the features of X and of Z. The papers do not.
        n_oversamples: directions that the iterative solvers carry beyond s.
        tol: residual ||K^T h_e - sigma h_r|| at which the iterative solvers stop: of the dual over the first
            singular value, None is the square root of the precision; of "primal_stochastic" over each one's
            own, None is 1e-4.
        max_iter: maximum number of passes over the matrix, or of epochs.
        batch_size: points of a mini-batch.
        block_size: rows of the kernel matrix evaluated at a time; None: as many as fit the cache.
        random_state: of the iterative solvers' start: a whole number, a NumPy or torch generator, or None for
            a new one each time.

    Attributes:
        singular_values_: (s,), from the largest.
        left_singular_vectors_: H_e (n, s); the entry of largest size in a column is positive.
        right_singular_vectors_: H_r (m, s).
        left_scores_: e-scores of the X of the fit, (n, s).
        right_scores_: r-scores of its Z, (m, s).
        objective_: J at the solution with Lambda = Sigma^{-1}; 0 but for rounding, and for the residual of an
            iterative solver.
        w_e_: primal weights (q, s), e(x) = W_e^T C^T phi(x); only of the primal solvers.
        w_r_: primal weights (q, s), r(z) = W_r^T phi(z).
        n_iter_: passes over the matrix, or epochs.
        n_features_in_: columns of X.

    After ``partial_fit`` there are only ``singular_values_``, ``w_e_``, ``w_r_``, ``n_iter_`` and
    ``n_features_in_``. Arrays give arrays; tensors give tensors on their device, in their precision.

    Raises:
        InputError: (a ValueError) for parameters or data that are not accepted.
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        kernel: str | KernelFunction = "rbf",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: Mapping[str, Any] | None = None,
        solver: Literal["dual", "primal", "primal_stochastic"] = "dual",
        svd_method: SvdMethod = "auto",
        feature_map: FeatureMapSpec | Callable[[Tensor], Tensor] = "identity",
        feature_map_z: FeatureMapSpec | Callable[[Tensor], Tensor] | None = None,
        compatibility: Any = None,
        center: bool = False,
        n_oversamples: int = 10,
        tol: float | None = None,
        max_iter: int = 50,
        batch_size: int = 1024,
        block_size: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.kernel_params = kernel_params
        self.solver = solver
        self.svd_method = svd_method
        self.feature_map = feature_map
        self.feature_map_z = feature_map_z
        self.compatibility = compatibility
        self.center = center
        self.n_oversamples = n_oversamples
        self.tol = tol
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.block_size = block_size
        self.random_state = random_state

    def fit(self, X: Any, Z: Any = None) -> Self:
        """Decompose the kernel of X (n, p) and Z (m, q); Z is X where it is not given."""
        if self.solver not in _SOLVERS:
            raise unknown("solver", self.solver, _SOLVERS)
        operator = self.solver == "dual" and is_operator(X)
        if operator:
            x, self.n_features_in_ = X, int(X.shape[1])
        else:
            x = read_first(self, X, reset=True)
        z = None if Z is None else read_second(Z, None if operator else x)
        names = self._names_of_second(Z)
        by_kernel = self.solver == "dual"
        found = self._dual(x, z) if by_kernel else self._primal(x, x if z is None else z)
        self._forget()
        self._second_names = names
        # An operator on tensors gives tensors, one on arrays gives arrays.
        self._remember(found, found.values if hasattr(X, "matmul") else X)
        kept = by_kernel and self.kernel != "precomputed"
        self._x_fit: Tensor | None = x if kept else None
        self._z_fit: Tensor | None = (x if z is None else z) if kept else None
        return self

    def _names_of_second(self, Z: Any) -> list[str] | None:
        """The names of Z's columns, or of X's where these are the same ones.

        Raises:
            InputError: where a kernel compares the columns of Z with those of X, and they have other names.
        """
        first = getattr(self, "feature_names_in_", None)
        if Z is None:
            return first if first is None else list(first)
        if self.solver == "dual":
            compares = self.kernel != "precomputed"
        else:
            compares = self.compatibility is None and self.feature_map_z is None
        names = feature_names(Z)
        if not compares or first is None or (names is not None and len(names) != len(first)):
            return names
        require_names(names, first, "Z")
        return list(first)

    def _forget(self) -> None:
        """A fit leaves nothing of the one before."""
        for name in ("w_e_", "w_r_", "left_singular_vectors_", "right_singular_vectors_", "left_scores_",
                     "right_scores_", "objective_", "_sketches", "_second_names"):  # fmt: skip
            self.__dict__.pop(name, None)

    def _dual(self, x: Any, z: Tensor | None) -> SingularDirections:
        parameters: dict[str, Any] | None = None
        if self.kernel != "precomputed":
            parameters = self._kernel_parameters()
        return kernel_svd(
            x,
            z,
            self.n_components,
            kernel=self.kernel,
            kernel_params=parameters,
            method=self.svd_method,
            center=self.center,
            n_oversamples=self.n_oversamples,
            tol=self.tol,
            max_iter=self.max_iter,
            block_size=self.block_size,
            generator=make_generator(self.random_state),
        )

    def _kernel_parameters(self) -> dict[str, Any]:
        if callable(self.kernel):
            return dict(self.kernel_params or {})
        accepted = parameters_of(self.kernel)
        return {**{n: getattr(self, n) for n in _NAMED if n in accepted}, **(self.kernel_params or {})}

    def _primal(self, x: Tensor, z: Tensor) -> SingularDirections:
        if self.solver == "primal":
            matrix = self._compatibility(x)
            phi_x, phi_z = self._features(x, "x"), self._features(z, "z")
            return primal_kernel_svd(
                phi_x, phi_z, self.n_components, compatibility=matrix, center=self.center
            )
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise InputError(f"batch_size={self.batch_size!r} must be a whole number from 1")
        width = self._features(z[:1], "z").size(1)

        def x_batches() -> Iterator[Tensor]:
            return (self._compatible(self._features(batch, "x"), width) for batch in x.split(self.batch_size))

        def z_batches() -> Iterator[Tensor]:
            return (self._features(batch, "z") for batch in z.split(self.batch_size))

        return stochastic_kernel_svd(
            x_batches,
            z_batches,
            self.n_components,
            center=self.center,
            n_oversamples=self.n_oversamples,
            tol=1e-4 if self.tol is None else self.tol,
            max_epochs=self.max_iter,
            generator=make_generator(self.random_state),
        )

    def _compatible(self, phi_x: Tensor, width: int) -> Tensor:
        return compatible(phi_x, width, self._compatibility(phi_x))

    def _compatibility(self, like: Tensor) -> Tensor | None:
        return (
            None if self.compatibility is None else read_array("compatibility", self.compatibility).to(like)
        )

    def _features(self, x: Tensor, side: Literal["x", "z"]) -> Tensor:
        """phi of the rows of (n, d), (n, p)."""
        if side == "z" and self.feature_map_z is not None:
            return features(self.feature_map_z, x, "feature_map_z")
        return features(self.feature_map, x, "feature_map")

    def _remember(self, found: SingularDirections, X: Any) -> None:
        names = {
            "left_singular_vectors_": found.left, "singular_values_": found.values,
            "right_singular_vectors_": found.right, "left_scores_": found.e, "right_scores_": found.r,
            "_left_mean": found.e_mean, "_right_mean": found.r_mean,
        }  # fmt: skip
        if found.w_e is not None and found.w_r is not None:
            names |= {"w_e_": found.w_e, "w_r_": found.w_r}
        for name, value in names.items():
            setattr(self, name, give_back(value, X))
        self.objective_ = float(found.objective)
        self.n_iter_ = found.num_iter
        self._n_features_out = found.values.numel()

    def partial_fit(self, X: Any, Z: Any) -> Self:
        """Take in a mini-batch of each sample, (n_b, p) and (m_b, q), of a stream that is read once.

        Both streams are sketched by frequent directions in 2 (s + ``n_oversamples``) rows, which is exact as
        long as the features have no more directions than that; ``fit`` with the same solver has more passes
        and therefore all digits. The stream of X and that of Z need not be of the same length.
        """
        if self.solver != "primal_stochastic" or self.center:
            raise InputError(
                "partial_fit needs solver='primal_stochastic' and center=False, not "
                f"solver={self.solver!r} and center={self.center!r}"
            )
        sketches = getattr(self, "_sketches", None)
        x = read_first(self, X, reset=sketches is None)
        names = self._names_of_second(Z)
        if sketches is not None:
            require_names(names, self._second_names, "Z")
        phi_z = self._features(read_second(Z, x), "z")
        phi_x = self._compatible(self._features(x, "x"), phi_z.size(1))
        check_components(self.n_components, (phi_z.size(1),))
        if sketches is None:
            size = 2 * (self.n_components + self.n_oversamples)
            sketches = (FrequentDirections(size), FrequentDirections(size))
            self._forget()
            self._second_names = names
            self.n_iter_ = 0
        for sketch, phi in zip(sketches, (phi_x, phi_z), strict=True):
            sketch.update(phi)
        found = sketched_weights(sketches[0].matrix(), sketches[1].matrix(), self.n_components)
        signs = column_signs(found.w_e)
        self._sketches = sketches
        self.singular_values_ = give_back(found.values, X)
        self.w_e_, self.w_r_ = give_back(found.w_e * signs, X), give_back(found.w_r * signs, X)
        self._left_mean = self._right_mean = give_back(torch.zeros_like(found.values), X)
        self._n_features_out = self.n_components
        self.n_iter_ += 1
        return self

    def transform(self, X: Any, Z: Any = None) -> Any:
        """The e-scores of X (n', p), (n', s); with Z (m', q) the pair of them and Z's r-scores, (m', s).

        For ``kernel="precomputed"`` X holds the kernel of new points with the Z of the fit, (n', m), and Z
        that of its X with new points, (n, m').
        """
        check_is_fitted(self)
        e = self._left_scores(read_first(self, X, reset=False))
        if Z is None:
            return give_back(e, X)
        require_names(feature_names(Z), getattr(self, "_second_names", None), "Z")
        r = self._right_scores(read_second(Z, e))
        return give_back(e, X), give_back(r, Z)

    def fit_transform(self, X: Any, Z: Any = None) -> Any:
        """``fit`` and the scores it found, as ``transform`` gives them."""
        self.fit(X, Z)
        return self.left_scores_ if Z is None else (self.left_scores_, self.right_scores_)

    def _left_scores(self, x: Tensor) -> Tensor:
        if self.solver != "dual":
            w_e = fitted(self.w_e_, x)
            e = self._compatible(self._features(x, "x"), w_e.size(0)) @ w_e
        else:
            right = self._dual_vectors(self.right_singular_vectors_, x)
            if self.kernel == "precomputed":
                e = x @ right
            else:
                e = self._kernel_operator(x, fitted(self._z_fit, x)).matmul(right)
        e = e - fitted(self._left_mean, x)
        require_range("X", "its scores", e)
        return e

    def _dual_vectors(self, vectors: Any, like: Tensor) -> Tensor:
        """H_e or H_r as sums over the sample use them: the centred kernel sees of them what is centred.

        Those of a singular value above 0 are; one of the null space may be anything, constants included.
        """
        found = fitted(vectors, like)
        return centered(found) if self.center else found

    def _right_scores(self, z: Tensor) -> Tensor:
        if self.solver != "dual":
            phi, w_r = self._features(z, "z"), fitted(self.w_r_, z)
            if phi.size(1) != w_r.size(0):
                raise InputError(f"Z has {phi.size(1)} features, expected {w_r.size(0)} as in fit")
            r = phi @ w_r
        else:
            left = self._dual_vectors(self.left_singular_vectors_, z)
            if self.kernel == "precomputed":
                if z.size(0) != left.size(0):
                    raise InputError(
                        f"Z has {z.size(0)} rows, expected {left.size(0)}: the kernel of X with Z"
                    )
                r = z.mT @ left
            else:
                r = self._kernel_operator(fitted(self._x_fit, z), z).rmatmul(left)
        r = r - fitted(self._right_mean, z)
        require_range("Z", "its scores", r)
        return r

    def _kernel_operator(self, x: Tensor, z: Tensor) -> KernelOperator:
        width = 0 if self._z_fit is None else self._z_fit.size(1)
        if z.size(1) != width:
            raise InputError(f"Z has {z.size(1)} features, expected {width} as in fit")
        kernel = get_kernel_function(self.kernel, **self._kernel_parameters())
        return KernelOperator(kernel, x, z, self.block_size, reference=fitted(self._z_fit, z))
