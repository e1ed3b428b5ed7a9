"""Running a plan: times, peaks and operations of every contender in every setting."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention_lab.benchmarking import machine, timing
from kernel_attention_lab.benchmarking.contenders import Contender, find_contender
from kernel_attention_lab.benchmarking.memory import measure_peaks
from kernel_attention_lab.benchmarking.operations import count_operations, count_parameters
from kernel_attention_lab.benchmarking.plans import ContenderSpec, Plan, Setting, check_plan

FORMAT = 1  # of the record; readers refuse another


def run_benchmark(
    plan: Plan,
    *,
    seed: int = 0,
    warmup: int = 1,
    on_progress: Callable[[str], None] = lambda line: None,
    kept: Callable[[dict[str, Any]], object] = lambda record: None,
) -> dict[str, Any]:
    """Measure a plan.

    Args:
        plan: contenders and settings.
        seed: seed of the orders of the contenders.
        warmup: passes before the first one that is timed.
        on_progress: called with a line about the current measurement.
        kept: called with the record so far after every setting, so an interrupted run leaves a record.

    Returns:
        A record of JSON's types: ``machine``, ``plan``, ``absent`` and ``cells``, one per setting with one
        row per contender. Times in seconds, memory in bytes, operations in counts.

    Raises:
        InputError: for an unknown contender, size, dtype or device.
    """
    check_plan(plan)
    if warmup < 0:
        raise InputError(f"warmup={warmup} must be 0 or more")
    contenders = {find_contender(spec).name: spec for spec in (*plan.contenders, *plan.causal_contenders)}
    record: dict[str, Any] = {
        "format": FORMAT,
        "machine": {
            **machine.describe_machine({setting.device for setting in plan.settings()}),
            "load_before": machine.load(),
        },
        "plan": {
            "title": plan.title,
            "shows": plan.shows,
            "baseline": plan.baseline,
            "passes": list(plan.passes),
            "contenders": list(contenders),
            "seed": seed,
            "warmup": warmup,
            "command": ["kernel-attention", *sys.argv[1:]],
        },
        "cells": [],
    }
    absent: dict[str, str] = {}
    for setting in plan.settings():
        here = {find_contender(spec).name: spec for spec in plan.contenders_of(setting)}
        record["cells"].append(_cell(plan, here, setting, absent, seed, warmup, on_progress))
        record["absent"] = [{"contender": name, "reason": why} for name, why in absent.items()]
        record["machine"]["load_after"] = machine.load()
        kept(record)
    return record


def _cell(
    plan: Plan,
    contenders: dict[str, ContenderSpec],
    setting: Setting,
    absent: dict[str, str],
    seed: int,
    warmup: int,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure one setting; contenders that cannot be measured are added to ``absent``."""
    here = ", ".join(f"{name} {value}" for name, value in setting.record().items())
    present: list[Contender] = []
    for spec in contenders.values():
        contender = find_contender(spec)
        why = contender.absence(setting)
        if why:
            absent[contender.name] = why
        else:
            present.append(contender)
    rounds = plan.rounds_of(setting)
    times, orders, failed = timing.time_rounds(
        present, setting, plan.passes, rounds,
        warmup=warmup, seed=seed, on_progress=lambda line: on_progress(f"{here}: {line}"),
    )  # fmt: skip
    summaries = timing.summarize(times, plan.baseline)
    rows = []
    for contender in present:
        row: dict[str, Any] = {"contender": contender.name}
        if contender.name in failed:
            rows.append({**row, "failed": failed[contender.name]})
            continue
        row["time"] = summaries[contender.name]
        row["parameters"] = count_parameters(contender, setting)
        if plan.flops:
            on_progress(f"{here}: {contender.name}: operations")
            row["operations"] = count_operations(contender, setting, plan.passes)
        if plan.memory:
            on_progress(f"{here}: {contender.name}: memory")
            row["memory"] = measure_peaks(contenders[contender.name], setting, plan.passes)
        rows.append(row)
    cell = {"setting": setting.record(), "rounds": rounds, "orders": orders, "rows": rows}
    if plan.roofline:
        on_progress(f"{here}: ceilings")
        cell |= _roofline(contenders, rows, setting)
    return cell


def _roofline(
    contenders: dict[str, ContenderSpec], rows: list[dict[str, Any]], setting: Setting
) -> dict[str, Any]:
    """The ceilings, and the times that they allow every contender whose work is counted."""
    ceilings = machine.measure_ceilings(setting)
    rooflines = []
    for row in rows:
        if "failed" in row:
            continue
        layer = find_contender(contenders[row["contender"]]).make(setting)
        if not isinstance(layer, AttentionLayer):  # another library's, or the causal form of one of ours
            continue
        # Ceilings are those of an idle machine, so these times are lower quartiles too.
        seconds = {kind: figures["lower"] for kind, figures in row["time"].items()}
        counted = machine.roofline(setting, ceilings, seconds, layer)
        rooflines += [{"contender": row["contender"], **line} for line in counted]
    return {"ceilings": ceilings, "roofline": rooflines}
