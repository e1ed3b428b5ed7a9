"""Operations of a pass: the multiplications and additions of its matrix products.

They are counted by ``torch.utils.flop_counter`` on tensors that have a size and no values. SDPA is run as its
two products. Our layers with a fused form are counted in the reference form. Norms, exponentials and sums
are no products and are not counted. A layer that cannot run without values (kernels in C++) is run once on
real tokens if they are few, and has no count otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kernel_attention.experiments.benchmarking import timing
from kernel_attention.experiments.benchmarking.contenders import Contender
from kernel_attention.experiments.benchmarking.plans import Setting

_REAL_TOKENS = 16_384  # beyond, one counted pass of an eager layer may not fit


def count_operations(contender: Contender, setting: Setting, passes: Sequence[str]) -> dict[str, object]:
    """Operations by pass, and ``"how"`` they were counted; ``{"how": reason}`` where they cannot be."""
    make = contender.reference or contender.make
    form = "reference form" if contender.reference else "as it is"
    setting = dataclasses.replace(setting, device="cpu", dtype="float32")
    failures = (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError)
    with torch.random.fork_rng(devices=[]):
        try:
            with FakeTensorMode():
                return {**_counted(make, setting, passes), "how": f"{form}, sizes alone"}
        except failures:
            pass
        if setting.tokens > _REAL_TOKENS:
            return {"how": "not counted: needs real tokens"}
        try:
            return {**_counted(make, setting, passes), "how": f"{form}, real tokens"}
        except failures as error:
            return {"how": f"not counted: {timing.reason(error)}"}


def operation_counter() -> FlopCounterMode:
    """PyTorch's counter, which also knows products that are added in place."""
    in_place = (torch.ops.aten.baddbmm_, torch.ops.aten.addmm_)
    return FlopCounterMode(display=False, custom_mapping=dict.fromkeys(in_place, _added_product))


def _added_product(into: Sequence[int], left: Sequence[int], right: Sequence[int], **rest: object) -> int:
    return 2 * math.prod(left) * right[-1]


def _counted(
    make: Callable[[Setting], nn.Module], setting: Setting, passes: Sequence[str]
) -> dict[str, object]:
    layer, x, cotangent = timing.layer_and_data(make, setting)
    counts: dict[str, object] = {}
    with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the fused kernels on CPU
        for kind in passes:
            layer.train(kind == "step")
            with operation_counter() as counter:
                timing.step(layer, x, cotangent) if kind == "step" else timing.forward(layer, x)
            counts[kind] = int(counter.get_total_flops())
    return counts


def primal_operations(
    embed_dim: int, num_heads: int, *, objective: bool, training: bool, kernels: bool = False
) -> int:
    """Operations of the fused non-causal primal layer per token, by hand.

    With p = d / h: z = [W_q; W_k] x costs 4 d^2. Up to two heads the output map is folded into the heads'
    (2d -> d, 4 d^2); above, and in the Triton kernels (``kernels``), a head maps 2p -> p and the output map
    follows, 4 d p + 2 d^2. The Gram matrices of the objective cost 4 d p. The backward pass computes z again
    (4 d^2), takes the gradients of maps and z (twice the map's cost), of x and of W (twice 4 d^2), and 4 d p
    for the objective's.
    """
    head_dim = embed_dim // num_heads
    project = 4 * embed_dim**2
    mapped, out = (
        (4 * embed_dim**2, 0)
        if num_heads <= 2 and not kernels
        else (4 * embed_dim * head_dim, 2 * embed_dim**2)
    )
    gram = 4 * embed_dim * head_dim if objective else 0
    inference = project + mapped + out
    if not training:
        return inference
    return inference + gram + (3 * project + 2 * mapped + 2 * out + gram)


def primal_bytes(embed_dim: int, *, training: bool, itemsize: int = 4) -> int:
    """Bytes a token must move at least: x in, y out; backward x and dy in, dx out. z stays in the cache."""
    return itemsize * embed_dim * (5 if training else 2)
