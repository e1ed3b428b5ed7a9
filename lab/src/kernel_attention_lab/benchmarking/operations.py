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

from kernel_attention_lab.benchmarking import timing
from kernel_attention_lab.benchmarking.contenders import Contender
from kernel_attention_lab.benchmarking.plans import Setting

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


def count_parameters(contender: Contender, setting: Setting) -> int:
    """Numbers that are learnt."""
    with torch.random.fork_rng(devices=[]):
        return sum(parameter.numel() for parameter in contender.make(setting).parameters())


def operation_counter() -> FlopCounterMode:
    """PyTorch's counter, which also knows products that are added in place."""
    in_place = (torch.ops.aten.baddbmm_, torch.ops.aten.addmm_)
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(in_place, _added_product))
    # Its hooks on all modules, which tell modules apart, would put layers off the forms to be counted.
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


class _NoModules:
    """The counter's record of modules, which knows the whole alone."""

    parents = frozenset(("Global",))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


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
