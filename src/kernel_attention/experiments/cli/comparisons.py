"""The commands that compare: ``bench`` layers, ``reproduce`` the tables of papers."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kernel_attention.experiments.options import Bench, Reproduce


def bench_command(options: Bench) -> int:
    """Measure attention layers side by side."""
    from rich.console import Console

    from kernel_attention.experiments.benchmarking import plan_from_options, run_benchmark
    from kernel_attention.experiments.reporting import benchmark_tables, write_benchmark

    plan = plan_from_options(options.suite, options.attention, vars(options), options.causal)
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
