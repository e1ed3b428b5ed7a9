"""Which form of a layer runs for an input, where it has several that give the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.tensors.padding import is_exporting
from kernel_attention.tensors.recompute import only_formulas


class LayerPlan(NamedTuple):
    """The form of a layer that runs for an input, and the reason.

    ``form`` is "reference", the formulas, or a faster form that an option ``impl`` of the layer names.
    """

    form: str
    reason: str


class PaysFrom(NamedTuple):
    """The numbers of tokens from which a faster form was measured to pay on a device; None: from none on."""

    eager: int | None
    compiled: int | None
    form: str = "fused"


def choose_form(
    impl: str, x: Tensor, lacking: str | None, pays_from: Mapping[str, PaysFrom], *, is_sharded: bool,
    compiled: bool | None = None,
) -> LayerPlan:  # fmt: skip
    """The form of a layer whose formulas have a faster twin from some length on.

    Args:
        impl: the layer's option: "auto", "reference" or the name of a faster form.
        x: the layer's input, (B, N, d).
        lacking: what the layer's options or the call need that the faster forms have not; None: nothing.
        pays_from: what was measured, by type of device.
        is_sharded: whether processes share every sequence, which the formulas cannot.
        compiled: whether torch.compile runs the layer; None: whether it does now.

    Raises:
        InputError: for a faster form that was asked for and does not exist.
    """
    if impl == "reference":
        return LayerPlan("reference", "impl='reference'")
    if not (torch.compiler.is_compiling() or is_sharded) and x.size(0) == 0:
        return LayerPlan("reference", "there are no sequences")
    lacking = lacking or only_formulas()
    if impl != "auto":
        if lacking is not None:
            raise InputError(f"impl={impl!r}: {lacking}; use impl='auto' or 'reference'")
        return LayerPlan(impl, f"impl={impl!r}")
    if is_sharded:
        return LayerPlan("fused", "processes share the sequence")
    if lacking is not None:
        return LayerPlan("reference", lacking)
    if is_exporting():
        return LayerPlan("reference", "an exported program should run without this package")
    device = x.device.type
    measured = pays_from.get(device, PaysFrom(None, None))
    compiled = torch.compiler.is_compiling() if compiled is None else compiled
    how, least = ("compiled", measured.compiled) if compiled else ("eager", measured.eager)
    if least is None:
        return LayerPlan("reference", f"no other form was measured to be faster ({device}, {how})")
    if x.size(1) < least:
        return LayerPlan("reference", f"fewer than {least} tokens ({device}, {how})")
    return LayerPlan(measured.form, f"at least {least} tokens ({device}, {how})")
