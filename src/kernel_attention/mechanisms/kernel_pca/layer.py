"""The kernel-PCA layers: RPC-Attention and Scaled Attention (Teo & Nguyen, NeurIPS 2024)."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.engine import AUTO, Engine, LayerPlan, checked_impl, choose, plan_call
from kernel_attention.core.layer import AttentionLayer, TokenWork
from kernel_attention.core.parameters import Device, can_join, joint_heads
from kernel_attention.core.query_key_value import identity_values
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import InputError, require_positive, require_probability, unknown
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms.kernel_pca.cpu import FUSED
from kernel_attention.mechanisms.kernel_pca.functional import (
    CONVENTIONS,
    Convention,
    PrincipalPursuit,
    PursuitSettings,
    principal_attention_pursuit,
    scaled_attention,
)
from kernel_attention.mechanisms.kernel_pca.gpu import TRITON
from kernel_attention.mechanisms.kernel_pca.steps import (
    Heads,
    PursuitCall,
    has_few_launches,
    pursuit_in_few_launches,
)
from kernel_attention.mechanisms.softmax.functional import softmax_attention

_SCALINGS = ("symmetric", "matrix")
_ENGINES: tuple[Engine[PursuitCall, Tensor], ...] = (TRITON, FUSED)


@register_attention(
    "rpc",
    summary="attention of keys cleaned by n steps of robust PCA",
    paper="Teo & Nguyen 2024, kernel PCA",
    equation="n times softmax(t t^T / sqrt(p)) v, t = k - S - Y/mu",
    time="n N^2 p",
    memory="n N p",
)
class RobustPrincipalAttention(AttentionLayer):
    """Attention with robust principal components (RPC-Attention, definition 1): n steps split K into L + S.

    The paper's settings are ``iterations`` 4, 5 or 6 with ``lam=4`` in the first layer only, or 2 with
    ``lam=3`` in every layer. Causal calls use a step size per prefix, which differs from the non-causal form
    on each prefix; see ``kernel_attention.functional.principal_attention_pursuit``.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        iterations: n, the steps of Principal Attention Pursuit.
        lam: lambda, the weight of the 1-norm of S.
        symmetric: the cleaned keys attend to themselves (the paper's mechanism); False: separate queries
            attend to them (appendix E.10).
        convention: threshold of the sparse step, "released" (lambda mu, the authors' code) or "paper"
            (lambda / mu, as printed); see ``kernel_attention.functional.pursuit_threshold``.
        dropout: probability of dropping an attention weight of the last step in training.
        bias: whether the projections have biases.
        impl: "reference", the formulas over PyTorch's fused attention; "fused", on CPUs and without dropout,
            the same numbers with one tensor kept of every step instead of three; "triton", kernels for GPUs,
            each of which does a whole step, with heads of width up to 128 and without dropout; "auto", the
            first that serves the call and was measured to be faster, see ``plan``.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    softmax_reading = "cleaned keys"
    reference_options: Mapping[str, Any] = {"impl": "reference"}

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        iterations: int = 4,
        lam: float = 4.0,
        symmetric: bool = True,
        convention: Convention = "released",
        dropout: float = 0.0,
        bias: bool = True,
        impl: Literal["auto", "reference", "fused", "triton"] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(iterations=iterations)
        if not 0.0 < lam < math.inf:
            raise InputError(f"lam={lam!r} must be a positive number")
        if convention not in CONVENTIONS:
            raise unknown("convention", convention, CONVENTIONS)
        require_probability(dropout=dropout)
        self.iterations = iterations
        self.lam = lam
        self.symmetric = symmetric
        self.convention: Convention = convention
        self.dropout = dropout
        self.impl = checked_impl(impl, _ENGINES, retired=("native",))
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = None if symmetric else nn.Linear(embed_dim, embed_dim, **options)
        self.k_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.v_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **options)

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, None]:
        """RPC-Attention on checked arguments: the last L of the pursuit, projected, (B, N, d)."""
        call = self._call(x, attention_mask, is_causal)
        engine, _ = choose(self.impl, _ENGINES, call)
        if engine is None:
            low_rank = self._low_rank(*self._projected(x), attention_mask, is_causal)
        else:
            low_rank = engine.attend(call._replace(heads=Heads(*self._projected(x))))
        return self.out_proj(self.merge_heads(low_rank)), None

    def why_not_heads(self) -> str | None:
        """None: the keys may come from anywhere."""
        return None

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The last L of the pursuit of given keys; symmetric attention cleans and reads the queries."""
        k, queries = (q, None) if self.symmetric else (k, q)
        return self._low_rank(k, v, queries, attention_mask, is_causal)

    def plan(self, x: Tensor, *, is_causal: bool = False, compiled: bool | None = None) -> LayerPlan:
        """Which engine serves a call, and why."""
        return plan_call(self.impl, _ENGINES, self._call(x, None, is_causal), compiled=compiled)

    def _call(self, x: Tensor, attention_mask: Tensor | None, is_causal: bool) -> PursuitCall:
        settings = PursuitSettings(self.iterations, self.lam, self.convention, attention_mask, is_causal)
        return PursuitCall(x, self.head_dim, settings, self.training and self.dropout > 0)

    def pursuit(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> PrincipalPursuit:
        """L, S and T of the last step, each (B, h, N, p); S is what the layer takes for corruption."""
        return self._pursue(*self._projected(x), attention_mask, is_causal)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and queries."""
        linear = [part for part in (self.k_proj, self.v_proj, self.q_proj) if part is not None]
        if can_join(x, *linear):
            k, v, *q = joint_heads(x, self.num_heads, *linear)
            return k, v, q[0] if q else None
        return self.split_heads(self.k_proj(x)), self.split_heads(self.v_proj(x)), self._queries(x)

    def _low_rank(
        self, k: Tensor, v: Tensor, q: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """L of the last step, (B, h, N, p); on an accelerator in few launches."""
        if self.impl != AUTO or not has_few_launches(k):
            return self._pursue(k, v, q, attention_mask, is_causal).low_rank
        settings = PursuitSettings(self.iterations, self.lam, self.convention, attention_mask, is_causal)
        dropout_p = self.dropout if self.training else 0.0
        return pursuit_in_few_launches(k, v, settings, q=q, dropout_p=dropout_p)

    def _pursue(
        self, k: Tensor, v: Tensor, q: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> PrincipalPursuit:
        return principal_attention_pursuit(
            k, v, q=q, iterations=self.iterations, lam=self.lam, convention=self.convention,
            attention_mask=attention_mask, is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip

    def kernel_matrix(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """The attention matrix of the last step, (B, h, N, N); for analysis, O(N^2)."""
        cleaned = self.pursuit(x, attention_mask=attention_mask).cleaned.to(x.dtype)
        queries = self._queries(x)
        attention = softmax_attention(
            cleaned if queries is None else queries,
            cleaned,
            _unit_values(cleaned, attention_mask),
            attention_mask=attention_mask,
        )
        return _zero_padded_rows(attention, attention_mask)

    def token_work(self, *, training: bool, length: int) -> TokenWork | None:
        """The projections, and of every step two products with the sequence, in training seven.

        The backward pass forms the logits again. A token moves its input and output; in training also the
        output's gradient and the input's, and its input again.
        """
        projections = 3 if self.symmetric else 4
        passes, products = (3, 7) if training else (1, 2)
        operations = (
            2 * passes * projections * self.embed_dim**2
            + 2 * products * self.iterations * length * self.embed_dim
        )
        return TokenWork(operations, self.embed_dim * (5 if training else 2))

    def _queries(self, x: Tensor) -> Tensor | None:
        return None if self.q_proj is None else self.split_heads(self.q_proj(x))

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, iterations={self.iterations}, lam={self.lam}, "
            f"symmetric={self.symmetric}, convention={self.convention!r}"
        )


@register_attention(
    "scaled",
    summary="softmax attention of values mixed by a learnt I − S",
    paper="Teo & Nguyen 2024, kernel PCA",
    equation="softmax(q k^T / sqrt(p)) (I - S) v",
    time="N^2 p",
    memory="N p (S a matrix: N^2)",
)
class ScaledAttention(AttentionLayer):
    """Scaled Attention A (I - S) V (eq. 12), with S learnt in one of the paper's two parameterisations.

    Both start at S = 0, which is softmax attention.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        scaling: "symmetric": S = alpha softmax(k k^T / sqrt(p)) with a learnt scalar ``alpha``, any length;
            "matrix": S is a learnt parameter ``s`` of shape (h, max_len, max_len), whose leading block serves
            shorter sequences.
        max_len: the largest number of keys; ``scaling="matrix"`` needs it and alone reads it.
        dropout: probability of dropping a weight of A in training.
        bias: whether the projections have biases.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    alpha: nn.Parameter | None
    s: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        scaling: Literal["symmetric", "matrix"] = "symmetric",
        max_len: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        if scaling not in _SCALINGS:
            raise unknown("scaling", scaling, _SCALINGS)
        require_probability(dropout=dropout)
        self.scaling = scaling
        self.dropout = dropout
        symmetric = scaling == "symmetric"
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {**where, "bias": bias}
        shape = (1,) if symmetric else _matrix_shape(num_heads, max_len)
        self.register_parameter("alpha", nn.Parameter(torch.zeros(shape, **where)) if symmetric else None)
        self.register_parameter("s", None if symmetric else nn.Parameter(torch.zeros(shape, **where)))
        self.q_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.k_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.v_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **options)

    def reset_parameters(self) -> None:
        """Draw the projections anew; S starts at zero."""
        for scaling in (self.alpha, self.s):
            if scaling is not None:
                nn.init.zeros_(scaling)
        super().reset_parameters()

    def why_not_context(self) -> str | None:
        """None: keys and values may come from another sequence."""
        return None

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, None]:
        """Scaled Attention on checked arguments: A (I - S) V of every head, projected, (B, N, d)."""
        source = x if context is None else context
        out = self.attend_heads(
            self.split_heads(self.q_proj(x)),
            self.split_heads(self.k_proj(source)),
            self.split_heads(self.v_proj(source)),
            attention_mask=attention_mask,
            is_causal=is_causal,
        )
        return self.out_proj(self.merge_heads(out)), None

    def why_not_heads(self) -> str | None:
        """None: queries, keys and values may come from anywhere."""
        return None

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """A (I - S) V of given queries, keys and values."""
        return scaled_attention(
            q,
            k,
            v,
            s=self.s,
            alpha=self.alpha,
            attention_mask=attention_mask,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def kernel_matrix(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """A (I - S), the matrix that multiplies the values, (B, h, N, N). Its rows need not sum to 1."""
        q, k = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x))
        matrix = scaled_attention(
            q,
            k,
            _unit_values(k, attention_mask),
            s=self.s,
            alpha=self.alpha,
            attention_mask=attention_mask,
        )
        return _zero_padded_rows(matrix, attention_mask)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        size = "" if self.s is None else f", max_len={self.s.size(-1)}"
        return f"{self.embed_dim}, {self.num_heads}, scaling={self.scaling!r}{size}"


def _matrix_shape(num_heads: int, max_len: int | None) -> tuple[int, int, int]:
    """The shape of a learnt S, (h, max_len, max_len)."""
    if max_len is None:
        raise InputError("max_len=None: scaling='matrix' needs max_len, the size of the learnt S")
    require_positive(max_len=max_len)
    require_parameters(
        f"ScaledAttention: max_len={max_len} with num_heads={num_heads} and scaling='matrix'",
        num_heads * max_len**2,
        "lower max_len or choose scaling='symmetric'",
    )
    return num_heads, max_len, max_len


def _unit_values(k: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The identity as values, (B, h, N, N): an attention of it returns the attention matrix."""
    eye = identity_values(k)
    return eye if attention_mask is None else eye * attention_mask[:, None, :, None]


def _zero_padded_rows(matrix: Tensor, attention_mask: Tensor | None) -> Tensor:
    return matrix if attention_mask is None else matrix * attention_mask[:, None, :, None]
