"""The decompositions behind the attention mechanisms. Needs the extra ``solvers``.

Each is a function on torch tensors and a thin scikit-learn estimator that stores its results.
"""

try:
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "kernel_attention.solvers needs sklearn, which is not installed: "
        "pip install 'kernel-attention[solvers]'",
        name=error.name,
    ) from None

from kernel_attention.solvers.kernel_multilinear_svd import (
    KernelMultilinear,
    kernel_multilinear_svd,
    kmlsvd_dual_objective,
    kmlsvd_dual_scores,
    kmlsvd_primal_scores,
)
from kernel_attention.solvers.kernel_pca_values import KernelPCAResult, KernelPCAValues, kernel_pca_values
from kernel_attention.solvers.kernel_svd import SingularDirections, kernel_svd
from kernel_attention.solvers.kernel_svd_estimator import KernelSVD
from kernel_attention.solvers.least_squares_svm import (
    KernelLeastSquaresSVM,
    LeastSquaresSVM,
    kernel_least_squares_svm,
    least_squares_svm,
)
from kernel_attention.solvers.multilinear_svd import Multilinear, multilinear_svd
from kernel_attention.solvers.multilinear_svd_estimator import MultilinearSVD
from kernel_attention.solvers.primal_kernel_svd import primal_kernel_svd, stochastic_kernel_svd
from kernel_attention.solvers.principal_component_pursuit import (
    PrincipalComponentPursuit,
    Pursuit,
    principal_component_pursuit,
)
from kernel_attention.solvers.projection_loss import (
    EigenvalueRatios,
    ProjectionLoss,
    eigenvalue_ratios,
    projection_error,
    projection_loss,
    recovered_coefficients,
)
from kernel_attention.solvers.support_vector_expansion import (
    SupportVectorExpansion,
    SupportVectors,
    support_vector_expansion,
)

__all__ = [
    "EigenvalueRatios",
    "KernelLeastSquaresSVM",
    "KernelMultilinear",
    "KernelPCAResult",
    "KernelPCAValues",
    "KernelSVD",
    "LeastSquaresSVM",
    "Multilinear",
    "MultilinearSVD",
    "PrincipalComponentPursuit",
    "ProjectionLoss",
    "Pursuit",
    "SingularDirections",
    "SupportVectorExpansion",
    "SupportVectors",
    "eigenvalue_ratios",
    "kernel_least_squares_svm",
    "kernel_multilinear_svd",
    "kernel_pca_values",
    "kernel_svd",
    "kmlsvd_dual_objective",
    "kmlsvd_dual_scores",
    "kmlsvd_primal_scores",
    "least_squares_svm",
    "multilinear_svd",
    "primal_kernel_svd",
    "principal_component_pursuit",
    "projection_error",
    "projection_loss",
    "recovered_coefficients",
    "stochastic_kernel_svd",
    "support_vector_expansion",
]
