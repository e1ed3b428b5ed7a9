"""The mechanisms, one folder a family. Importing this package puts all of them into the table, in this order."""

# isort: off
from kernel_attention.mechanisms import softmax
from kernel_attention.mechanisms import linear
from kernel_attention.mechanisms import sparse
from kernel_attention.mechanisms import support_vector
from kernel_attention.mechanisms import primal
from kernel_attention.mechanisms import multilinear
from kernel_attention.mechanisms import kernel_pca
# isort: on

__all__ = ["kernel_pca", "linear", "multilinear", "primal", "softmax", "sparse", "support_vector"]
