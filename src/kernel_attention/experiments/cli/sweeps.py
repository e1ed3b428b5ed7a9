"""The command ``sweep``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError
from kernel_attention.experiments.options import Sweep
from kernel_attention.experiments.plugins import load_plugins

if TYPE_CHECKING:
    from kernel_attention.experiments.sweeping import SweepFolder, SweepPlan

_MOST_WORKERS = 256


def sweep_command(options: Sweep, typed: dict[str, Any]) -> int:
    """Train the points of a sweep, and compare them."""
    from kernel_attention.experiments.sweeping import open_sweep, start_sweep

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
        load_plugins(sweep.plan.keys["plugins"])
    return _run_sweep(sweep, options)


def _plan_of_sweep(options: Sweep, typed: dict[str, Any]) -> SweepPlan:
    from kernel_attention.experiments.sweeping import make_plan, read_space
    from kernel_attention.experiments.training.recipe import recipe_plugins
    from kernel_attention.experiments.training.recipe_files import read_recipe
    from kernel_attention.experiments.training.tasks import DEFAULT_TASK, recipe_class

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

    from kernel_attention.experiments.reporting.sweep_report import write_sweep_report
    from kernel_attention.experiments.reporting.sweep_tables import sweep_table
    from kernel_attention.experiments.sweeping import run_sweep, sweep_record

    console = Console(width=None if sys.stdout.isatty() else 160)
    live = Live(
        get_renderable=lambda: sweep_table(sweep_record(sweep, with_importances=False)),
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
    record = sweep_record(sweep)
    console.print(sweep_table(record))
    failed = [point for point in record.points if point.state == "failed"]
    if failed:
        print(f"{len(failed)} points failed, for the reasons in the report", file=sys.stderr)
    if failure is not None:
        line = "interrupted" if isinstance(failure, KeyboardInterrupt) else f"failed: {failure}"
        print(f"{line}\nsaved: every point so far, in {sweep.folder}", file=sys.stderr)
        print(f"resume: {record.command}", file=sys.stderr)
    page = write_sweep_report(record, sweep.folder / "report.html")
    console.print(f"report: {page}", soft_wrap=True)
    return 1 if failed or failure is not None else 0
