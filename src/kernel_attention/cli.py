"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table

import kernel_attention
from kernel_attention.attention import list_attention
from kernel_attention.errors import InputError, unknown

_LISTS = ("attention", "recipes", "datasets")


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 2 bad input, 1 a run that failed."""
    arguments = [_with_underscores(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        options = _parse(arguments)
        command = options.pop("subcommand")
        return _COMMANDS[command](options[command])
    except (InputError, argparse.ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output left
        return 0


def _with_underscores(word: str) -> str:
    """``--data-root`` is ``--data_root``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _parse(arguments: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="kernel-attention", description=kernel_attention.__doc__, exit_on_error=False,
        version=kernel_attention.__version__,
    )  # fmt: skip
    commands = parser.add_subcommands(required=True)
    commands.add_subcommand("train", _train_parser(arguments), help="train a recipe and report on it")
    commands.add_subcommand("evaluate", _evaluate_parser(), help="measure a trained run on held-out or new data")
    commands.add_subcommand("predict", _predict_parser(), help="predict new sequences with a trained run")
    listing = ArgumentParser(exit_on_error=False)
    listing.add_argument("what", nargs="?", help="attention, recipes or datasets")
    listing.add_argument("--data_root", type=str | None, help="folder with data sets")
    commands.add_subcommand("list", listing, help="what there is: attention, recipes, datasets")
    return parser.parse_args(arguments)


def _train_parser(arguments: list[str]) -> ArgumentParser:
    """Its defaults are the recipe's keys, so that options override them with their types checked."""
    from kernel_attention.training import Recipe, read_recipe

    parser = ArgumentParser(exit_on_error=False, description="Train a recipe: a shipped one by name, or a YAML file.")
    parser.add_argument("recipe", nargs="?", help="name (see: kernel-attention list recipes) or YAML file")
    parser.add_argument("--output", type=str | None, help="run folder (default: runs/RECIPE-ATTENTION-TIME)")
    parser.add_argument("--data_root", type=str | None, help="folder with data sets (default: $KERNEL_ATTENTION_DATA)")
    parser.add_argument("--resume", type=str | None, metavar="RUN", help="continue this run folder; takes no recipe")
    parser.add_argument("--progress", type=bool, default=True, help="show a progress bar")
    parser.add_class_arguments(Recipe)
    is_train = arguments[:1] == ["train"]
    if is_train and len(arguments) > 1 and not arguments[1].startswith("-"):
        parser.set_defaults(read_recipe(arguments[1])[1])
    elif is_train:  # --resume has its recipe in the run folder
        parser.set_defaults(dataset="")
    return parser


def _evaluate_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, description="Measure every seed of a run on its test split or on a file.")
    parser.add_argument("run", help="run folder")
    parser.add_argument("file", nargs="?", help=".ts file with labels (default: the test split of the run's data set)")
    parser.add_argument("--data_root", type=str | None, help="folder with data sets")
    parser.add_argument("--output", type=str | None, help="write the figures to this .json or .csv file")
    return parser


def _predict_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, description="Predict the sequences of a .ts, .npy or .npz file.")
    parser.add_argument("run", help="run folder")
    parser.add_argument("file", help="sequences; arrays are (cases, channels, time) as in aeon")
    parser.add_argument("--seed", type=int | None, help="which of the run's models (default: the first)")
    parser.add_argument("--output", type=str | None, help="write to this .csv or .json file (default: CSV on the screen)")
    return parser


def _train(options: Namespace) -> int:
    from kernel_attention.reporting import summary_table
    from kernel_attention.training import Interrupted, Recipe, train
    from kernel_attention.training.saved import read_config

    values = options.as_dict()
    recipe_name, output, resume = values.pop("recipe"), values.pop("output"), values.pop("resume")
    data_root, progress = values.pop("data_root"), values.pop("progress")
    if (recipe_name is None) == (resume is None):
        raise InputError("train needs a recipe or --resume RUN, one of them (see: kernel-attention list recipes)")
    if resume is not None:
        folder = Path(resume)
        recipe, name = read_config(folder), folder.name
    else:
        recipe, name = Recipe(**values), Path(recipe_name).stem
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(output or f"runs/{name}-{recipe.attention_name()}-{stamp}")
    try:
        summary = train(
            recipe, folder, name=name, data_root=data_root, resume=resume is not None, progress=progress
        )
    except InputError:
        raise
    except (Interrupted, Exception) as error:
        reason = "interrupted" if isinstance(error, Interrupted) else f"failed: {type(error).__name__}: {error}"
        print(f"{reason}\nsaved: {folder}\nresume: kernel-attention train --resume {folder}", file=sys.stderr)
        return 1
    console = Console()
    console.print(summary_table(summary))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    return 0


def _evaluate(options: Namespace) -> int:
    from kernel_attention.data import load_time_series
    from kernel_attention.training.evaluation import evaluate_split, labelled_split
    from kernel_attention.training.saved import load_run

    run = load_run(options.run)
    if options.file:
        split = labelled_split(Path(options.file), run.facts, run.recipe.missing)
    else:
        split = load_time_series(run.recipe.dataset, data_root=options.data_root, missing=run.recipe.missing).test
    rows = [
        {"seed": seed, "protocol": run.recipe.protocol}
        | evaluate_split(run.model(seed), split, run.recipe, run.is_regression)
        for seed in run.seeds
    ]
    if not rows:
        raise InputError(f"run {run.folder}: no trained seed in it yet")
    table = Table(title=f"{run.recipe.dataset}: {options.file or 'test split'}")
    shown = [key for key in rows[0] if key != "confusion_matrix"]
    for key in shown:
        table.add_column(key)
    for row in rows:
        table.add_row(*(f"{row[key]:.4f}" if isinstance(row[key], float) else str(row[key]) for key in shown))
    Console().print(table)
    _write_rows(rows, options.output)
    return 0


def _predict(options: Namespace) -> int:
    from kernel_attention.data import read_sequences
    from kernel_attention.training.evaluation import predict_rows
    from kernel_attention.training.saved import load_run

    run = load_run(options.run)
    sequences, _ = read_sequences(options.file, missing=run.recipe.missing)
    rows = predict_rows(run.model(options.seed), sequences, run.facts, run.recipe.precision)
    if options.output:
        _write_rows(rows, options.output)
    else:
        sys.stdout.write(_csv_text(rows))
    return 0


def _write_rows(rows: list[dict[str, Any]], output: str | None) -> None:
    from kernel_attention.training.files import write_atomically

    if output is None:
        return
    path = Path(output)
    if path.suffix not in (".csv", ".json"):
        raise InputError(f"output {output}: the name must end in .csv or .json")
    text = json.dumps(rows, indent=2) if path.suffix == ".json" else _csv_text(rows)
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise InputError(f"output {output}: cannot be written ({error.strerror or error})") from None


def _csv_text(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _list(options: Namespace) -> int:
    what = options.what
    if what is not None and what not in _LISTS:
        raise unknown("list", what, _LISTS)
    # A pipe has no width of its own; 80 columns would fold every word of the widest table.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for name in _LISTS if what is None else (what,):
        console.print({"attention": _attention_table, "recipes": _recipe_table, "datasets": _dataset_table}[name](options))
    return 0


def _attention_table(options: Namespace) -> Table:
    table = Table(title="attention (N tokens, p head width, s rank)")
    for column in ("name", "paper", "equation", "time", "memory", "causal", "cross", "padding", "mixes tokens"):
        table.add_column(column, overflow="fold")
    for mechanism in list_attention():
        table.add_row(
            mechanism.name, mechanism.paper, mechanism.equation, mechanism.time, mechanism.memory, mechanism.causal,
            "yes" if mechanism.cross else "no", mechanism.padding, mechanism.mixes_tokens,
        )  # fmt: skip
    return table


def _recipe_table(options: Namespace) -> Table:
    from kernel_attention.training import Recipe, list_recipes, read_recipe

    table = Table(title="recipes")
    for column in ("name", "data set", "attention", "epochs"):
        table.add_column(column, overflow="fold")
    for name in list_recipes():
        recipe = Recipe(**read_recipe(name)[1])
        table.add_row(name, recipe.dataset, recipe.attention_name(), str(recipe.epochs))
    return table


def _dataset_table(options: Namespace) -> Table:
    from kernel_attention.data import list_time_series

    table = Table(title="data sets at hand (others of the archive are downloaded by name)")
    for column in ("name", "source", "path"):
        table.add_column(column, overflow="fold")
    for info in list_time_series(options.data_root):
        table.add_row(info.name, info.source, str(info.path or ""))
    return table


_COMMANDS = {"train": _train, "evaluate": _evaluate, "predict": _predict, "list": _list}
