"""The command line's arguments, and what is wrong with them in one line."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

import kernel_attention
from kernel_attention.errors import InputError, unknown

if TYPE_CHECKING:
    from kernel_attention.training.recipe import BaseRecipe

_SEEDS = re.compile(r"-?\d+(,-?\d+)*,?")
_WORDS = {"bool": "true or false", "int": "a whole number"}
_DATA_ROOT = "folder with data sets (default: $KERNEL_ATTENTION_DATA)"


def parse(arguments: list[str]) -> tuple[str, Namespace]:
    """The command and its options; those of ``train`` only as far as they were typed.

    Raises:
        InputError: for an unknown command or option, and a value that is not of the option's type.
    """
    recipe = _recipe_class(arguments)
    parsers = {
        "train": (_train_parser(recipe), "train a recipe and report on it"),
        "evaluate": (_evaluate_parser(), "measure a trained run on held-out or new data"),
        "predict": (_predict_parser(), "predict new sequences with a trained run"),
        "generate": (_generate_parser(), "continue a text with a trained language model"),
        "analyze": (_analyze_parser(), "diagnose the attention of a trained run"),
        "bench": (_bench_parser(), "time and memory of attention layers, beside what else there is"),
        "list": (_list_parser(), "what there is: attention, recipes, datasets"),
    }
    parser = ArgumentParser(
        prog="kernel-attention",
        description=kernel_attention.__doc__,
        version=kernel_attention.__version__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    commands = parser.add_subcommands(required=True)
    for name, (subparser, summary) in parsers.items():
        commands.add_subcommand(name, subparser, help=summary)
    command = next(iter(arguments), "")
    if not command:
        raise InputError(f"no command given (accepted: {', '.join(parsers)}; see: kernel-attention --help)")
    if command not in parsers and not command.startswith("-"):
        raise unknown("command", command, parsers)
    if command in parsers:
        _check_names(command, parsers[command][0], arguments)
    words = _join_seeds([_with_underscores(word) for word in arguments])
    try:
        options = parser.parse_args(words, defaults=command != "train")
    except argparse.ArgumentError as error:
        raise _explained(error, command, words, recipe) from None
    return command, options[command]


def _with_underscores(word: str) -> str:
    """``--data-root`` is ``--data_root``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _join_seeds(words: list[str]) -> list[str]:
    """``--seeds 0 1 2`` and ``--seeds 0,1,2`` are ``--seeds=[0,1,2]``."""
    start = next((index for index, word in enumerate(words) if word.partition("=")[0] == "--seeds"), None)
    if start is None:
        return words
    inline = words[start].partition("=")[2]
    values, end = [inline] if inline else [], start + 1
    while end < len(words) and _SEEDS.fullmatch(words[end]):
        values.append(words[end])
        end += 1
    if not values or not all(_SEEDS.fullmatch(value) for value in values):
        return words
    return [*words[:start], f"--seeds=[{','.join(value.strip(',') for value in values)}]", *words[end:]]


def _check_names(command: str, parser: ArgumentParser, arguments: list[str]) -> None:
    """InputError for an option the command does not have."""
    # jsonargparse's own --seeds+ would add to a list that is not there yet.
    known = [name for action in parser._actions for name in action.option_strings if not name.endswith("+")]
    for word in arguments:
        name = _with_underscores(word).partition("=")[0]
        if word == "--":
            return
        if word.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            given = word.partition("=")[0]
            raise InputError(
                f"{command} has no option {given}{hint} (see: kernel-attention {command} --help)"
            )


def _explained(
    error: argparse.ArgumentError, command: str, words: list[str], recipe: type[BaseRecipe]
) -> InputError:
    """The parser's complaint in our words."""
    from kernel_attention.training.recipe_values import field_names, typed_value

    message = str(error)
    found = re.search(r'Parser key "(?:\w+\.)?(\w+)"', message)
    if found is None:
        return InputError(f"{message.replace(f'{command}.', '')} (see: kernel-attention {command} --help)")
    name, value = found[1], ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0] == f"--{name}":
            value = word.partition("=")[2] or following
    given = f"--{name} {value!r}"
    try:
        if name in field_names(recipe):
            typed_value(recipe, name, value, given)
    except InputError as explained:
        return explained
    kind = re.search(r"Expected an? <class '(\w+)'>", message)
    if kind is not None and kind[1] in _WORDS:
        return InputError(f"{given} must be {_WORDS[kind[1]]}")
    return InputError(f"{given} is not accepted: {message.partition(': ')[2]}")


def _recipe_class(arguments: list[str]) -> type[BaseRecipe]:
    """The class of the recipe that ``train`` is given, whose keys are its options."""
    from kernel_attention.training.recipe import Recipe, list_recipes, read_keys
    from kernel_attention.training.tasks import DEFAULT_TASK, recipe_class

    if next(iter(arguments), "") != "train":
        return Recipe
    shipped = list_recipes()
    for word in arguments[1:]:
        path = shipped.get(word, Path(word))
        if word in shipped or (path.suffix in (".yaml", ".yml") and path.is_file()):
            return recipe_class(read_keys(path).get("task", DEFAULT_TASK))
    return Recipe


def _train_parser(recipe: type[BaseRecipe]) -> ArgumentParser:
    parser = _subparser(
        "train RECIPE [options] | train --resume RUN",
        "Train a recipe: a shipped one by name, or a YAML file. Options replace the recipe's values; the "
        "defaults below are those of a recipe that says nothing.",
    )
    parser.add_argument("recipe", nargs="?", help="name (see: kernel-attention list recipes) or YAML file")
    parser.add_argument("--output", type=str, help="run folder (default: runs/RECIPE-ATTENTION-TIME)")
    parser.add_argument("--data_root", type=str, help=_DATA_ROOT)
    parser.add_argument("--resume", type=str, metavar="RUN", help="continue this run folder; takes no recipe")
    parser.add_argument("--progress", type=bool, default=True, help="show a progress bar")
    parser.add_argument("--dataset", type=str, help="name of a data set of the recipe's task")
    parser.add_class_arguments(recipe, skip={"dataset"})
    return parser


def _evaluate_parser() -> ArgumentParser:
    parser = _subparser(
        "evaluate RUN [FILE] [options]",
        "Measure every seed of a run on the test split of its data set, or on a file. The last four options "
        "are for language models; by default they are as in the run's recipe.",
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("file", nargs="?", help="file of the task's kind, with labels")
    parser.add_argument("--data_root", type=str, help=_DATA_ROOT)
    parser.add_argument("--output", type=str, help="write the figures to this .json or .csv file")
    parser.add_argument("--split", type=str, help="train, validation or test alone")
    parser.add_argument("--stride", type=int, help="how far the window moves; 1 predicts from a full past")
    parser.add_argument("--evaluation_tokens", type=int, help="the first so many tokens only; 0 is all")
    parser.add_argument("--swap_rate", type=float, help="part of the words that the word swap replaces")
    return parser


def _predict_parser() -> ArgumentParser:
    parser = _subparser("predict RUN FILE [options]", "Predict the sequences of a .ts, .npy or .npz file.")
    parser.add_argument("run", help="run folder")
    parser.add_argument("file", help="sequences; arrays are (cases, channels, time) as in aeon")
    parser.add_argument("--seed", type=int, help="which of the run's models (default: the first)")
    parser.add_argument(
        "--output", type=str, help="write to this .csv or .json file (default: CSV, to the screen)"
    )
    return parser


def _generate_parser() -> ArgumentParser:
    parser = _subparser(
        "generate RUN --prompt TEXT [options]", "Continue a text with a language model, one token at a time."
    )
    parser.add_argument("run", help="run folder of a recipe of task language")
    parser.add_argument("--prompt", type=str, help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=50, help="how many tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--top_k", type=int, help="draw among so many most likely tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--model_seed", type=int, help="which of the run's models (default: the first)")
    return parser


def _analyze_parser() -> ArgumentParser:
    parser = _subparser(
        "analyze RUN [options]",
        "Measure what the attention of every seed does with test sequences: spectra, head distances, "
        "kernel-PCA figures, J, maps. Written beside the seed's weights and into the run's report.",
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument(
        "--layers", type=str, default="all", help="all, first, last-2, indices, names; several as 0,-1"
    )
    parser.add_argument("--cases", type=int, default=16, help="how many test sequences")
    parser.add_argument(
        "--output", type=str, help="write to this folder, pictures too, and leave the run alone"
    )
    parser.add_argument("--data_root", type=str, help=_DATA_ROOT)
    return parser


def _bench_parser() -> ArgumentParser:
    parser = _subparser(
        "bench [attention ...] [--suite NAME] [options]",
        "Measure attention layers in interleaved rounds. Sizes take several values; every combination is "
        "measured. Suites: docs/performance.md.",
    )
    parser.add_argument(
        "attention",
        nargs="*",
        help="contenders: names, '{primal: {rank: 30}}', or '[sdpa, primal]' for an encoder",
    )
    parser.add_argument("--suite", type=str, help="a plan by name; what is given else replaces its own")
    for name in ("length", "embed_dim", "num_heads", "batch_size", "threads"):
        parser.add_argument(f"--{name}", type=int, nargs="+")
    parser.add_argument("--dtype", type=str, nargs="+", help="float32, bfloat16, float16")
    parser.add_argument("--device", type=str, nargs="+", help="cpu, cuda")
    parser.add_argument("--causal", type=bool, help="whether the layers are causal")
    parser.add_argument("--passes", type=str, nargs="+", help="forward (inference), step (training)")
    parser.add_argument("--rounds", type=int, help="how often every contender is timed")
    parser.add_argument("--warmup", type=int, default=1, help="passes before the first that counts")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they take turns")
    parser.add_argument("--memory", type=bool, help="measure peaks, a process for every contender")
    parser.add_argument("--flops", type=bool, help="count operations")
    parser.add_argument("--output", type=str, help="folder (default: runs/bench-SUITE-TIME)")
    return parser


def _list_parser() -> ArgumentParser:
    parser = _subparser("list [attention|recipes|datasets] [options]", "What there is.")
    parser.add_argument("what", nargs="?", help="attention, recipes or datasets (default: all three)")
    parser.add_argument("--data_root", type=str, help=_DATA_ROOT)
    return parser


def _subparser(usage: str, description: str) -> ArgumentParser:
    return ArgumentParser(
        usage=f"kernel-attention {usage}", description=description, exit_on_error=False, allow_abbrev=False
    )
