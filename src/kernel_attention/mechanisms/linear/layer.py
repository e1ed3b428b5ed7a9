"""Linear attention as a layer."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from kernel_attention.core.calls import Objective
from kernel_attention.core.engine import AUTO, REFERENCE, LayerPlan, checked_impl, choose, plan_call
from kernel_attention.core.parameters import Device
from kernel_attention.core.query_key_value import QueryKeyValueAttention
from kernel_attention.core.registry import register_attention
from kernel_attention.mechanisms.linear.fla import ENGINES, LinearCall
from kernel_attention.mechanisms.linear.joint import has_linear_pass, linear_pass
from kernel_attention.mechanisms.linear.kernel import LinearKernel
from kernel_attention.tensors.features.feature_maps import FeatureMapSpec, frobenius, named_feature_map
from kernel_attention.tensors.packing import PackedSequences


@register_attention(
    "cosine",
    summary="normalised queries and keys, no softmax",
    paper="released code of Primal-Attention",
    equation="phi(q) phi(k)^T v, phi(x) = x/||x||",
    time="N p^2",
    memory="N p",
    state="constant",
    preset={"feature_map": "cosine", "normalize": False},
)
@register_attention(
    "linear",
    summary="feature maps instead of softmax (elu + 1 and others)",
    paper="Katharopoulos et al. 2020",
    equation="phi(q) (phi(k)^T v) / (phi(q) sum phi(k))",
    time="N p^2",
    memory="N p",
    state="constant",
)
class LinearAttention(QueryKeyValueAttention):
    """Linear attention (Katharopoulos et al. 2020): O(N) time and memory, causal or not.

    o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j).

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        feature_map: phi: "elu" (elu(x) + 1), "relu", "cosine", "frobenius", "identity", "hedgehog"
            (softmax(x) and softmax(-x)), "softmax_plus" (positive random features of the softmax kernel),
            "taylor" (its truncated series), ``{name: options}`` for the last two, or a callable of
            ``kernel_attention.features``.
        normalize: whether to divide by the sum; None: where the feature map's kernel is never negative.
        bias: whether the four projections have biases.
        impl: "auto", "reference" or "fla"; see ``plan``. "fla" is the kernel of flash-linear-attention for
            the causal form on NVIDIA GPUs, in bfloat16; "auto" takes it where it is installed.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    kernel: LinearKernel

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMapSpec = "elu",
        normalize: bool | None = None,
        bias: bool = True,
        impl: Literal["auto", "reference", "fla"] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        self.kernel = LinearKernel(
            self.head_dim,
            feature_map=feature_map,
            normalize=normalize,
            device=device,
            dtype=dtype,
        )
        self.impl = checked_impl(impl, ENGINES, retired=("triton",))
        self.add_projections(bias, device=device, dtype=dtype)

    def head_outputs(
        self,
        x: Tensor,
        source: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        is_self: bool,
        as_matrix: bool = False,
    ) -> Iterator[Tensor]:
        """The outputs of all heads, (B, h, N, p), by one product and one pass where these save time."""
        kernel = self.kernel
        if not as_matrix and self.sequence_group is None:
            call = self._call(x, is_causal, is_whole=source is x and mask is None)
            engine, _ = choose(self.impl, ENGINES, call)
            if engine is not None:
                heads = self.projected(x, source)
                yield engine.attend(call._replace(heads=heads)).transpose(1, 2)
                return
        is_few = self.impl == AUTO and source is x and not as_matrix and self.sequence_group is None
        # A CPU gains by the pass where it is causal, and else by its backward pass from the weights' sums.
        on_cpu = is_causal or (kernel.normalize and torch.is_grad_enabled())
        if is_few and has_linear_pass(kernel.feature_map) and self.is_joint(x, on_cpu=on_cpu):
            z = self.joint_projection(x)
            z = z.unflatten(-1, (3, self.num_heads, -1))
            yield linear_pass(z, kernel.feature_map, kernel.normalize, mask, is_causal).transpose(1, 2)
        else:
            yield from super().head_outputs(x, source, mask, is_causal, is_self, as_matrix)

    def attend_packed(
        self, x: Tensor, packed: PackedSequences, is_causal: bool
    ) -> tuple[Tensor, Objective | Tensor | None] | Tensor:
        """As a padded batch, unless an engine takes the row as it is."""
        call = self._call(x, is_causal, packed=packed)
        engine, _ = choose(REFERENCE if self.impl == REFERENCE else AUTO, ENGINES, call)
        if engine is None:
            return super().attend_packed(x, packed, is_causal)
        return self.out_proj(engine.attend(call._replace(heads=self.projected(x, x))).flatten(2))

    def plan(self, x: Tensor, *, is_causal: bool = False, compiled: bool | None = None) -> LayerPlan:
        """Which engine serves a call, and why."""
        return plan_call(self.impl, ENGINES, self._call(x, is_causal), compiled=compiled)

    def _call(self, x: Tensor, is_causal: bool, **more: Any) -> LinearCall:
        kernel = self.kernel
        sizes = (self.num_heads, self.head_dim)
        return LinearCall(x, *sizes, kernel.feature_map, kernel.normalize, is_causal, **more)

    def reads_queries_alone(self) -> bool:
        """Unless the feature map normalises over the sequence."""
        return self.kernel.feature_map is not frobenius

    def option_value(self, name: str) -> Any:
        """An option's value; one that is kept by the kernel or in another form is read from there."""
        if name not in ("feature_map", "normalize"):
            return super().option_value(name)
        return named_feature_map(getattr(self.kernel, name))
