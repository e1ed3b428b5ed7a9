"""Sparse Gaussian-process attention with inducing keys, as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.parameters import Device, TensorLinear
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.core.registry import register_attention
from kernel_attention.core.validation import require_positive, require_weight
from kernel_attention.mechanisms.gaussian_process.functional import (
    Distribution,
    SparsePosterior,
    positive_cholesky,
    sgpa_posterior,
    unit_kernel,
)
from kernel_attention.memory_limit import require_parameters
from kernel_attention.tensors.statistics import exactly, mean_or_zero, smallest, without_autocast


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
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

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
