"""The table of mechanisms: one line each, and layers made by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_attention.attention.base import AttentionLayer
from kernel_attention.attention.dual_multilinear import DualMultilinearAttention
from kernel_attention.attention.kernel_pca import RobustPrincipalAttention, ScaledAttention
from kernel_attention.attention.linear import LinearAttention
from kernel_attention.attention.multilinear import MultilinearAttention
from kernel_attention.attention.primal import PrimalAttention
from kernel_attention.attention.softmax import SoftmaxAttention
from kernel_attention.attention.sparse import SparseAttention
from kernel_attention.attention.support_vector import SupportVectorAttention
from kernel_attention.attention.tensor import TensorAttention
from kernel_attention.specs import Choice, Spec, SpecReader

AttentionSpec = Spec
"""A mechanism: its name or ``{name: options}``."""


@dataclass(frozen=True)
class Mechanism:
    """A row of the table: a layer class with a preset, and what there is to know before choosing it.

    Costs are per head; N tokens, p head width, s rank, f the head's factor. ``decoding`` says how the state
    of step-by-step decoding grows: "constant", "N", "N / f", or "no" where there is none.
    """

    name: str
    layer: type[AttentionLayer]
    paper: str
    equation: str
    time: str
    memory: str
    causal: str
    cross: bool
    mixes_tokens: str
    padding: str = "any mask"
    preset: Mapping[str, Any] = field(default_factory=dict)
    decoding: str = "no"

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the arguments a user may set."""
        accepted = inspect.signature(self.layer).parameters
        return tuple(key for key in accepted if key not in {"embed_dim", "num_heads", *self.preset})


_KERNEL_PCA = "Teo & Nguyen 2024, kernel PCA"
_MULTILINEAR = "Verbeek 2025, 3D Primal Attention"
_PRIMAL = "Chen et al. 2023, Primal-Attention"
_PRIMAL_DUAL = "Nguyen et al. 2023, primal-dual framework"
_NO_CENTRING = {"beta": 0.0, "learn_beta": False, "normalize": False, "eps": 1e-5}
_NO_POOLING = {"factors": 1, "pooling": "average"}
_NO_CONVOLUTION = {
    "convolution": None, "kernel_size": None, "conv_weights": "shared", "grid_size": None, "class_tokens": 0,
}  # fmt: skip

MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            "softmax", SoftmaxAttention, "Vaswani et al. 2017", "softmax(q k^T / sqrt(p)) v", "N^2 p", "N p",
            causal="yes", cross=True, mixes_tokens="yes", preset={"kernel": "softmax", "symmetric": False},
            decoding="N",
        ),
        Mechanism(
            "symmetric", SoftmaxAttention, "Teo & Nguyen 2024, kernel PCA", "softmax(q q^T / sqrt(p)) v",
            "N^2 p", "N p",
            causal="yes", cross=False, mixes_tokens="yes", preset={"kernel": "softmax", "symmetric": True},
            decoding="N",
        ),
        Mechanism(
            "linear", LinearAttention, "Katharopoulos et al. 2020",
            "phi(q) (phi(k)^T v) / (phi(q) sum phi(k))", "N p^2", "N p",
            causal="yes", cross=True, mixes_tokens="yes", decoding="constant",
        ),
        Mechanism(
            "sparse", SparseAttention, "Child et al. 2019", "softmax over a pattern of positions of stride l",
            "N (l + N/l) p",
            "N (l + N/l)", causal="yes", cross=True, mixes_tokens="yes", decoding="N",
        ),
        Mechanism(
            "cosine", SoftmaxAttention, "released code of Primal-Attention",
            "phi(q) phi(k)^T v, phi(x) = x/||x||", "N p^2", "N p",
            causal="yes", cross=True, mixes_tokens="yes",
            preset={"kernel": "cosine", "symmetric": False, "dropout": 0.0}, decoding="constant",
        ),
        Mechanism(
            "primal", PrimalAttention, _PRIMAL, "W_c [W_e|X^T phi(q); W_r|X^T phi(k)]", "N p s", "N s",
            causal="yes", cross=False, mixes_tokens="data-dependent or causal forms only",
            decoding="constant",
        ),
        Mechanism(
            "multilinear", MultilinearAttention, _MULTILINEAR,
            "E_1 = Phi_1 C_(1) (W_3 (x) W_2) S_(1)^T, E_2, .., E_D alike",
            "D N p^2", "D N p", causal="yes", cross=False,
            mixes_tokens="data-dependent variant; otherwise through the sequence's norm alone",
            decoding="constant",
        ),
        Mechanism(
            "dual_multilinear", DualMultilinearAttention, _MULTILINEAR,
            "E_1 = K_(1) (U_3 (x) U_2) S_(1)^T, K = cubemax(sum q k f / p) = S x U_1 x U_2 x U_3",
            "D N^(D+1)", "N^D",
            causal="no", cross=False, mixes_tokens="yes",
        ),
        Mechanism(
            "tensor", TensorAttention, _MULTILINEAR,
            "E_1 = K_(1) (W_3 (x) W_2) T_(1)^T, K as in dual_multilinear",
            "D N^D R", "N^D", causal="no", cross=False, mixes_tokens="yes",
        ),
        Mechanism(
            "batch_norm", SupportVectorAttention, _PRIMAL_DUAL,
            "softmax((q - beta mu)(k - beta mu)^T / sqrt(p)) v", "N^2 p", "N p",
            causal="yes, but for kernel linear", cross=True, mixes_tokens="yes",
            preset={**_NO_POOLING, **_NO_CONVOLUTION}, decoding="N",
        ),
        Mechanism(
            "scaled_heads", SupportVectorAttention, _PRIMAL_DUAL,
            "softmax(q k_f^T / sqrt(p)) v_f, k_f, v_f pooled by f",
            "N^2 p / f", "N p", causal="yes", cross=True, mixes_tokens="yes",
            preset={**_NO_CENTRING, **_NO_CONVOLUTION}, decoding="N / f",
        ),
        Mechanism(
            "batch_norm_scaled_heads", SupportVectorAttention, _PRIMAL_DUAL,
            "softmax((q - beta mu_f)(k_f - beta mu_f)^T / sqrt(p)) v_f", "N^2 p / f", "N p",
            causal="yes, but for kernel linear", cross=True, mixes_tokens="yes", preset=_NO_CONVOLUTION,
            decoding="N / f",
        ),
        Mechanism(
            "conv1d", SupportVectorAttention, _PRIMAL_DUAL, "softmax(conv(q) conv(k)^T / sqrt(p)) v", "N^2 p",
            "N p",
            causal="yes", cross=False, mixes_tokens="yes",
            preset={**_NO_CENTRING, **_NO_POOLING, "convolution": "1d", "grid_size": None, "class_tokens": 0},
            decoding="N",
        ),
        Mechanism(
            "conv2d", SupportVectorAttention, _PRIMAL_DUAL, "the same over a grid of tokens", "N^2 p", "N p",
            causal="no", cross=False, mixes_tokens="yes",
            preset={**_NO_CENTRING, **_NO_POOLING, "convolution": "2d"},
        ),
        Mechanism(
            "rpc", RobustPrincipalAttention, _KERNEL_PCA,
            "n times softmax(t t^T / sqrt(p)) v, t = k - S - Y/mu",
            "n N^2 p", "n N p", causal="yes, with a step size per prefix", cross=False, mixes_tokens="yes",
        ),
        Mechanism(
            "scaled", ScaledAttention, _KERNEL_PCA, "softmax(q k^T / sqrt(p)) (I - S) v", "N^2 p",
            "N p (S a matrix: N^2)", causal="yes", cross=True, mixes_tokens="yes",
        ),
    )
}  # fmt: skip


def list_attention() -> tuple[Mechanism, ...]:
    """Every mechanism with its paper, equation, costs and abilities."""
    return tuple(MECHANISMS.values())


def dropped_objective(layers: Iterable[Choice]) -> str | None:
    """A sentence about the mechanisms that have an auxiliary objective and, silent about ``eta``, leave it
    out; None where there are none.
    """
    silent = {
        name for name, options in layers if "eta" in get_mechanism(name).options and "eta" not in options
    }
    if not silent:
        return None
    name = min(silent)
    return (
        f"attention {', '.join(map(repr, sorted(silent)))} trains without an auxiliary objective: eta is 0 "
        f"unless it is given. {{{name}: {{eta: 0.1}}}} adds it, {{{name}: {{eta: 0}}}} keeps it out without "
        "this note"
    )


ATTENTION_SPECS = SpecReader(
    argument="attention",
    kind="attention mechanism",
    names=MECHANISMS,
    options_of=lambda name: MECHANISMS[name].options,
    listing="kernel-attention list attention",
)


def get_mechanism(name: str) -> Mechanism:
    """The row of that name; InputError with the nearest names otherwise."""
    ATTENTION_SPECS.require(name)
    return MECHANISMS[name]


def create_attention(name: str, embed_dim: int, num_heads: int, **options: Any) -> AttentionLayer:
    """An attention layer by name: ``create_attention("primal", embed_dim=64, num_heads=2, rank=20)``.

    Raises:
        InputError: for an unknown name, an option the mechanism does not have, or a value it does not accept.
    """
    mechanism = get_mechanism(name)
    options = ATTENTION_SPECS.read({name: options}).options
    return mechanism.layer(embed_dim, num_heads, **{**mechanism.preset, **options})


def layer_specs(attention: AttentionSpec | Sequence[AttentionSpec], num_layers: int) -> list[Choice]:
    """(name, options) for every layer: one spec serves all layers, a list gives one for each.

    >>> [tuple(choice) for choice in layer_specs(["softmax", {"primal": {"rank": 30}}], 2)]
    [('softmax', {}), ('primal', {'rank': 30})]

    Raises:
        InputError: for an unknown name or option, or a list that is not one entry a layer.
    """
    return ATTENTION_SPECS.read_layers(attention, num_layers)
