"""The commands that compare: ``bench`` layers, ``reproduce`` the tables of papers."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_attention.experiments.options import Bench, Reproduce

if TYPE_CHECKING:
    from kernel_attention.experiments.benchmarking import Plan


def bench_command(options: Bench) -> int:
    """Measure attention layers side by side."""
    from rich.console import Console

    from kernel_attention.experiments.benchmarking import plan_from_options, run_benchmark
    from kernel_attention.experiments.reporting import benchmark_tables, write_benchmark

    plan = plan_from_options(options.suite, options.attention, vars(options), options.causal)
    if options.against is not None:
        return _bench_against(options.against, options, plan)
    folder = Path(
        options.output or f"runs/bench-{options.suite or 'layers'}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    console = Console(width=None if sys.stdout.isatty() else 200)
    with Console(stderr=True).status("") as status:
        record = run_benchmark(
            plan,
            seed=options.seed,
            warmup=options.warmup,
            told=status.update,
            kept=lambda record: write_benchmark(record, folder),
        )
    files = write_benchmark(record, folder)
    for table in benchmark_tables(record):
        console.print(table)
    for entry in record["absent"]:
        console.print(f"{entry['contender']}: absent ({entry['reason']})")
    console.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
    return 0


def _bench_against(reference: str, options: Bench, plan: Plan) -> int:
    """Time this code against a revision. The exit code is 1 where something got slower."""
    from rich.console import Console

    from kernel_attention.experiments.benchmarking import measure_against
    from kernel_attention.experiments.benchmarking.contenders import find_contender
    from kernel_attention.experiments.benchmarking.plans import check_plan
    from kernel_attention.experiments.benchmarking.revisions import ROUNDS, BenchmarkFailedError
    from kernel_attention.experiments.reporting.revision_tables import (
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
        with Console(stderr=True).status("") as status:
            record = measure_against(
                reference, _bench_arguments(options), rounds=rounds, seed=options.seed, told=status.update
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

    from kernel_attention.experiments.reporting.suite_tables import state_table, suite_table
    from kernel_attention.experiments.reproduction import (
        Places,
        estimates,
        measurements,
        read_suite,
        run_cells,
        untrained_starts,
        write_page,
    )

    suite = read_suite(options.suite).with_protocol(options.protocol)
    places = Places(Path(options.runs), Path(options.results), options.data_root)
    cells = list(suite.cells(options.rows, options.columns, options.seeds))
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.dry_run:
        console.print(state_table(suite.title, estimates(suite, cells, places)))
        for start in untrained_starts(suite, cells, places):
            console.print(f"trained before them: {start.cell} of suite {start.suite.name}", markup=False)
        return 0
    with Console(stderr=True).status("") as status:
        outcome = run_cells(
            suite, cells, places, status.update, workers=options.workers, plugins=options.plugin
        )
    for cell in outcome.left:
        print(f"{cell}: left to the process that works on it", file=sys.stderr)
    for failure in outcome.failures:
        print(f"{failure.cell}: {failure.reason}", file=sys.stderr)
    if outcome.dead:
        print(
            f"failed: {outcome.dead} of {options.workers} workers died; the same command goes on",
            file=sys.stderr,
        )
    found = measurements(suite, places)
    console.print(suite_table(suite.title, suite.metric, suite.columns, found, suite.reported))
    console.print(f"page: {write_page(suite, places)}", markup=False, soft_wrap=True)
    if any(failure.is_input for failure in outcome.failures):
        return 2
    return 1 if outcome.failures or outcome.dead else 0
