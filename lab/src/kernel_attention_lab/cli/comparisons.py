"""The commands that compare: ``bench`` layers, ``sweep`` recipes, ``reproduce`` the tables of papers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError, note, writing
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.cli.progress import progress
from kernel_attention_lab.options import Bench, Reproduce, Sweep
from kernel_attention_lab.plugins import load_plugins, require_plugins
from kernel_attention_lab.provenance import code_revision

if TYPE_CHECKING:
    from kernel_attention_lab.benchmarking import Plan
    from kernel_attention_lab.sweeping import SweepFolder, SweepPlan

_MOST_WORKERS = 256


def bench_command(options: Bench) -> int:
    """Measure attention layers side by side."""
    from rich.console import Console

    from kernel_attention_lab.benchmarking import plan_from_options, run_benchmark
    from kernel_attention_lab.benchmarking.comparisons import ROW_SUITES
    from kernel_attention_lab.evidence.benchmarks import benchmark_tables, write_benchmark

    if options.record is not None and str(code_revision().get("revision", "")).endswith("+"):
        raise InputError(f"record {options.record}: the checkout has uncommitted changes; commit them first")
    if options.suite in ROW_SUITES and options.against is None:
        return _bench_rows(options)
    plan = plan_from_options(options.suite, options.attention, vars(options), options.causal)
    if options.against is not None:
        return _bench_against(options.against, options, plan)
    folder = _bench_folder(options)
    console = Console(width=None if sys.stdout.isatty() else 200)
    with progress() as on_progress:
        record = run_benchmark(
            plan,
            seed=options.seed,
            warmup=options.warmup,
            on_progress=on_progress,
            kept=lambda record: write_benchmark(record, folder),
        )
    _note_busy(record["machine"])
    files = [*write_benchmark(record, folder), *_keep(record, options)]
    for table in benchmark_tables(record):
        console.print(table)
    for entry in record["absent"]:
        console.print(f"{entry['contender']}: absent ({entry['reason']})")
    console.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
    return 0


def _note_busy(machine: Mapping[str, Any]) -> None:
    """Note that other programs were running when the measurement began."""
    load, processors = machine.get("load_before", []), os.cpu_count() or 1
    if load and load[0] > processors / 2:
        note(
            f"the machine was busy before the first measurement (load {load[0]:.1f} on {processors} CPUs): "
            "contenders measured beside other programs cannot be compared; measure again when it is idle"
        )


def _bench_folder(options: Bench) -> Path:
    return Path(options.output or f"runs/bench-{options.suite or 'layers'}-{time.strftime('%Y%m%d-%H%M%S')}")


def _bench_rows(options: Bench) -> int:
    """Measure a suite whose record has a row for every ratio or rate."""
    from kernel_attention_lab.benchmarking.comparisons import run_rows

    assert options.suite is not None
    with progress() as on_progress:
        record = run_rows(options.suite, rounds=options.rounds, on_progress=on_progress)
    files = [_write(record, _bench_folder(options) / "benchmark.json"), *_keep(record, options)]
    for row in record["rows"]:
        print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()))  # fmt: skip
    print(f"written: {', '.join(map(str, files))}")
    return 0


def _keep(record: Mapping[str, Any], options: Bench) -> list[Path]:
    """The file that ``record`` names, written without the orders of the rounds."""
    if options.record is None:
        return []
    cells = [{key: cell[key] for key in cell if key != "orders"} for cell in record.get("cells", ())]
    return [_write({**record, **({"cells": cells} if cells else {})}, Path(options.record))]


def _write(record: Mapping[str, Any], path: Path) -> Path:
    with writing(f"output {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(record, indent=1) + "\n")
    return path


def _bench_against(reference: str, options: Bench, plan: Plan) -> int:
    """Time this code against a revision. The exit code is 1 where something got slower."""
    from rich.console import Console

    from kernel_attention_lab.benchmarking import measure_against
    from kernel_attention_lab.benchmarking.contenders import find_contender
    from kernel_attention_lab.benchmarking.plans import check_plan
    from kernel_attention_lab.benchmarking.revisions import ROUNDS, BenchmarkFailedError
    from kernel_attention_lab.evidence.benchmarks import (
        revision_table,
        verdict_lines,
        write_revisions,
    )

    check_plan(plan)
    for spec in plan.contenders:
        find_contender(spec)
    folder = Path(options.output or f"runs/bench-against-{time.strftime('%Y%m%d-%H%M%S')}")
    rounds = ROUNDS if options.rounds is None else options.rounds
    try:
        with progress() as on_progress:
            record = measure_against(
                reference,
                _bench_arguments(options),
                rounds=rounds,
                seed=options.seed,
                on_progress=on_progress,
            )
    except BenchmarkFailedError as error:
        print(f"failed: {error}; nothing was written", file=sys.stderr)
        return 1
    files = write_revisions(record, folder)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(revision_table(record))
    for line in verdict_lines(record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
    return 1 if any(row["verdict"] == "slower" for row in record["rows"]) else 0


def _bench_arguments(options: Bench) -> list[str]:
    """The words of ``bench`` that say what is measured."""
    words = [spec if isinstance(spec, str) else json.dumps(spec) for spec in options.attention]
    sizes = ("length", "embed_dim", "num_heads", "batch_size", "threads", "dtype", "device", "passes")
    chosen = {name: getattr(options, name) for name in (*sizes, "suite", "causal", "warmup")}
    for name, value in chosen.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            words += [
                f"--{name}",
                *(str(each).lower() if isinstance(each, bool) else str(each) for each in values),
            ]
    return [*words, *(word for plugin in options.plugin for word in ("--plugin", plugin))]


def reproduce_command(options: Reproduce) -> int:
    """Run what a suite lacks, and compare."""
    from rich.console import Console

    from kernel_attention_lab.evidence import (
        Places,
        estimates,
        find,
        read_suite,
        run_cells,
        untrained_starts,
        write_page,
    )
    from kernel_attention_lab.evidence.suite_page import missing_notes, screen_tables, state_table

    suite = read_suite(options.suite).with_protocol(options.protocol)
    places = Places(Path(options.runs), Path(options.results), options.data_root)
    cells = list(suite.cells(options.rows, options.columns, options.seeds))
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.dry_run:
        found = estimates(suite, cells, places)
        console.print(state_table(suite.title, found))
        for note in missing_notes(found):
            console.print(note, markup=False, soft_wrap=True)
        for start in untrained_starts(suite, cells, places):
            console.print(f"trained before them: {start.cell} of suite {start.suite.name}", markup=False)
        return 0
    try:
        with progress(seconds=0) as on_progress:
            outcome = run_cells(
                suite, cells, places, on_progress, workers=options.workers, plugins=options.plugin
            )
    except KeyboardInterrupt:
        print(
            f"interrupted\nsaved: all that is done, in {options.runs} and {options.results}", file=sys.stderr
        )
        print("resume: the same command goes on after it", file=sys.stderr)
        return 1
    for cell in outcome.left:
        print(f"{cell}: left to the process that works on it", file=sys.stderr)
    for failure in outcome.failures:
        print(f"{failure.cell}: {failure.reason}", file=sys.stderr)
    if outcome.dead:
        print(
            f"failed: {outcome.dead} of {outcome.workers} workers died; the same command goes on",
            file=sys.stderr,
        )
    findings = find(suite, places)
    for table in screen_tables(findings):
        console.print(table)
    console.print(f"page: {write_page(findings, places)}", markup=False, soft_wrap=True)
    if any(failure.is_input for failure in outcome.failures):
        return 2
    return 1 if outcome.failures or outcome.dead else 0


def sweep_command(options: Sweep, typed: dict[str, Any]) -> int:
    """Train the points of a sweep, and compare them."""
    from kernel_attention_lab.sweeping import open_sweep, start_sweep

    if (options.recipe is None) == (options.resume is None):
        raise InputError(
            "sweep needs either a recipe or --resume FOLDER (see: kernel-attention sweep --help)"
        )
    if not 1 <= options.workers <= _MOST_WORKERS:
        raise InputError(f"workers={options.workers} must be a whole number between 1 and {_MOST_WORKERS}")
    if options.resume is None:
        plan = _plan_of_sweep(options, typed)
        sweep = start_sweep(plan, Path(options.output or f"runs/sweep-{plan.recipe}"))
    else:
        sweep = open_sweep(Path(options.resume))
        require_plugins(sweep.plan.keys["plugins"])
    return _run_sweep(sweep, options)


def _plan_of_sweep(options: Sweep, typed: dict[str, Any]) -> SweepPlan:
    from kernel_attention_lab.runs.recipe_files import read_recipe
    from kernel_attention_lab.sweeping import make_plan, read_space
    from kernel_attention_lab.tasks.recipe import DEFAULT_TASK
    from kernel_attention_lab.tasks.registry import recipe_class, recipe_plugins

    assert options.recipe is not None
    name, keys = read_recipe(options.recipe)
    if "dataset" not in keys | typed:
        raise InputError(f"recipe {options.recipe}: has no key dataset (or give it with --dataset)")
    space = read_space(
        recipe_class(keys.get("task", DEFAULT_TASK)), options.grid, options.range, options.space
    )
    for key in typed:
        if key in space:
            raise InputError(f"--{key} is the same for every point, but the space has {key} too")
    plugins = recipe_plugins(keys, options.plugin)
    load_plugins(plugins)
    return make_plan(
        name,
        keys | typed | {"plugins": plugins},
        space,
        sampler=options.sampler,
        sampler_seed=options.sampler_seed,
        points=options.points,
        data_root=options.data_root,
    )


def _run_sweep(sweep: SweepFolder, options: Sweep) -> int:
    """Run the points, show them as they come, and write the report; also after a failure."""
    from rich.console import Console
    from rich.live import Live

    from kernel_attention_lab.sweeping import resume_command, run_sweep, sweep_table, write_sweep_report

    console = Console(width=None if sys.stdout.isatty() else 160)
    live = Live(
        get_renderable=lambda: sweep_table(sweep),
        console=console,
        refresh_per_second=1,
        transient=True,
    )
    failure: BaseException | None = None
    try:
        with live if console.is_terminal else contextlib.nullcontext():
            run_sweep(sweep, options.workers, options.data_root)
    except (KeyboardInterrupt, OSError) as error:
        failure = error
    console.print(sweep_table(sweep))
    failed = [point for point in sweep.points() if point.state == "failed"]
    if failed:
        print(f"{len(failed)} points failed, for the reasons in the report", file=sys.stderr)
    if failure is not None:
        line = "interrupted" if isinstance(failure, KeyboardInterrupt) else f"failed: {failure}"
        print(f"{line}\nsaved: every point so far, in {sweep.folder}", file=sys.stderr)
        print(f"resume: {resume_command(sweep.folder)}", file=sys.stderr)
    page = write_sweep_report(sweep, sweep.folder / "report.html")
    console.print(f"report: {page}", soft_wrap=True)
    return 1 if failed or failure is not None else 0
