"""The commands ``train`` and ``init``."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError, writing
from kernel_attention_lab.extras import install_hint
from kernel_attention_lab.options import Init, Train
from kernel_attention_lab.plugins import load_plugins

if TYPE_CHECKING:
    from kernel_attention_lab.tasks.recipe import BaseRecipe


def train_command(options: Train, typed: dict[str, Any]) -> int:
    """Train a recipe, or go on with a run."""
    from kernel_attention_lab.runs.launch import started_devices
    from kernel_attention_lab.runs.recipe_files import read_recipe
    from kernel_attention_lab.runs.saved import read_config
    from kernel_attention_lab.tasks.registry import make_recipe, recipe_plugins

    if (options.recipe is None) == (options.resume is None):
        raise InputError("train needs either a recipe or --resume RUN (see: kernel-attention train --help)")
    if options.resume is not None:
        folder = Path(options.resume)
        return _run_training(read_config(folder), folder, None, options, {})
    assert options.recipe is not None
    name, keys = read_recipe(options.recipe)
    if "dataset" not in keys | typed:
        raise InputError(f"recipe {options.recipe}: has no key dataset (or give it with --dataset)")
    plugins = recipe_plugins(keys, options.plugin)
    load_plugins(plugins)
    recipe = make_recipe(keys | _fitting_warmup(keys, typed) | typed | {"plugins": plugins})
    if recipe.processes == 1:  # torchrun says how many there are
        recipe = make_recipe(recipe.keys() | started_devices())
    folder = Path(options.output or f"runs/{name}-{recipe.attention_name()}-{time.strftime('%Y%m%d-%H%M%S')}")
    return _run_training(recipe, folder, name, options, typed)


def _fitting_warmup(keys: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """The recipe's warm-up in the proportion that it has, where --epochs leaves it no room otherwise."""
    counts = keys.get("warmup_epochs"), typed.get("epochs"), keys.get("epochs")
    if "warmup_epochs" in typed or not all(type(count) is int and count > 0 for count in counts):
        return {}
    warmup, asked, epochs = map(int, counts)  # type: ignore[arg-type]
    return {"warmup_epochs": warmup * asked // epochs} if asked <= warmup < epochs else {}


def init_command(options: Init) -> int:
    """Write a recipe for own series, or a copy of a recipe."""
    from kernel_attention.files import write_text_atomically
    from kernel_attention_lab.runs.recipe_files import recipe_text

    path = Path(options.output)
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"output {path}: the name must end in .yaml")
    if path.exists():
        raise InputError(f"output {path} exists: choose another name with --output")
    names = (
        "dataset", "test_file", "target_type", "layout", "case_column", "time_column", "target_column",
        "channel_columns", "missing",
    )  # fmt: skip
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.recipe is None:
        text = _recipe_for_series(given, options.data_root, str(path))
    elif given:
        raise InputError(f"init: --recipe copies a whole recipe, and goes without {', '.join(given)}")
    else:
        text = recipe_text(options.recipe)
    with writing(f"output {path}"):
        write_text_atomically(path, text)
    print(f"written: {path}")
    if options.recipe is None and "dataset" not in given:
        print(f"fill in: dataset of {path}, for which series.csv stands")
    return 0


def _recipe_for_series(given: dict[str, Any], data_root: str | None, name: str) -> str:
    """The text of a recipe for the file of series among the given keys, or for one to be filled in."""
    from kernel_attention.errors import note
    from kernel_attention.series.files.step_columns import is_step
    from kernel_attention_lab.runs.template import recipe_template
    from kernel_attention_lab.tasks.time_series import Recipe, load_data

    if "dataset" not in given and given:
        raise InputError(f"init: --{next(iter(given))} says something of a file, and none is given")
    data = load_data(Recipe(**given), data_root) if given else None
    steps = [name for name in data.channel_names if is_step(name)] if data is not None else []
    if len(steps) > 1:
        note(
            f"{given['dataset']}: {len(steps)} channels have names like numbers or times: "
            f"{', '.join(steps[:3])} ...; if they are the steps of one channel, give --layout wide and no "
            "--channel_columns"
        )
    return recipe_template(given, data, name)


def _run_training(
    recipe: BaseRecipe, folder: Path, name: str | None, options: Train, typed: dict[str, Any]
) -> int:
    from rich.console import Console

    from kernel_attention.training.processes import ProcessPlace
    from kernel_attention_lab.reporting import summary_table
    from kernel_attention_lab.runs import train
    from kernel_attention_lab.runs.launch import (
        ProcessFailed,
        is_first_process,
        place_from_environment,
        run_under_torchrun,
    )
    from kernel_attention_lab.runs.run import checked_experiment

    data_root, resume = options.data_root, options.resume is not None
    if recipe.devices > 1 and recipe.num_nodes == 1 and place_from_environment() is None:
        place = ProcessPlace(0, recipe.devices, 0, recipe.devices)
        checked_experiment(recipe, place, folder, data_root, resume)
        try:
            return run_under_torchrun(recipe.devices, _words(options, folder, typed))
        except ProcessFailed as error:
            _tell_failure(error, folder, data_root)
            return 1
    try:
        summary = train(
            recipe, folder, name=name or folder.name, data_root=data_root, resume=resume,
            progress=options.progress,
        )  # fmt: skip
    except InputError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, ModuleNotFoundError) and install_hint(error, "this run") is not None:
            raise
        if is_first_process():
            _tell_failure(error, folder, data_root)
        return 1
    if not is_first_process():
        return 0
    console = Console()
    console.print(summary_table(summary))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    return 0


def _words(options: Train, folder: Path, typed: dict[str, Any]) -> list[str]:
    """The command line of these options, for every process of the run."""
    given = typed | {"progress": options.progress}
    given |= {"resume" if options.recipe is None else "output": str(folder)}
    if options.data_root is not None:
        given["data_root"] = options.data_root
    named = [*given.items(), *(("plugin", module) for module in options.plugin)]
    texts = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in named]
    recipe = [] if options.recipe is None else [options.recipe]
    return ["train", *recipe, *(f"--{key}={text}" for key, text in texts)]


def _tell_failure(error: BaseException, folder: Path, data_root: str | None) -> None:
    """Print the failure, the saved state, and the command that resumes."""
    is_expected = isinstance(error, KeyboardInterrupt | FloatingPointError | OSError)
    failure = " ".join(f"failed: {type(error).__name__}: {error}".split())
    lines = ["interrupted" if isinstance(error, KeyboardInterrupt) else failure]
    if not (folder / "config.yaml").is_file():
        lines.append("nothing is saved: the run had not begun")
    else:
        lines.append(f"saved: {folder} ({_saved_state(folder)})")
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


def _saved_state(folder: Path) -> str:
    """The finished seeds of a run folder, and the points where the others would resume."""
    found = sorted(
        (int(path.name.removeprefix("seed-")), path)
        for path in folder.glob("seed-*")
        if path.name.removeprefix("seed-").isdecimal()
    )
    states = [f"seed {seed}: {state}" for seed, path in found if (state := _seed_state(path))]
    return "; ".join(states) or "its recipe, no checkpoint yet"


def _seed_state(folder: Path) -> str | None:
    if (folder / "evaluation.json").is_file():
        return "finished"
    if not (folder / "last.ckpt").is_file():
        return None
    step = _step(folder / "last.ckpt")
    if step is None:
        return "checkpoint"
    return f"checkpoint after step {step}" if step else "checkpoint of step 0, nothing trained yet"


def _step(checkpoint: Path) -> int | None:
    """Optimizer steps so far; None where the file cannot be read."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Mapped, so that one number does not cost the reading of a large checkpoint.
            state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return int(state["global_step"])
    except Exception:  # this text reports another failure, which it must not hide
        return None
