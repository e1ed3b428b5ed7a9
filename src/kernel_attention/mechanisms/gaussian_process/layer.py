"""Gaussian-process attention as layers: on the scores of Primal-Attention, and sparse, with inducing keys."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.parameters import Device, TensorLinear, draw_orthogonal, reset_module
from kernel_attention.core.penalized import OBJECTIVE_BOUND, PenalizedAttention, checked_bound
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import require_positive, require_weight
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms.gaussian_process.functional import (
    Distribution,
    SparsePosterior,
    kernel_gp_attention,
    kernel_gp_divergence,
    kernel_gp_posterior,
    positive_cholesky,
    sample_normal,
    sgpa_posterior,
    unit_kernel,
)
from kernel_attention.mechanisms.primal.functional import (
    PrimalScores,
    objective_from_energy,
    primal_scores,
    scores_energy,
)
from kernel_attention.mechanisms.primal.scored_layer import ScoredAttention
from kernel_attention.tensors.features.feature_maps import FeatureMap, get_feature_map
from kernel_attention.tensors.statistics import (
    exactly,
    mean_or_zero,
    num_real,
    running_mean,
    smallest,
    without_autocast,
)


@register_attention(
    "kernel_gp",
    summary="sparse Gaussian process on the kernel SVD scores, with a variance",
    paper="Chen et al. 2024, KEP-SVGP",
    equation="(e + r) Lambda u, u ~ N(m, S)",
    time="N p s",
    memory="N s",
    state="constant",
    mixes_tokens="data-dependent or causal forms only",
)
class KernelGPAttention(ScoredAttention):
    """Kernel-eigen-pair Gaussian-process attention (Chen, Tao, Tonin, Suykens, ICML 2024); O(N p s) time.

    f_i = (e_i + r_i)^T Lambda u with the scores e, r of Primal-Attention and one Gaussian u ~ N(m_u, S_u) for
    each of s outputs. Heads project f to their width. In evaluation the layer gives the mean. In training it
    draws one u for every sequence from PyTorch's generator, so that a sample is one function of the tokens.

    ``auxiliary_loss`` has eta J^2 of the kernel SVD, and ``kl_weight`` times the divergence of N(m_u, S_u)
    from the prior N(0, Lambda^{-2}). In the evidence lower bound of a mean loss the weight is 1 / (number of
    training cases).

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        rank: directions s per head, and outputs of the process.
        eta: weight of J^2, see ``PrimalAttention``.
        kl_weight: weight of the divergence.
        sample: whether training draws samples; False: the mean, as in evaluation.
        data_dependent: whether the projection weights depend on the sequence.
        rank_multiplier: rows sampled per direction, M = rank * rank_multiplier.
        max_len: longest sequence; caps M. The causal data-dependent form needs it.
        running_means: whether the causal form averages q and k over the prefix first.
        feature_map: phi, a name or a callable of `kernel_attention.features`.
        objective_bound: the largest |J| whose penalty is eta J^2; None: no bound.
        bias: whether the projections have biases.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Attributes:
        w_e: (h, M, s), or (h, p, s) where data-independent.
        w_r: as ``w_e``.
        log_sqrt_lambda: log of the square root of Lambda's diagonal, (h, s).
        m_u: the variational means, (h, s, s): direction, output.
        s_u: factors of the covariances, (h, s, s, s): output, direction, direction; the diagonal is a log.
        concat: the map from the s outputs to the head's p, shared by the heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int = 20,
        eta: float = 0.0,
        kl_weight: float = 1e-3,
        sample: bool = True,
        data_dependent: bool = True,
        rank_multiplier: int = 10,
        max_len: int | None = None,
        running_means: bool = True,
        feature_map: str | FeatureMap = "cosine",
        objective_bound: float | None = OBJECTIVE_BOUND,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(
            rank=rank, rank_multiplier=rank_multiplier, **({} if max_len is None else {"max_len": max_len})
        )
        require_weight(eta=eta, kl_weight=kl_weight)
        self.rank = rank
        self.eta = eta
        self.kl_weight = kl_weight
        self.sample = sample
        self.samples_in_evaluation = False  # ``predict_distribution`` asks for samples
        self.data_dependent = data_dependent
        self.max_len = max_len
        self.running_means = running_means
        self.feature_map = get_feature_map(feature_map)
        self.objective_bound = checked_bound(objective_bound)
        self.num_rows = rank * rank_multiplier if max_len is None else min(rank * rank_multiplier, max_len)
        weight_rows = self.num_rows if data_dependent else self.head_dim
        require_parameters(
            f"KernelGPAttention: rank={rank} in num_heads={num_heads}",
            num_heads * rank * (2 * weight_rows + rank + rank**2),
            "lower rank",
        )
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {**where, "bias": bias}
        self.q_proj = TensorLinear(embed_dim, embed_dim, **options)
        self.k_proj = TensorLinear(embed_dim, embed_dim, **options)
        self.w_e = nn.Parameter(torch.empty(num_heads, weight_rows, rank, **where))
        self.w_r = nn.Parameter(torch.empty(num_heads, weight_rows, rank, **where))
        self.log_sqrt_lambda = nn.Parameter(torch.empty(num_heads, rank, **where))
        self.m_u = nn.Parameter(torch.empty(num_heads, rank, rank, **where))
        self.s_u = nn.Parameter(torch.empty(num_heads, rank, rank, rank, **where))
        self._draw_weights()
        self.concat = TensorLinear(rank, self.head_dim, **options)
        self.out_proj = TensorLinear(embed_dim, embed_dim, **options)

    def reset_parameters(self) -> None:
        """Draw the projections and the weights anew; S_u starts at a hundredth of the prior's variance."""
        if isinstance(self.feature_map, nn.Module):
            reset_module(self.feature_map)
        self.q_proj.reset_parameters()
        self.k_proj.reset_parameters()
        self._draw_weights()
        self.concat.reset_parameters()
        self.out_proj.reset_parameters()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        draw_orthogonal(self.w_e)
        draw_orthogonal(self.w_r)
        nn.init.uniform_(self.log_sqrt_lambda)
        nn.init.normal_(self.m_u)
        self.s_u.zero_()
        log_deviation = -2.302585 - 2 * self.log_sqrt_lambda
        self.s_u.diagonal(dim1=-2, dim2=-1).copy_(log_deviation[:, None].expand(-1, self.rank, -1))

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """A sample in training, the mean in evaluation, (B, N, d); J and the divergence in training."""
        scores = self.scores(x, attention_mask=attention_mask, is_causal=is_causal)
        values: Tensor = self.m_u
        objective = None
        samples = self.sample if self.training else self.samples_in_evaluation
        penalised = self.training and self.has_penalty
        if samples or penalised:
            with without_autocast(x):
                cholesky = positive_cholesky(exactly(self.s_u))
                if samples:
                    values = sample_normal(exactly(self.m_u), cholesky, x.size(0))
            if penalised:
                objective = self._objective(scores, cholesky, x, attention_mask)
        return self.output(scores, values), objective

    def _objective(
        self, scores: PrimalScores, cholesky: Tensor, x: Tensor, attention_mask: Tensor | None
    ) -> Objective:
        divergence = kernel_gp_divergence(self.log_sqrt_lambda, self.m_u, cholesky)
        if self.eta == 0:
            return Objective(torch.zeros_like(divergence), divergence)
        with without_autocast(x):
            energy = scores_energy(scores, exactly(self.log_sqrt_lambda).exp(), attention_mask)
        value = objective_from_energy(energy, self.w_e, self.w_r, x.size(1), attention_mask=attention_mask)
        return Objective(value, divergence, tokens=num_real(x, attention_mask).sum())

    @property
    def has_penalty(self) -> bool:
        """True where ``eta`` or ``kl_weight`` is above 0."""
        return self.eta > 0 or self.kl_weight > 0

    def weigh_objective(self, objective: Objective) -> Tensor:
        """eta J^2 + kl_weight KL."""
        assert objective.core is not None
        divergence = self.kl_weight * objective.core
        if self.eta == 0:
            return divergence
        square = mean_or_zero(self.square_of(objective))
        return self.eta * square + divergence

    def distribution(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> Distribution:
        """Mean and variance of the layer's outputs, (B, N, d) each, in float32 or better.

        The variance is exact for the layer's Gaussian u; it is that of one output, tokens and channels of a
        sample are correlated. O(N s^2) memory per head.
        """
        self._check(x, None, attention_mask, is_causal)
        scores = self.scores(x, attention_mask=attention_mask, is_causal=is_causal)
        with without_autocast(x):
            cholesky = positive_cholesky(exactly(self.s_u))
            _, variance = kernel_gp_posterior(scores, self.log_sqrt_lambda, self.m_u, cholesky)
            by_head = exactly(self.out_proj.weight).unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            maps = (by_head @ exactly(self.concat.weight)).square()  # (h, d, s)
            spread = (variance @ maps.mT).sum(1)
        return Distribution(exactly(self.output(scores)), spread)

    def scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> PrimalScores:
        """Projection scores e and r of every token, each (B, h, N, s); arguments as in the layer's call."""
        rows, grid = self._sample(x, attention_mask, is_causal) if self.data_dependent else (None, None)
        if is_causal and self.running_means:  # an affine map of the mean is the mean of the map
            x = running_mean(x[:, None], attention_mask).squeeze(1)
        return primal_scores(
            self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x)), self.w_e, self.w_r,
            rows=rows, grid=grid, running_means=False, feature_map=self.feature_map,
            attention_mask=attention_mask, is_causal=is_causal,
        )  # fmt: skip

    def output(self, scores: PrimalScores, values: Tensor | None = None) -> Tensor:
        """The heads' outputs at inducing values u (None: their means), joined and projected, (B, N, d)."""
        values = self.m_u if values is None else values
        heads = self.concat(kernel_gp_attention(scores, self.log_sqrt_lambda, values))
        return self.out_proj(self.merge_heads(heads))

    def why_not_causal(self) -> str | None:
        """A reason for the data-dependent form without ``max_len``."""
        if self.data_dependent and self.max_len is None:
            return (
                "max_len=None: the causal data-dependent form needs max_len, the length of its sampling grid"
            )
        return None

    def why_not_decoding(self) -> str | None:
        """None: the mean is decoded token by token, in training mode too."""
        return None


@register_attention(
    "sgpa",
    summary="sparse Gaussian process with a symmetric kernel and inducing keys, with a variance",
    paper="Chen and Li 2023, SGPA",
    equation="N(K v - K_Z K_ZZ^-1 K_Z^T v + K_Z v_Z, K - K_Z K_ZZ^-1 K_Z^T + S)",
    time="N^2 p + N M^2 p",
    memory="N^2 + N M p",
)
class SparseGPAttention(PenalizedAttention):
    """Sparse Gaussian-process attention (Chen, Li, ICLR 2023), O(N^2 p + N M^2 p) time.

    Queries and keys have one projection, and the kernel is a exp(-||(x - y) / l||^2 / 2). The posterior has
    decoupled inducing points: the sequence's own keys carry the mean, and M learnt keys per head the
    covariance too. In evaluation the layer gives the mean, in training a sample of each token's marginal.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        num_inducing: inducing keys M per head.
        kl_weight: weight of the divergence from the prior in ``auxiliary_loss``. In the evidence lower bound
            of a mean loss it is 1 / (number of training cases).
        sample: whether training draws samples; False: the mean, as in evaluation.
        jitter: what is added to the diagonal of the inducing keys' kernel, in units of a.
        bias: whether the projections have biases.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Attributes:
        inducing_keys: (h, M, p).
        v_z: values of the inducing keys, (h, M, p).
        s_z: factors of the whitened covariances, (h, p, M, M); the diagonal is a log.
        log_scale: log a, (h,).
        log_lengths: log l, (h, p).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_inducing: int = 16,
        kl_weight: float = 1e-3,
        sample: bool = True,
        jitter: float = 1e-5,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(num_inducing=num_inducing)
        require_weight(kl_weight=kl_weight, jitter=jitter)
        require_parameters(
            f"SparseGPAttention: num_inducing={num_inducing}", embed_dim * num_inducing**2,
            "lower num_inducing",
        )  # fmt: skip
        self.num_inducing = num_inducing
        self.kl_weight = kl_weight
        self.sample = sample
        self.samples_in_evaluation = False  # ``predict_distribution`` asks for samples
        self.jitter = jitter
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {**where, "bias": bias}
        self.q_proj = TensorLinear(embed_dim, embed_dim, **options)
        self.v_proj = TensorLinear(embed_dim, embed_dim, **options)
        sizes = (num_heads, num_inducing, self.head_dim)
        self.inducing_keys = nn.Parameter(torch.empty(sizes, **where))
        self.v_z = nn.Parameter(torch.empty(sizes, **where))
        square = (num_heads, self.head_dim, num_inducing, num_inducing)
        self.s_z = nn.Parameter(torch.empty(square, **where))
        self.log_scale = nn.Parameter(torch.empty(num_heads, **where))
        self.log_lengths = nn.Parameter(torch.empty(num_heads, self.head_dim, **where))
        self._draw_weights()
        self.out_proj = TensorLinear(embed_dim, embed_dim, **options)

    def reset_parameters(self) -> None:
        """Draw everything anew; the covariance starts at a hundredth of the prior's at the inducing keys."""
        self.q_proj.reset_parameters()
        self.v_proj.reset_parameters()
        self._draw_weights()
        self.out_proj.reset_parameters()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        nn.init.normal_(self.inducing_keys)
        nn.init.normal_(self.v_z)
        self.s_z.zero_()
        self.s_z.diagonal(dim1=-2, dim2=-1).fill_(-2.302585)
        self.log_scale.zero_()
        self.log_lengths.zero_()

    def posterior(self, x: Tensor, attention_mask: Tensor | None = None) -> SparsePosterior:
        """Mean and variance of the heads' outputs, (B, h, N, p), and the divergences (B,)."""
        q, v = self.split_heads(self.q_proj(x)), self.split_heads(self.v_proj(x))
        with without_autocast(x):
            return sgpa_posterior(
                q, v, self.inducing_keys, self.v_z, positive_cholesky(exactly(self.s_z)), self.log_scale,
                self.log_lengths, jitter=self.jitter, attention_mask=attention_mask,
            )  # fmt: skip

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """A sample in training, the mean in evaluation, (B, N, d); the divergence in training."""
        heads, variance, divergence = self.posterior(x, attention_mask)
        if self.sample if self.training else self.samples_in_evaluation:
            noise = torch.randn_like(heads)
            heads = heads + variance.clamp_min(smallest(variance.dtype)).sqrt() * noise
        y = self.out_proj(self.merge_heads(heads).to(x.dtype))
        if not (self.training and self.has_penalty):
            return y, None
        return y, Objective(mean_or_zero(divergence))

    @property
    def has_penalty(self) -> bool:
        """True where ``kl_weight`` is above 0."""
        return self.kl_weight > 0

    is_squared = False

    def weigh_objective(self, objective: Objective) -> Tensor:
        """kl_weight KL."""
        return self.kl_weight * objective.value

    def distribution(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> Distribution:
        """Mean and variance of the layer's outputs, (B, N, d) each, in float32 or better.

        The channels of the heads are independent, so variances add up through the output projection.
        """
        self._check(x, None, attention_mask, is_causal)
        heads, variance, _ = self.posterior(x, attention_mask)
        mean = self.out_proj(self.merge_heads(heads).to(x.dtype))
        with without_autocast(x):
            spread = self.merge_heads(variance) @ exactly(self.out_proj.weight).square().mT
        return Distribution(exactly(mean), spread)

    def kernel_matrix(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """The kernel between the tokens, (B, h, N, N), zero at padded ones; O(N^2)."""
        q = exactly(self.split_heads(self.q_proj(x))) / exactly(self.log_lengths).exp()[:, None]
        kernel = exactly(self.log_scale).exp()[:, None, None] * unit_kernel(q, q)
        if attention_mask is not None:
            kernel = kernel * (attention_mask[:, None, :, None] & attention_mask[:, None, None, :])
        return kernel

    def why_not_causal(self) -> str | None:
        """A reason: every prefix would have a posterior and a divergence of its own."""
        return "the posterior of a Gaussian process over the whole sequence has no causal form"
