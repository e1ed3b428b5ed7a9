"""The kernel-PCA family: attention with robust principal components, and Scaled Attention.

Source: Teo, Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component
Analysis", NeurIPS 2024 (algorithm 1 and definition 1; eq. 12, remark 3 and appendix E.1).

Legend: B batch, h heads, N queries, S keys (S = N in self-attention), p head width, d = h p model width.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError, unknown
from kernel_attention.mechanisms.softmax.functional import softmax_attention
from kernel_attention.tensors.padding import real_first, zero_padding
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.statistics import accumulation_dtype, running_mean, valid_ranks

Convention = Literal["released", "paper"]
CONVENTIONS = ("released", "paper")

_SMALLEST_MEAN = 1e-12  # of |k|; below it the keys count as zero and the released threshold stops growing


class PrincipalPursuit(NamedTuple):
    """The result of Principal Attention Pursuit, each (B, h, N, p).

    ``low_rank`` is L, the output. ``sparse`` is S, the part of the keys that was removed as corruption.
    ``cleaned`` is T = K - S - Y/mu of the last step; L came from its attention matrix.
    """

    low_rank: Tensor
    sparse: Tensor
    cleaned: Tensor


class PursuitSettings(NamedTuple):
    """Arguments of ``principal_attention_pursuit``, for the forms that have no dropout."""

    iterations: int
    lam: float
    convention: Convention
    attention_mask: Tensor | None
    is_causal: bool

    def threshold(self, k: Tensor) -> Tensor:
        """``pursuit_threshold`` of the keys."""
        return pursuit_threshold(
            k, self.lam, convention=self.convention, attention_mask=self.attention_mask,
            is_causal=self.is_causal,
        )  # fmt: skip


def principal_attention_pursuit(
    k: Tensor,
    v: Tensor,
    *,
    q: Tensor | None = None,
    iterations: int = 4,
    lam: float = 4.0,
    convention: Convention = "released",
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> PrincipalPursuit:
    """Principal Attention Pursuit (algorithm 1): n ADMM steps on K = L + S, attention as the low-rank step.

    From S = Y = L = 0, n times::

        S <- shrink(K - L + Y/mu, tau)
        T <- K - S - Y/mu
        L <- softmax(T T^T / sqrt(p)) V
        Y <- Y + mu (K - L - S)

    The code stores Y/mu. So mu enters only through the threshold tau (``pursuit_threshold``), and no division
    by the norm of zero keys occurs. The recursion runs in float32 for 16-bit inputs. Every step is one fused
    attention.

    Args:
        k: keys, the data matrix K, (B, h, N, p).
        v: values, (B, h, N, p).
        q: queries, (B, h, N, p): L <- softmax(q T^T / sqrt(p)) V, the asymmetric form of appendix E.10.
        iterations: n.
        lam: lambda, the weight of the 1-norm of S.
        convention: which threshold to use, see ``pursuit_threshold``.
        attention_mask: (B, N), True = real token.
        is_causal: row i reads rows 0..i only, with a step size mu_i from that prefix. It differs from the
            non-causal form on each prefix, where the earlier rows would change with i.
        dropout_p: probability of dropping an attention weight in the last step.
    """
    threshold = pursuit_threshold(
        k, lam, convention=convention, attention_mask=attention_mask, is_causal=is_causal
    )
    return pursuit_steps(
        k, v, threshold, q=q, iterations=iterations, attention_mask=attention_mask, is_causal=is_causal,
        dropout_p=dropout_p,
    )  # fmt: skip


def pursuit_steps(
    k: Tensor,
    v: Tensor,
    threshold: Tensor,
    *,
    q: Tensor | None = None,
    iterations: int = 4,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> PrincipalPursuit:
    """The steps of ``principal_attention_pursuit`` with a given threshold tau, as ``pursuit_threshold``'s."""
    data = zero_padding(k.to(accumulation_dtype(k.dtype)), attention_mask)
    low_rank = sparse = cleaned = dual = torch.zeros_like(data)
    for step in range(iterations):
        residual = data - low_rank + dual
        # The part of the residual that shrinking removes. The data cancel in K - S - Y/mu and in K - L - S.
        # Computed from data of 1e4 and a threshold of 1e-3, these differences would be rounding errors.
        taken = residual.clamp(-threshold, threshold)
        sparse = residual - taken
        cleaned = low_rank - 2 * dual + taken
        keys = cleaned.to(v.dtype)
        before, low_rank = low_rank, softmax_attention(
            keys if q is None else q, keys, v, attention_mask=attention_mask, is_causal=is_causal,
            dropout_p=dropout_p if step == iterations - 1 else 0.0,
        )  # fmt: skip
        dual = before - low_rank + taken
    return PrincipalPursuit(low_rank, sparse, cleaned)


def pursuit_gradients(
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad: Tensor,
    *,
    iterations: int,
    attention_mask: Tensor | None,
    is_causal: bool,
) -> list[Tensor | None]:
    """The gradients of L_n by queries, keys, values and threshold, which may be differentiated themselves."""
    leaves = differentiable_leaves(inputs, needed)
    queries, *others = leaves
    low_rank = pursuit_steps(
        *others, q=queries, iterations=iterations, attention_mask=attention_mask, is_causal=is_causal
    ).low_rank
    return differentiable_gradients((low_rank,), leaves, needed, (grad,))


def pursuit_threshold(
    k: Tensor,
    lam: float,
    *,
    convention: Convention = "released",
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The threshold tau of the sparse step, (B, h, 1, 1), or (B, h, N, 1) causal: float32 or better.

    With m the mean of |k| over the real tokens of a sequence and head (of the prefix where causal):

    * ``"paper"`` (definition 1): tau = lambda / mu, mu = N p / (4 ||K||_1), hence tau = 4 lambda m.
    * ``"released"``, the authors' code: tau = lambda mu with the model width in mu, mu = N d / (4 ||K||_1),
      hence tau = lambda h / (4 m). Keys that are all zero count as m = 1e-12.

    The gradient flows through mu, as in the released code.

    Args:
        k: keys, (B, h, N, p).
        lam: lambda.
        convention: "released" or "paper".
        attention_mask: (B, N), True = real token.
        is_causal: row i averages over tokens 0..i only.
    """
    if convention not in CONVENTIONS:
        raise unknown("convention", convention, CONVENTIONS)
    if k.device.type != "cpu" and not is_causal and attention_mask is None:  # in few launches
        norm = torch.linalg.vector_norm(k, 1, dim=(2, 3), keepdim=True, dtype=accumulation_dtype(k.dtype))
        if convention == "released":
            count = k.size(2) * k.size(3)
            return (lam * k.size(1) * count / 4) / norm.clamp_min(_SMALLEST_MEAN * count)
        return norm * (4 * lam / (k.size(2) * k.size(3)))
    # Not vector_norm, whose loop for ord=1 is no vector loop on a CPU.
    norm = k.abs().sum(dim=-1, keepdim=True, dtype=accumulation_dtype(k.dtype))
    if is_causal:
        mean = running_mean(norm, attention_mask) / k.size(-1)
    elif attention_mask is None:
        mean = norm.mean(dim=2, keepdim=True) / k.size(-1)
    else:
        real = attention_mask[:, None, :, None]
        total = norm.masked_fill(~real, 0.0).sum(dim=2, keepdim=True)
        mean = total / (real.sum(dim=2, keepdim=True).clamp_min(1) * k.size(-1))
    if convention == "paper":
        return 4 * lam * mean
    return lam * k.size(1) / (4 * mean.clamp_min(_SMALLEST_MEAN))


def rpc_attention(
    k: Tensor,
    v: Tensor,
    *,
    q: Tensor | None = None,
    iterations: int = 4,
    lam: float = 4.0,
    convention: Convention = "released",
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """RPC-Attention (definition 1): L of ``principal_attention_pursuit``, (B, h, N, p).

    The arguments are those of that function. The cost is that of ``iterations`` attentions. With one step
    and a threshold above every |k|, it is the symmetric attention of k. With a threshold that nothing exceeds
    (lambda -> infinity), S stays 0 and T_1 = K, T_{n+1} = T_n + L_n - K.
    """
    return principal_attention_pursuit(
        k, v, q=q, iterations=iterations, lam=lam, convention=convention, attention_mask=attention_mask,
        is_causal=is_causal, dropout_p=dropout_p,
    ).low_rank  # fmt: skip


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    s: Tensor | None = None,
    alpha: Tensor | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Scaled Attention (eq. 12): A (I - S) v with A = softmax(q k^T / sqrt(p)).

    S is either a learnt matrix or alpha A_sym with A_sym = softmax(k k^T / sqrt(p)). It relates keys to keys,
    so keys and values may come from another sequence than the queries.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        v: values, (B, h, S, p_v).
        s: S itself, (h, M, M) with M at least the number of keys; its leading block is used. A token's rank
            among the real tokens is its row and column, so padding changes nothing.
        alpha: the scalar of alpha A_sym, one element. Give either ``s`` or ``alpha``.
        attention_mask: (B, S), True = real token.
        is_causal: query i sees keys 0..i only, and of S only the lower triangle is read.
        dropout_p: probability of dropping a weight of A.

    Returns:
        (B, h, N, p_v). S = 0 gives softmax attention.

    Raises:
        InputError: for both or neither of ``s`` and ``alpha``, or for more keys than ``s`` has rows.
    """
    if s is not None and alpha is None:
        correction = _matrix_product(s, v, attention_mask, is_causal)
    elif alpha is not None and s is None:
        similar = softmax_attention(k, k, v, attention_mask=attention_mask, is_causal=is_causal)
        correction = alpha * similar
    else:
        raise InputError("scaled_attention needs one of s and alpha")
    values = (v - correction).to(v.dtype)
    return softmax_attention(
        q, k, values, attention_mask=attention_mask, is_causal=is_causal, dropout_p=dropout_p
    )


def _matrix_product(s: Tensor, v: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
    """S v with S indexed by the ranks of the real tokens; s (h, M, M), v (B, h, S, p_v) -> (B, h, S, p_v)."""
    length = v.size(2)
    if length > s.size(-1):
        raise InputError(f"sequence length {length} exceeds max_len={s.size(-1)}, the size of the learnt S")
    s = s[:, :length, :length]
    if is_causal:
        s = s.tril()
    if attention_mask is None:
        return _over_batch(s, v)
    # Moving N x p_v values is cheaper than moving the N x N entries of S for every sequence.
    order = real_first(attention_mask)[0][:, None, :, None].expand_as(v)
    ranks = valid_ranks(attention_mask).clamp_min(0)[:, None, :, None].expand_as(v)
    packed = zero_padding(v, attention_mask).gather(2, order)
    return _over_batch(s, packed).gather(2, ranks)


def _over_batch(s: Tensor, v: Tensor) -> Tensor:
    # einsum folds the batch into the columns; a broadcast matmul would copy s for every sequence.
    return torch.einsum("hij,bhjp->bhip", s, v)
