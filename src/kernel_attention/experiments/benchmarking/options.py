"""A plan from command-line options: a suite, or given contenders at given sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernel_attention.errors import unknown
from kernel_attention.experiments.benchmarking.plans import ContenderSpec, Plan
from kernel_attention.experiments.benchmarking.suites import SUITES

SIZES = ("length", "embed_dim", "num_heads", "batch_size", "dtype", "threads", "device")


def plan_from_options(
    suite: str | None,
    contenders: Sequence[ContenderSpec],
    options: Mapping[str, Any],
    is_causal: bool | None = None,
) -> Plan:
    """The suite, with the given options in place of its own.

    Args:
        suite: a name of ``SUITES``; None: every mechanism, or the given contenders, at the given sizes.
        contenders: replace those of the suite; its baseline stays.
        options: values by name of a size or of a field of the plan; None: not given.
        is_causal: whether the layers are causal.
    """
    if suite is not None and suite not in SUITES:
        raise unknown("suite", suite, SUITES)
    plan = SUITES[suite or "all"]
    given = {name: value for name, value in options.items() if value is not None}
    grid = {"threads": (torch.get_num_threads(),), **plan.grid}
    grid |= {name: tuple(given[name]) for name in SIZES if name in given}
    if is_causal is not None:
        grid["is_causal"] = (is_causal,)
    changed: dict[str, Any] = {"grid": grid}
    changed |= {name: given[name] for name in ("rounds", "memory", "flops") if name in given}
    if "passes" in given:
        changed["passes"] = tuple(given["passes"])
    if contenders:
        has_baseline = not plan.baseline or plan.baseline in contenders
        changed["causal_contenders"] = ()
        changed["contenders"] = (*(() if has_baseline else (plan.baseline,)), *contenders)
        if suite is None:
            changed |= {"title": "One attention layer", "shows": "", "memory": given.get("memory", True)}
    return dataclasses.replace(plan, **changed)
