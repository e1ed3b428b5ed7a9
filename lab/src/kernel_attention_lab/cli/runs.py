"""The commands that use a finished run: ``evaluate``, ``predict``, ``play`` and so on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError, writing
from kernel_attention_lab.cli.progress import progress
from kernel_attention_lab.extras import install_hint
from kernel_attention_lab.options import (
    Analyze,
    Attack,
    Compare,
    Evaluate,
    Explain,
    Export,
    Generate,
    Play,
    Predict,
    Record,
)

if TYPE_CHECKING:
    from kernel_attention_lab.data import SeriesColumns
    from kernel_attention_lab.robustness.attack_plan import AttackStep


def evaluate_command(options: Evaluate) -> int:
    """Print the test figures of a finished run, or those of a file."""
    from rich.console import Console

    from kernel_attention_lab.reporting import evaluation_table
    from kernel_attention_lab.runs.saved import load_run

    _check_output(options.output)
    changeable = (
        "stride", "evaluation_tokens", "swap_rate", "severities", "corrupted_cases", "target_returns",
        "evaluation_episodes", "evaluation_seed", "memory", "evaluation_context",
    )  # fmt: skip
    keys = {name: getattr(options, name) for name in changeable}
    run = load_run(options.run).with_keys({name: value for name, value in keys.items() if value is not None})
    if not run.seeds:
        raise InputError(f"run {run.folder}: no trained seed in it yet")
    rows = [
        {"seed": seed, "protocol": run.recipe.protocol} | figures
        for seed, figures in run.evaluate(options.file, options.data_root, options.split)
    ]
    what = options.file or (
        f"{options.split or 'test'} split"
        if run.recipe.reported_split != "environment"
        else "episodes in the environment"
    )
    Console().print(evaluation_table(rows, f"{run.recipe.dataset}: {what}"))
    if options.output:
        _write_rows(rows, Path(options.output))
    return 0


def predict_command(options: Predict) -> int:
    """Print or write what a run predicts for the cases of a file."""
    from kernel_attention_lab.runs.files import csv_text
    from kernel_attention_lab.runs.saved import load_run

    _check_output(options.output)
    columns = _estimator_columns(options)
    if columns is not None:
        from kernel_attention_lab.runs.explain import predict_file

        rows = predict_file(Path(options.run), Path(options.file), columns)
    else:
        rows = load_run(options.run).predict(options.file, options.seed)
    if options.output:
        _write_rows(rows, Path(options.output))
    else:
        sys.stdout.write(csv_text(rows))
    return 0


def explain_command(options: Explain) -> int:
    """Print what the prediction for a series rests on, and draw it."""
    from rich.console import Console

    from kernel_attention_lab.reporting.explanations import plot_explanation
    from kernel_attention_lab.reporting.tables import explanation_table
    from kernel_attention_lab.runs.explain import explain_estimator, explain_run
    from kernel_attention_lab.runs.saved import load_run

    output = Path(options.output)
    if output.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"output {output}: the name must end in .svg, .png or .pdf")
    if options.nodes < 1:
        raise InputError(f"nodes={options.nodes} must be a whole number of at least 1")
    columns = _estimator_columns(options)
    asked = (Path(options.file), options.case)
    if columns is not None:
        found = explain_estimator(Path(options.run), *asked, options.nodes, columns)
    else:
        found = explain_run(load_run(options.run), *asked, options.seed, options.nodes)
    sure = "" if found.probability is None else f", probability {found.probability:.3f}"
    title = f"case {found.case}: {found.prediction}{sure}"
    Console().print(explanation_table(title, found.channels, found.shares))
    print(f"written: {plot_explanation(found.series, found.shares, found.channels, title, output)}")
    return 0


def _estimator_columns(options: Predict | Explain) -> SeriesColumns | None:
    """The columns of a table for an estimator in a file; None for a run, which knows them."""
    names = ("layout", "case_column", "time_column", "target_column", "channel_columns")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if not Path(options.run).is_file():
        if given:
            raise InputError(f"--{next(iter(given))} is for a file of an estimator; a run knows its columns")
        return None
    from kernel_attention_lab.data import SeriesColumns

    fields = {"channel_columns": "channels"}
    return SeriesColumns(**{fields.get(name, name.removesuffix("_column")): given[name] for name in given})


def generate_command(options: Generate) -> int:
    """Print the continuation of a text."""
    from kernel_attention_lab.runs.saved import load_run

    if options.prompt is None:
        raise InputError("generate needs --prompt TEXT (see: kernel-attention generate --help)")
    choices = ("tokens", "temperature", "top_k", "seed", "model_seed")
    run = load_run(options.run)
    print(run.generate(options.prompt, **{key: getattr(options, key) for key in choices}))
    return 0


def play_command(options: Play) -> int:
    """Play one episode of a run's policy, and write its frames."""
    from rich.console import Console

    from kernel_attention_lab.reporting import evaluation_table
    from kernel_attention_lab.runs.play import play_run
    from kernel_attention_lab.runs.saved import load_run

    run = load_run(options.run)
    choices = ("seed", "episode_seed", "target", "memory", "frames", "side")
    output = None if options.output is None else Path(options.output)
    played = play_run(run, **{key: getattr(options, key) for key in choices}, output=output)
    console = Console()
    seed = run.seeds[0] if options.seed is None else options.seed
    console.print(evaluation_table([{"seed": seed} | played.record], f"{run.recipe.dataset}: one episode"))
    console.print(f"written: {played.path}", markup=False, soft_wrap=True)
    return 0


def analyze_command(options: Analyze) -> int:
    """Measure what the attention of a run does."""
    from rich.console import Console

    from kernel_attention_lab.reporting import diagnostics_tables
    from kernel_attention_lab.runs.analyze import analyze_run
    from kernel_attention_lab.runs.saved import load_run

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


def record_command(options: Record) -> int:
    """Write the records of a run."""
    from kernel_attention_lab.evidence import make_records, write_records

    if options.to is None:
        raise InputError("record needs --to FOLDER (see: kernel-attention record --help)")
    records = make_records(options.run, label=options.label, revision=options.revision)
    written = write_records(records, options.to)
    for record in records:
        path = Path(options.to) / record.file_name
        print(f"{'written' if path in written else 'unchanged'}: {path}")
    return 0


def export_command(options: Export) -> int:
    """Write a run's model in the form of another library."""
    from kernel_attention_lab.runs.export import export_model, export_run, is_model
    from kernel_attention_lab.runs.saved import load_run

    source, path = Path(options.run), Path(options.path)
    if is_model(source):
        takes = export_model(source, path, format=options.to, seed=options.seed)
    else:
        takes = export_run(load_run(options.run), path, format=options.to, seed=options.seed)
    print(f"written: {options.path}" + (f" ({takes})" if takes else ""))
    return 0


def compare_command(options: Compare) -> int:
    """Print several runs side by side, and write a page of them."""
    from rich.console import Console

    from kernel_attention_lab.cli.paired_runs import paired_lines
    from kernel_attention_lab.reporting.run_comparison import (
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
    for line in paired_lines(comparison):
        console.print(line, markup=False, soft_wrap=True)
    for remark in comparison.remarks:
        console.print(f"note: {remark}", markup=False, soft_wrap=True)
    console.print(f"page: {page}", markup=False, soft_wrap=True)
    return 0


def _check_output(output: str | None) -> None:
    if output is not None and Path(output).suffix not in (".csv", ".json"):
        raise InputError(f"output {output}: the name must end in .csv or .json")


def _write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    from kernel_attention_lab.runs.files import write_csv, write_json

    with writing(f"output {path}"):
        (write_json if path.suffix == ".json" else write_csv)(path, rows)


def attack_command(options: Attack) -> int:
    """Attack the models of a run and print their accuracies."""
    from rich.console import Console

    from kernel_attention_lab.reporting import attack_table, shift_lines, write_report
    from kernel_attention_lab.robustness.shifts import OF_MODELS, split_plans
    from kernel_attention_lab.runs.attack import attack_run
    from kernel_attention_lab.runs.saved import load_run

    plans, shifts = split_plans(options.plan)
    steps = _attack_steps(options, plans) if plans or options.attacks or not shifts else []
    run = load_run(options.run)
    transfer = None if options.transfer is None else load_run(options.transfer)
    output = None if options.output is None else Path(options.output)
    try:
        with progress() as on_progress:
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
                on_progress=on_progress,
            )
    except InputError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, ModuleNotFoundError) and install_hint(error, "this attack") is not None:
            raise
        failure = " ".join(f"failed: {type(error).__name__}: {error}".split())
        print("interrupted" if isinstance(error, KeyboardInterrupt) else failure, file=sys.stderr)
        print(f"saved: the attacks that are done, in {output or run.folder}/seed-*", file=sys.stderr)
        print("resume: the same command goes on after them", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 160)
    for seed, record in records.items():
        title = f"{run.recipe.dataset}, {run.recipe.attention_name()}, seed {seed}"
        if record["attacks"]:
            console.print(attack_table(record, title))
        for line in shift_lines(record):
            console.print(line, markup=False, soft_wrap=True)
        for warning in record["warnings"]:
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        path = (output or run.folder) / f"seed-{seed}" / "robustness.json"
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    if output is None and set(shifts) & set(OF_MODELS):
        console.print(f"report: {write_report(run.folder)}", markup=False, soft_wrap=True)
    return 0


def _attack_steps(options: Attack, plans: list[str]) -> list[AttackStep]:
    from kernel_attention_lab.robustness import choose_steps, read_eps

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
