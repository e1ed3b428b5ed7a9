"""Ridge attention, its kernel, and the delta rule as layers."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.decoding import Position, whole_lengths
from kernel_attention.core.engine import AUTO, REFERENCE, LayerPlan, checked_impl, choose, plan_call
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.parameters import Device, reset_submodules
from kernel_attention.core.query_key_value import QueryKeyValueAttention
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import InputError
from kernel_attention.mechanisms.regression.decoding import (
    RidgeMemory,
    delta_step,
    empty_delta,
    empty_ridge,
    read_delta,
    read_ridge,
    ridge_step,
)
from kernel_attention.mechanisms.regression.fla import ENGINES, DeltaCall
from kernel_attention.mechanisms.regression.functional import delta_attention, ridge_attention
from kernel_attention.tensors.features.feature_maps import (
    FeatureMapSpec,
    frobenius,
    get_feature_map,
    is_tokenwise,
    named_feature_map,
)
from kernel_attention.tensors.packing import PackedSequences
from kernel_attention.tensors.statistics import exactly

LEAST_FORGETTING = 0.9  # a block of 16 tokens loses gamma^-16 of its digits, here less than one


class RidgeKernel(AttentionKernel):
    """phi(q) (phi(k)^T phi(k) + lambda I)^-1 phi(k)^T with lambda, and gamma where pairs fade, as parameters.

    ``lam`` and ``forgetting`` are lambda and gamma at the start; without ``forgetting`` no pair fades.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMapSpec = "cosine",
        lam: float,
        forgetting: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.feature_map = get_feature_map(feature_map, head_dim, device=device, dtype=dtype)
        self.first_lambda, self.first_forgetting = lam, forgetting
        self.reads_positions = forgetting is not None
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.raw_lambda = nn.Parameter(torch.empty(num_heads, **where))
        self.raw_forgetting = None if forgetting is None else nn.Parameter(torch.empty(num_heads, **where))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """lambda and gamma as at the start, in every head."""
        reset_submodules(self)
        nn.init.constant_(self.raw_lambda, inverse_softplus(self.first_lambda))
        if self.raw_forgetting is not None and self.first_forgetting is not None:
            share = (self.first_forgetting - LEAST_FORGETTING) / (1 - LEAST_FORGETTING)
            nn.init.constant_(self.raw_forgetting, math.log(share / (1 - share)))

    @property
    def lam(self) -> Tensor:
        """lambda, (h,)."""
        return nn.functional.softplus(exactly(self.raw_lambda))

    @property
    def forgetting(self) -> Tensor | None:
        """gamma, (h,)."""
        if self.raw_forgetting is None:
            return None
        return LEAST_FORGETTING + (1 - LEAST_FORGETTING) * exactly(self.raw_forgetting).sigmoid()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: Any) -> Tensor:
        """``ridge_attention``, with its options. ``dropout_p`` is not read: no weights are formed."""
        return ridge_attention(
            q, k, v, self.lam, feature_map=self.feature_map, forgetting=self.forgetting, **options
        )

    def empty_memory(self, like: Tensor) -> RidgeMemory:
        """The sums of no pairs; ``like`` is (B, h, N, p)."""
        return empty_ridge(self.feature_map, like)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> RidgeMemory:
        """The sums over a prompt; q, k, v are (B, h, N, p)."""
        return read_ridge(self.feature_map, self.forgetting, q, k, v, lengths)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: RidgeMemory, position: Position, factor: int = 1
    ) -> tuple[Tensor, RidgeMemory]:
        """Add one key and value to the sums, fit anew and read the query, (B, h, 1, p) each."""
        return ridge_step(self.feature_map, self.lam, self.forgetting, q, k, v, memory, position)

    def why_not_sharded(self) -> str | None:
        """A reason unless the ranks' sums add up: by a feature map of single tokens, without forgetting."""
        if self.raw_forgetting is not None:
            return "with forgetting the ranks' sums would have to fade on the way"
        if is_tokenwise(self.feature_map):
            return None
        return "its feature map is not known to work token by token, as cosine, elu, identity and relu do"

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        name = getattr(self.feature_map, "__name__", type(self.feature_map).__name__)
        return f"feature_map={name}, lam={self.first_lambda}, forgetting={self.first_forgetting}"


def inverse_softplus(value: float) -> float:
    """x with log(1 + exp(x)) = value, which is above 0."""
    return value + math.log(-math.expm1(-value))


def require_start(lam: float, forgetting: float | None = None) -> None:
    """Raise InputError for a lambda or a gamma that a layer cannot start from."""
    if not (isinstance(lam, int | float) and not isinstance(lam, bool) and 0 < lam < math.inf):
        raise InputError(f"lam={lam!r} must be a number above 0")
    if forgetting is not None and not (isinstance(forgetting, float) and LEAST_FORGETTING < forgetting < 1):
        raise InputError(
            f"forgetting={forgetting!r} must be a number between {LEAST_FORGETTING} and 1, or None"
        )


_FIRST_DECAY = 4.0  # its sigmoid is 0.982: a pair keeps half its weight for 38 tokens


@register_attention(
    "gated_delta",
    summary="the delta rule with a learnt decay",
    paper="Yang et al. 2025",
    equation="W_j = alpha_j W_j-1 + beta_j k_j (v_j - alpha_j W_j-1^T k_j)^T",
    time="N p^2",
    memory="N p",
    state="constant",
    preset={"gated": True},
)
@register_attention(
    "delta",
    summary="one gradient step of regression for each pair",
    paper="Schlag et al. 2021, Yang et al. 2024",
    equation="W_j = W_j-1 + beta_j k_j (v_j - W_j-1^T k_j)^T",
    time="N p^2",
    memory="N p",
    state="constant",
)
class DeltaAttention(QueryKeyValueAttention):
    """Attention to a memory that the delta rule writes, token by token; O(N p^2) time.

    o_i = q_i^T W_i with W_i = alpha_i W_{i-1} + beta_i k_i (v_i - alpha_i W_{i-1}^T k_i)^T, and q and k of
    unit length. beta_i = sigmoid(a projection of the token), one number for each head. Without a causal call
    all queries read the last memory: that of the whole sequence, written in its order.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        gated: whether the memory decays, alpha_i = sigmoid(another projection); otherwise alpha is 1.
        bias: whether queries, keys, values and the output have biases; steps and decays have them.
        impl: "auto", "reference" or "fla"; see ``plan``. "fla" are the kernels of flash-linear-attention for
            the causal form on NVIDIA GPUs, in bfloat16; "auto" takes them where it is installed.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    impl = AUTO  # of layers pickled by a version that had no engine

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        gated: bool = False,
        bias: bool = True,
        impl: Literal["auto", "reference", "fla"] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        self.gated = gated
        self.impl = checked_impl(impl, ENGINES)
        self.add_projections(bias, device=device, dtype=dtype)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.step_proj = nn.Linear(embed_dim, num_heads, **where)
        self.decay_proj = nn.Linear(embed_dim, num_heads, **where) if gated else None
        self._set_decays()

    def reset_parameters(self) -> None:
        """Draw the projections anew; decays start near 1."""
        super().reset_parameters()
        self._set_decays()

    @torch.no_grad()
    def _set_decays(self) -> None:
        if self.decay_proj is not None:
            nn.init.constant_(self.decay_proj.bias, _FIRST_DECAY)

    def steps(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        """beta and log alpha of every token of ``source`` (B, S, d), (B, h, S) each."""
        step = exactly(self.step_proj(source)).sigmoid().mT
        if self.decay_proj is None:
            return step, None
        return step, nn.functional.logsigmoid(exactly(self.decay_proj(source))).mT

    def head_outputs(
        self,
        x: Tensor,
        source: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        is_self: bool,
        as_matrix: bool = False,
    ) -> Iterator[Tensor]:
        """The outputs of the heads, (B, h, N, p); with ``as_matrix`` what multiplies the values."""
        q, k, v = self.projected(x, source, as_matrix)
        step, log_decay = self.steps(source)
        if not as_matrix:
            call = self._call(x, is_causal, is_whole=source is x and mask is None)
            engine, _ = choose(self.impl, ENGINES, call)
            if engine is not None:
                heads = tuple(each for each in (q, k, v, step, log_decay) if each is not None)
                yield engine.attend(call._replace(heads=heads)).transpose(1, 2)
                return
        yield delta_attention(q, k, v, step, log_decay, attention_mask=mask, is_causal=is_causal)

    def attend_packed(
        self, x: Tensor, packed: PackedSequences, is_causal: bool
    ) -> tuple[Tensor, Objective | Tensor | None] | Tensor:
        """As a padded batch, unless an engine takes the row as it is."""
        call = self._call(x, is_causal, packed=packed)
        engine, _ = choose(REFERENCE if self.impl == REFERENCE else AUTO, ENGINES, call)
        if engine is None:
            return super().attend_packed(x, packed, is_causal)
        heads = tuple(each for each in (*self.projected(x, x), *self.steps(x)) if each is not None)
        return self.out_proj(engine.attend(call._replace(heads=heads)).flatten(2))

    def plan(self, x: Tensor, *, is_causal: bool = False, compiled: bool | None = None) -> LayerPlan:
        """Which engine serves a call, and why."""
        return plan_call(self.impl, ENGINES, self._call(x, is_causal), compiled=compiled)

    def _call(self, x: Tensor, is_causal: bool, **more: Any) -> DeltaCall:
        return DeltaCall(x, self.num_heads, self.head_dim, self.gated, is_causal, **more)

    def why_not_heads(self) -> str | None:
        """The steps are made of the layer's input."""
        return "its steps are projections of the tokens, which queries, keys and values do not hold"

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Raise InputError: ``why_not_heads`` says why."""
        raise InputError(f"{type(self).__name__} cannot attend with given heads: {self.why_not_heads()}")

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """The memory of one part is where the next one starts."""
        return "its memory is written token after token, and each rank would wait for the one before it"

    def reads_positions(self) -> bool:
        """False: padded tokens write nothing, wherever they are."""
        return False

    def start_decoding(self, batch_size: int) -> Any:
        """An empty memory."""
        return empty_delta(self.no_elements().new_empty(batch_size, self.num_heads, 0, self.head_dim))

    def decode_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Write the token's pair into the memory, then read it with the token's query."""
        q, k = self.queries_and_keys(x, x)
        v = self.split_heads(self.v_proj(x))
        out, state = delta_step(q, k, v, *self.steps(x), state)
        return self.out_proj(self.merge_heads(out)), state

    def read_prompt(self, x: Tensor, lengths: Tensor | None) -> Any:
        """Write the whole prompt at once."""
        _, k = self.queries_and_keys(x, x)
        v = self.split_heads(self.v_proj(x))
        return read_delta(k, v, *self.steps(x), whole_lengths(x, lengths))

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{super().extra_repr()}, gated={self.gated}"


@register_attention(
    "ridge",
    summary="kernel ridge regression of values on keys",
    paper="von Oswald et al. 2025; block form derived here",
    equation="phi(q) (phi(k)^T phi(k) + lambda I)^-1 phi(k)^T v",
    time="N p^2",
    memory="N p",
    state="constant",
)
class RidgeAttention(QueryKeyValueAttention):
    """Ridge attention: the map from keys to values, fitted anew to what a query sees; O(N p^2) time.

    o_i = phi(q_i)^T (sum_j phi(k_j) phi(k_j)^T + lambda I)^-1 sum_j phi(k_j) v_j^T, in the causal form over
    j <= i, exactly. lambda is learnt, one for each head.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        lam: lambda at the start, above 0. A large one starts near linear attention (docs: Ridge attention).
        feature_map: phi: "cosine" (x / ||x||), "elu", "relu", "frobenius", "identity", "softmax_plus",
            "taylor", ``{name: options}`` for the last two, or a callable of ``kernel_attention.features``.
        forgetting: gamma at the start, between 0.9 and 1; it is learnt, one for each head. Each later pair
            lowers the weight of a pair, and lambda, by this factor. None: all pairs count alike.
        bias: whether the four projections have biases.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Attributes:
        kernel: a module with the parameters ``raw_lambda`` (h,), whose softplus is lambda, and
            ``raw_forgetting`` (h,), and with lambda and gamma themselves as ``lam`` and ``forgetting``.
    """

    kernel: RidgeKernel

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        lam: float = 10.0,
        feature_map: FeatureMapSpec = "cosine",
        forgetting: float | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_start(lam, forgetting)
        self.lam = lam
        self.forgetting = forgetting
        self.kernel = RidgeKernel(
            self.head_dim, num_heads, feature_map=feature_map, lam=lam, forgetting=forgetting,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.add_projections(bias, device=device, dtype=dtype)

    def reads_queries_alone(self) -> bool:
        """Unless the feature map normalises over the sequence."""
        return self.kernel.feature_map is not frobenius

    def option_value(self, name: str) -> Any:
        """An option's value; the feature map is kept by the kernel."""
        if name != "feature_map":
            return super().option_value(name)
        return named_feature_map(self.kernel.feature_map)
