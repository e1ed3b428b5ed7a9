"""The commands of the command line. Their options are in ``kernel_attention.experiments.options``.

Each command imports what it needs. So ``--help`` does not wait for torch, and a missing extra ``train`` is
reported in one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError, missing_package, unknown
from kernel_attention.experiments.arguments import parse
from kernel_attention.experiments.notes import notes_on_stderr
from kernel_attention.experiments.options import (
    Analyze,
    Attack,
    Bench,
    Compare,
    Evaluate,
    Export,
    Generate,
    List,
    Predict,
    Record,
    Reproduce,
    Sweep,
    Train,
)
from kernel_attention.experiments.plugins import load_plugins

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_attention.experiments.robustness.attack_plan import AttackStep
    from kernel_attention.experiments.sweeping import SweepFolder, SweepPlan
    from kernel_attention.experiments.training.recipe import BaseRecipe

_MOST_WORKERS = 256


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0 done, 2 bad input, 1 a run that failed."""
    try:
        command, options, keys = parse(sys.argv[1:] if argv is None else argv)
        load_plugins(options.plugin)
        with notes_on_stderr():
            with_keys = _WITH_KEYS.get(command)
            code = _COMMANDS[command](options) if with_keys is None else with_keys(options, keys)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        missing = missing_package(error, "kernel-attention")
        if missing is None:
            raise
        print(f"error: {missing}", file=sys.stderr)
        return 2
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe; the rest of the buffer must go elsewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _train(options: Train, typed: dict[str, Any]) -> int:
    from kernel_attention.experiments.training.recipe import make_recipe, read_recipe, recipe_plugins

    if (options.recipe is None) == (options.resume is None):
        raise InputError("train needs either a recipe or --resume RUN (see: kernel-attention train --help)")
    if options.resume is not None:
        return _run_training(None, Path(options.resume), None, options.data_root, options.progress)
    assert options.recipe is not None
    name, keys = read_recipe(options.recipe)
    if "dataset" not in keys | typed:
        raise InputError(f"recipe {options.recipe}: has no key dataset (or give it with --dataset)")
    plugins = recipe_plugins(keys, options.plugin)
    load_plugins(plugins)
    recipe = make_recipe(keys | typed | {"plugins": plugins})
    folder = Path(options.output or f"runs/{name}-{recipe.attention_name()}-{time.strftime('%Y%m%d-%H%M%S')}")
    return _run_training(recipe, folder, name, options.data_root, options.progress)


def _run_training(
    recipe: BaseRecipe | None, folder: Path, name: str | None, data_root: str | None, progress: bool
) -> int:
    from rich.console import Console

    from kernel_attention.experiments.reporting import summary_table
    from kernel_attention.experiments.training import train
    from kernel_attention.experiments.training.saved import read_config

    resume = recipe is None
    recipe = recipe or read_config(folder)
    try:
        summary = train(
            recipe, folder, name=name or folder.name, data_root=data_root, resume=resume, progress=progress
        )
    except InputError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, ModuleNotFoundError) and missing_package(error, "this run") is not None:
            raise
        _tell_failure(error, folder, data_root)
        return 1
    console = Console()
    console.print(summary_table(summary))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    return 0


def _tell_failure(error: BaseException, folder: Path, data_root: str | None) -> None:
    """Print the failure, the saved state, and the command that resumes."""
    from kernel_attention.experiments.training.saved_state import saved_state

    is_expected = isinstance(error, KeyboardInterrupt | FloatingPointError | OSError)
    failure = " ".join(f"failed: {type(error).__name__}: {error}".split())
    lines = ["interrupted" if isinstance(error, KeyboardInterrupt) else failure]
    if not (folder / "config.yaml").is_file():
        lines.append("nothing is saved: the run had not begun")
    else:
        lines.append(f"saved: {folder} ({saved_state(folder)})")
        if not is_expected:
            with contextlib.suppress(OSError):
                (folder / "error.txt").write_text("".join(traceback.format_exception(error)))
                lines.append(f"details: {folder / 'error.txt'}")
        if isinstance(error, FloatingPointError):
            lines.append(
                "a resumed run would fail again: start a new one, with a lower --learning_rate perhaps"
            )
        else:
            root = f" --data_root {shlex.quote(data_root)}" if data_root else ""
            lines.append(f"resume: kernel-attention train --resume {shlex.quote(str(folder))}{root}")
    print("\n".join(lines), file=sys.stderr)


def _evaluate(options: Evaluate) -> int:
    from rich.console import Console

    from kernel_attention.experiments.reporting import evaluation_table
    from kernel_attention.experiments.training.saved import load_run

    _check_output(options.output)
    changeable = ("stride", "evaluation_tokens", "swap_rate", "severities", "corrupted_cases")
    keys = {name: getattr(options, name) for name in changeable}
    run = load_run(options.run).with_keys({name: value for name, value in keys.items() if value is not None})
    if not run.seeds:
        raise InputError(f"run {run.folder}: no trained seed in it yet")
    rows = [
        {"seed": seed, "protocol": run.recipe.protocol} | figures
        for seed, figures in run.evaluate(options.file, options.data_root, options.split)
    ]
    what = options.file or f"{options.split or 'test'} split"
    Console().print(evaluation_table(rows, f"{run.recipe.dataset}: {what}"))
    if options.output:
        _write_rows(rows, Path(options.output))
    return 0


def _predict(options: Predict) -> int:
    from kernel_attention.experiments.training.files import csv_text
    from kernel_attention.experiments.training.saved import load_run

    _check_output(options.output)
    rows = load_run(options.run).predict(options.file, options.seed)
    if options.output:
        _write_rows(rows, Path(options.output))
    else:
        sys.stdout.write(csv_text(rows))
    return 0


def _generate(options: Generate) -> int:
    from kernel_attention.experiments.training.generation import generate_text
    from kernel_attention.experiments.training.saved import load_run

    if options.prompt is None:
        raise InputError("generate needs --prompt TEXT (see: kernel-attention generate --help)")
    choices = ("tokens", "temperature", "top_k", "seed", "model_seed")
    print(
        generate_text(
            load_run(options.run), options.prompt, **{key: getattr(options, key) for key in choices}
        )
    )
    return 0


def _analyze(options: Analyze) -> int:
    from rich.console import Console

    from kernel_attention.experiments.reporting import diagnostics_tables
    from kernel_attention.experiments.training.analyze import analyze_run
    from kernel_attention.experiments.training.saved import load_run

    run = load_run(options.run)
    output = None if options.output is None else Path(options.output)
    experiment = run.experiment(options.data_root)
    console = Console(width=None if sys.stdout.isatty() else 160)
    choices = (options.layers, options.cases, output, options.over_training)
    for seed, report in analyze_run(run, experiment, *choices).items():
        for table in diagnostics_tables(report, f"{run.recipe.dataset}, seed {seed}"):
            console.print(table)
    console.print(f"report: {run.folder / 'report.html'}" if output is None else f"written: {output}")
    return 0


def _attack(options: Attack) -> int:
    from rich.console import Console

    from kernel_attention.experiments.reporting import attack_table, shift_lines
    from kernel_attention.experiments.training.attack import attack_run
    from kernel_attention.experiments.training.saved import load_run
    from kernel_attention.experiments.training.shifts import split_plans

    plans, shifts = split_plans(options.plan)
    steps = _attack_steps(options, plans) if plans or options.attacks or not shifts else []
    run = load_run(options.run)
    transfer = None if options.transfer is None else load_run(options.transfer)
    output = None if options.output is None else Path(options.output)
    try:
        with Console(stderr=True).status("") as status:
            records = attack_run(
                run,
                steps,
                shifts=shifts,
                shift_cases=16 if options.quick else options.cases,
                seed=options.seed,
                transfer=transfer,
                data_root=options.data_root,
                output=output,
                again=options.again,
                batch_size=options.batch_size,
                told=status.update,
            )
    except InputError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, ModuleNotFoundError) and missing_package(error, "this attack") is not None:
            raise
        failure = " ".join(f"failed: {type(error).__name__}: {error}".split())
        print("interrupted" if isinstance(error, KeyboardInterrupt) else failure, file=sys.stderr)
        print(f"saved: the attacks that are done, in {output or run.folder}/seed-*", file=sys.stderr)
        print("resume: the same command goes on after them", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 160)
    for seed, record in records.items():
        title = f"{run.recipe.dataset}, {run.recipe.attention_name()}, seed {seed}"
        console.print(attack_table(record, title))
        for line in shift_lines(record):
            console.print(line, markup=False, soft_wrap=True)
        for warning in record["warnings"]:
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        path = (output or run.folder) / f"seed-{seed}" / "robustness.json"
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 0


def _attack_steps(options: Attack, plans: list[str]) -> list[AttackStep]:
    from kernel_attention.experiments.robustness import choose_steps, read_eps

    return choose_steps(
        plans=plans,
        attacks=options.attacks,
        protocol=options.protocol,
        eps=[read_eps(text) for text in options.eps],
        cases=options.cases,
        seed=options.attack_seed,
        transfer=options.transfer is not None,
        quick=options.quick,
    )


def _bench(options: Bench) -> int:
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


def _record(options: Record) -> int:
    from kernel_attention.experiments.results import make_records, write_records

    if options.to is None:
        raise InputError("record needs --to FOLDER (see: kernel-attention record --help)")
    records = make_records(options.run, label=options.label, revision=options.revision)
    written = write_records(records, options.to)
    for record in records:
        path = Path(options.to) / record.file_name
        print(f"{'written' if path in written else 'unchanged'}: {path}")
    return 0


def _reproduce(options: Reproduce) -> int:
    from rich.console import Console

    from kernel_attention.experiments.reporting.suite_tables import state_table, suite_table
    from kernel_attention.experiments.reproduction import (
        Places,
        estimates,
        measurements,
        read_suite,
        run_cells,
        write_page,
    )

    suite = read_suite(options.suite).with_protocol(options.protocol)
    places = Places(Path(options.runs), Path(options.results), options.data_root)
    cells = list(suite.cells(options.rows, options.columns, options.seeds))
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.dry_run:
        console.print(state_table(suite.title, estimates(suite, cells, places)))
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


def _sweep(options: Sweep, typed: dict[str, Any]) -> int:
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
    from kernel_attention.experiments.training.recipe import read_recipe, recipe_plugins
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


def _export(options: Export) -> int:
    from kernel_attention.experiments.training.export import export_run
    from kernel_attention.experiments.training.saved import load_run

    export_run(load_run(options.run), Path(options.folder), format=options.to, seed=options.seed)
    print(f"written: {options.folder}")
    return 0


def _check_output(output: str | None) -> None:
    if output is not None and Path(output).suffix not in (".csv", ".json"):
        raise InputError(f"output {output}: the name must end in .csv or .json")


def _write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    from kernel_attention.experiments.training.files import write_csv, write_json

    try:
        (write_json if path.suffix == ".json" else write_csv)(path, rows)
    except OSError as error:
        raise InputError(f"output {path}: cannot be written ({error.strerror or error})") from None


def _list(options: List) -> int:
    from rich.console import Console

    what = options.what
    if what is not None and what not in _TABLES:
        raise unknown("list", what, _TABLES)
    tables = {name: _TABLES[name](options) for name in (_TABLES if what is None else (what,))}
    if options.format == "json":
        rows = {name: _table_records(table) for name, table in tables.items()}
        print(json.dumps(rows if what is None else rows[what], indent=1, ensure_ascii=False))
        return 0
    # A pipe has no width, and the default of 80 columns would break the widest table.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for table in tables.values():
        console.print(table)
    return 0


def _table_records(table: Table) -> list[dict[str, str]]:
    """The rows by the names of the columns."""
    names = [str(column.header).replace(" ", "_") for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return [dict(zip(names, map(str, row), strict=True)) for row in rows]


def _compare(options: Compare) -> int:
    from rich.console import Console

    from kernel_attention.experiments.reporting.run_comparison import (
        compare_runs,
        comparison_rows,
        comparison_table,
        write_comparison,
    )

    _check_output(options.table)
    comparison = compare_runs(options.run)
    page = write_comparison(comparison, Path(options.output))
    if options.table is not None:
        _write_rows(comparison_rows(comparison), Path(options.table))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(comparison_table(comparison))
    for remark in comparison.remarks:
        console.print(f"note: {remark}", markup=False, soft_wrap=True)
    console.print(f"page: {page}", markup=False, soft_wrap=True)
    return 0


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _attention_table(options: List) -> Table:
    from kernel_attention.mechanisms import list_attention

    table = _table(
        "attention (N tokens, p head width, s rank)",
        "name", "paper", "equation", "time", "memory", "causal", "cross", "decoding",
        "mixes tokens",
    )  # fmt: skip
    for mechanism in list_attention():
        table.add_row(
            mechanism.name, mechanism.paper, mechanism.equation, mechanism.time, mechanism.memory,
            "yes" if mechanism.causal else "no", "yes" if mechanism.cross else "no", mechanism.decoding,
            mechanism.mixes_tokens,
        )  # fmt: skip
    return table


def _contender_table(options: List) -> Table:
    from kernel_attention.experiments.benchmarking import contender_names, find_contender

    table = _table("contenders of a benchmark, in addition to every mechanism", "name", "package", "device")
    for contender in map(find_contender, contender_names(with_mechanisms=False)):
        table.add_row(contender.name, contender.package, contender.device)
    return table


def _dataset_table(options: List) -> Table:
    from kernel_attention.experiments.data import POSITION_TASKS, list_image_sets, list_time_series
    from kernel_attention.experiments.data.text import list_texts
    from kernel_attention.experiments.data.token_loading import list_token_sets

    table = _table(
        "data sets on this machine (other time series are downloaded from the archive by name)",
        "name", "source", "path", "task",
    )  # fmt: skip
    root = options.data_root
    listed = {
        "time_series": list_time_series(root),
        "images, segmentation": list_image_sets(root),
        "language": list_texts(root),
        "tokens": list_token_sets(root),
    }
    for task, sets in listed.items():
        for info in sets:
            table.add_row(info.name, info.source, str(info.path or ""), task)
    for name in sorted(POSITION_TASKS):
        table.add_row(name, "generated", "", "sequence_labels")
    return table


def _recipe_table(options: List) -> Table:
    from kernel_attention.experiments.training.recipe import list_recipes, make_recipe, read_recipe

    table = _table("recipes", "name", "task", "data set", "attention", "length")
    for name in list_recipes():
        recipe = make_recipe(read_recipe(name)[1])
        table.add_row(name, recipe.task_name, recipe.dataset, recipe.attention_name(), recipe.duration)
    return table


def _suite_table(options: List) -> Table:
    from kernel_attention.experiments.reproduction import list_suites, read_suite

    table = _table("suites", "name", "title", "source", "rows", "columns", "seeds")
    for name in list_suites():
        suite = read_suite(name)
        sizes = (len(suite.rows), len(suite.columns), len(suite.seeds))
        table.add_row(name, suite.title, suite.source, *map(str, sizes))
    return table


_TABLES: dict[str, Callable[[List], Table]] = {
    "attention": _attention_table,
    "contenders": _contender_table,
    "datasets": _dataset_table,
    "recipes": _recipe_table,
    "suites": _suite_table,
}
_WITH_KEYS: dict[str, Callable[[Any, dict[str, Any]], int]] = {"train": _train, "sweep": _sweep}
_COMMANDS: dict[str, Callable[[Any], int]] = {
    "evaluate": _evaluate,
    "predict": _predict,
    "generate": _generate,
    "analyze": _analyze,
    "attack": _attack,
    "bench": _bench,
    "record": _record,
    "reproduce": _reproduce,
    "export": _export,
    "compare": _compare,
    "list": _list,
}
