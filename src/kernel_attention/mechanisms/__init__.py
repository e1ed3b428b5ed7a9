"""The mechanisms, one folder for each family.

Importing this package registers all of them, in this order. Code that reads the table imports this package.
"""

import importlib
import pkgutil

# isort: off
from kernel_attention.mechanisms import softmax
from kernel_attention.mechanisms import linear
from kernel_attention.mechanisms import regression
from kernel_attention.mechanisms import sparse
from kernel_attention.mechanisms import support_vector
from kernel_attention.mechanisms import primal
from kernel_attention.mechanisms import primal_values
from kernel_attention.mechanisms import multilinear
from kernel_attention.mechanisms import kernel_pca

# isort: on
from kernel_attention.core.registry import (
    ATTENTION_SPECS,
    MECHANISMS,
    AttentionFactory,
    AttentionSpec,
    Mechanism,
    create_attention,
    dropped_objective,
    factory_options,
    get_mechanism,
    layer_specs,
    list_attention,
    make_attention,
    mechanism_name,
)

__all__ = [
    "ATTENTION_SPECS",
    "MECHANISMS",
    "AttentionFactory",
    "AttentionSpec",
    "Mechanism",
    "create_attention",
    "dropped_objective",
    "factory_options",
    "get_mechanism",
    "kernel_pca",
    "layer_specs",
    "linear",
    "list_attention",
    "make_attention",
    "mechanism_name",
    "multilinear",
    "primal",
    "primal_values",
    "regression",
    "softmax",
    "sparse",
    "support_vector",
]

# Further families follow by name: a new folder needs no line above.
for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
