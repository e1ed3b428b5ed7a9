"""A run trains a recipe into a run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_attention.errors import InputError, note_once
from kernel_attention.files import is_unfinished
from kernel_attention.training.checkpoint import check_checkpoint
from kernel_attention.training.loop import check_trainer, fit
from kernel_attention.training.processes import (
    Processes,
    ProcessPlace,
    joined,
    training_device,
)
from kernel_attention.version import __version__
from kernel_attention.weights import read_weights
from kernel_attention_lab.lock import LOCK_NAME, locked
from kernel_attention_lab.provenance import code_revision, processor_name
from kernel_attention_lab.reporting import write_report
from kernel_attention_lab.run_folder import is_number, read_json
from kernel_attention_lab.runs.files import remove_unfinished, write_arrays, write_json, write_yaml
from kernel_attention_lab.runs.launch import end_with_torchrun, recipe_place, with_precision
from kernel_attention_lab.runs.loggers import RunLoggers, require_loggers
from kernel_attention_lab.runs.recorder import RunRecorder, make_recorder
from kernel_attention_lab.runs.saved import find_data_root, read_facts, recorded_data_root, require_same_data
from kernel_attention_lab.runs.start import check_start, prepare
from kernel_attention_lab.tasks.experiment import Experiment, Metric
from kernel_attention_lab.tasks.recipe import BaseRecipe
from kernel_attention_lab.tasks.registry import experiment_class


def train(
    recipe: BaseRecipe,
    output: Path,
    *,
    name: str = "run",
    data_root: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    begun: Callable[[], object] | None = None,
    on_row: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Train and evaluate a recipe with every one of its seeds.

    Nothing is written before the data and the model are checked. The folder's ``config.yaml`` has the
    precision that ``auto`` stands for on this processor.

    Args:
        recipe: the recipe.
        output: the run folder; must not exist or be empty, unless ``resume``.
        name: the name of the recipe in the summary; a resumed run keeps its own.
        data_root: the folder that is searched first for data sets; by default a resumed run keeps its own.
        resume: continue the run in ``output`` from its last checkpoint.
        progress: show a progress bar.
        begun: called once, when this process holds the run folder.
        on_row: called with the figures of every round, such as those of an epoch.

    Returns:
        The content of ``summary.json``; nothing in the processes of torchrun but the first.

    Raises:
        InputError: bad recipe, data or folder.
        Interrupted: Ctrl-C or SIGTERM.
        FloatingPointError: the loss is no longer finite.
        OSError: the folder can no longer be written, for example because the disk is full.
    """
    place = recipe_place(recipe)
    recipe = with_precision(recipe)
    experiment = checked_experiment(recipe, place, output, data_root, resume)
    device = training_device(recipe.accelerator, place.local_rank)
    with contextlib.ExitStack() as held:
        if place.is_first:
            name = held.enter_context(_opened(output, experiment, name, resume))
            if begun is not None:
                begun()
            if not resume:
                for remark in recipe.remarks():
                    note_once(remark)
        if place.world > 1:
            end_with_torchrun()
        processes = held.enter_context(joined(place, device, recipe.sequence_shards))
        output, name = processes.told((output, name))  # each has the time of its own start in a default name
        run = _Run(experiment, output, name, processes, device, on_row)
        results = [run.train_seed(seed, progress) for seed in recipe.seeds]
        if not place.is_first:
            return {}
        summary = summarise(recipe, name, results, experiment.metric)
        write_json(output / "summary.json", summary)
        try:
            write_report(output)
        except InputError as error:  # not bad input but a failing disk; all but the page is saved
            raise OSError(str(error)) from error
    return summary


def checked_experiment(
    recipe: BaseRecipe, place: ProcessPlace, output: Path, data_root: str | Path | None, resume: bool
) -> Experiment:
    """The experiment of a recipe, whose data and model can be trained in this place and folder.

    Raises:
        InputError: where they can not.
    """
    if not resume and place.is_first:
        _check_unused(output)
    check_trainer(recipe.train_settings(), place)
    require_loggers(recipe.loggers)
    if resume:
        data_root = recorded_data_root(output, data_root)
    experiment = experiment_class(recipe.task_name)(recipe, data_root)
    experiment.check()
    if not resume:
        check_start(experiment)
    return experiment


@contextlib.contextmanager
def _opened(output: Path, experiment: Experiment, name: str, resume: bool) -> Iterator[str]:
    """Lock the run folder for this process and make it ready for training. Return the name of the recipe."""
    created = [folder for folder in (output, *output.parents) if not folder.exists()]
    facts = experiment.facts()
    with contextlib.ExitStack() as held:
        try:
            output.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(output))
            if resume:
                name = _reopen_folder(output, experiment, facts) or name
            else:
                _check_unused(output)  # again, because another process may have been faster
                _open_folder(output, experiment, facts, name)
        except BaseException as error:
            held.close()
            with contextlib.suppress(OSError):
                for folder in created:
                    folder.rmdir()
            if isinstance(error, OSError):
                raise InputError(f"output {output}: cannot be written ({error.strerror or error})") from None
            raise
        yield name


def summarise(recipe: BaseRecipe, name: str, results: list[dict[str, Any]], metric: Metric) -> dict[str, Any]:
    """Mean and sample deviation over the seeds."""
    values = [result[metric.name] for result in results]
    return {
        "recipe": name,
        "dataset": recipe.dataset,
        "attention": recipe.attention_name(),
        "protocol": recipe.protocol,
        "protocol_text": recipe.protocol_text,
        "seeds": recipe.seeds,
        "metric": metric.name,
        "values": values,
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "machine": machine(),
        **_step_facts(recipe),
    }


def _step_facts(recipe: BaseRecipe) -> dict[str, Any]:
    """Sequences and random numbers of a step, where it is more than one batch in one process."""
    if recipe.processes * recipe.accumulate == 1:
        return {}
    return {
        "processes": recipe.processes,
        "effective_batch": recipe.effective_batch,
        "step_text": recipe.step_text(),
        "seeds_text": recipe.seeds_text(),
    }


def machine() -> str:
    """Processor, cores, threads and accelerator, in one line."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    counted = f"{os.cpu_count()} cores, {threads} thread{'' if threads == 1 else 's'}"
    return f"{processor_name()}, {counted}, {accelerator}"


def _check_unused(output: Path) -> None:
    """InputError unless ``output`` is empty, absent, or holds a run that was killed before it began."""
    try:
        str(output).encode()
    except UnicodeEncodeError:  # files of weights are opened by the path's text
        raise InputError(f"output {str(output)!a}: its path is no UTF-8 (accepted: a path that is)") from None
    try:
        found = [path for path in output.iterdir() if not is_unfinished(path)] if output.exists() else []
    except OSError as error:
        raise InputError(f"output {output}: cannot be a run folder ({error.strerror or error})") from None
    if {path.name for path in found} - {"versions.json", "data.json", LOCK_NAME}:
        raise InputError(
            f"output {output} is not empty: choose another folder, or continue it with --resume {output}"
        )


def _open_folder(output: Path, experiment: Experiment, facts: dict[str, Any], name: str) -> None:
    """Fill the run folder; leave nothing after a failure. ``config.yaml`` comes last, as it marks a run."""
    recipe = experiment.recipe
    data_root = find_data_root(recipe.dataset, experiment.data_root)
    try:
        remove_unfinished(output)
        write_json(output / "versions.json", {"recipe": name, "data_root": data_root, **_versions()})
        write_json(output / "data.json", facts)
        write_yaml(output / "config.yaml", recipe.keys())
    except BaseException:
        with contextlib.suppress(OSError):
            for file in ("versions.json", "data.json", "config.yaml"):
                (output / file).unlink(missing_ok=True)
        raise


def _reopen_folder(output: Path, experiment: Experiment, facts: dict[str, Any]) -> str | None:
    """Check the files that an unfinished run resumes from. Return the name of its recipe."""
    recipe = experiment.recipe
    require_same_data(facts, read_facts(output, recipe.task_name))
    for seed in recipe.seeds:
        folder = output / f"seed-{seed}"
        if (folder / "evaluation.json").exists():
            _read_result(folder, experiment.metric)
        elif (folder / "last.ckpt").exists():
            check_checkpoint(folder / "last.ckpt")
    versions = read_json(output / "versions.json") if (output / "versions.json").exists() else {}
    if not isinstance(versions, dict):
        versions = {}
    remove_unfinished(output)
    (output / "error.txt").unlink(missing_ok=True)
    data_root = find_data_root(recipe.dataset, experiment.data_root)
    if versions.get("data_root") != data_root:
        write_json(output / "versions.json", versions | {"data_root": data_root})
    name = versions.get("recipe")
    return name if isinstance(name, str) else None


def _read_result(folder: Path, metric: Metric) -> dict[str, Any]:
    """The figures of a finished seed; InputError where the file has other content."""
    path = folder / "evaluation.json"
    result = read_json(path)
    needed = (metric.name, "loss", "seconds")
    if not isinstance(result, dict) or not all(is_number(result.get(name)) for name in needed):
        raise InputError(
            f"{path}: does not hold the figures of a finished seed ({', '.join(needed)}); without this file "
            "a resumed run measures the seed again"
        )
    return result


def _versions() -> dict[str, str]:
    from lightning_fabric.__version__ import version

    return {
        "command": _command(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **code_revision(),
        "kernel_attention": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": machine(),
    }


def _command(words: list[str]) -> str:
    """The shell command of these words; our own command has its name without the path."""
    program = Path(words[0])
    is_ours = program.stem == "kernel-attention" or program.parts[-2:] == ("kernel_attention", "__main__.py")
    return shlex.join(["kernel-attention" if is_ours else words[0], *words[1:]])


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run folder that is being trained into, as one of its processes sees it."""

    experiment: Experiment
    output: Path
    name: str
    processes: Processes
    device: torch.device
    on_row: Callable[[dict[str, Any]], object] | None = None

    def train_seed(self, seed: int, progress: bool) -> dict[str, Any]:
        """Train and evaluate a seed; the content of its ``evaluation.json``, in the first process."""
        experiment, folder, is_first = self.experiment, self.output / f"seed-{seed}", self.processes.is_first
        recipe = experiment.recipe
        is_finished, is_begun = self.processes.told(
            ((folder / "evaluation.json").exists(), (folder / "last.ckpt").exists())
        )
        if is_finished:  # a finished seed of a resumed run
            return _read_result(folder, experiment.metric) if is_first else {}
        if is_first:
            folder.mkdir(exist_ok=True)
        _seed_everything(seed)
        model = experiment.build_model(recipe, experiment.facts())
        recorder = make_recorder(experiment, folder, seed)
        if not is_begun:  # the checkpoint has all that is prepared
            prepare(experiment, model, seed)
        if not is_first:  # the order of the cases has generators of its own, the same in all processes
            _seed_everything(_seed_of_process(seed, self.processes.place.rank))
        train_batches, val_batches = experiment.loaders(seed)
        with self._logged(recorder, folder) as loggers:
            fit(
                experiment.task(model),
                train_batches,
                val_batches,
                observers=[recorder],
                checkpoint=recorder.checkpoint if is_begun else None,
                processes=self.processes,
                progress=progress,
            )
            result = self._evaluate(model, recorder, folder, loggers) if is_first else {}
        self.processes.told(None)  # the others wait: the files of a seed are whole before the next one begins
        return result

    def _evaluate(
        self, model: Any, recorder: RunRecorder, folder: Path, loggers: RunLoggers
    ) -> dict[str, Any]:
        """Measure the best weights on the test split, and write all that belongs to a finished seed."""
        experiment, recipe = self.experiment, self.experiment.recipe
        if self.processes.place.world > 1:  # this one may hold parts, of the weights or of the sequences
            model = experiment.build_model(recipe, experiment.facts())
        model.load_state_dict(read_weights(folder / "best.safetensors"))
        result = experiment.evaluate(model.to(self.device))
        model.cpu()
        if not math.isfinite(result["loss"]):
            raise FloatingPointError(f"the loss on the test split is {result['loss']}")
        loggers.tell_result(result)
        result |= {
            "protocol": recipe.protocol,
            "split": recipe.reported_split,
            **recorder.choice(),
            "seconds": round(sum(row["seconds"] for row in recorder.rows), 1),
        }
        for name, content in experiment.appendices(model).items():
            write_json(folder / name, content)
        examples = experiment.examples(model)
        if examples:
            write_arrays(folder / "examples.npz", examples)
        write_json(folder / "evaluation.json", result)
        return result

    @contextlib.contextmanager
    def _logged(self, recorder: RunRecorder, folder: Path) -> Iterator[RunLoggers]:
        """The seed's loggers, which are told every row from now on; none but in the first process."""
        recipe = self.experiment.recipe
        names = recipe.loggers if self.processes.is_first else []
        loggers = RunLoggers(names, folder, self.name, recipe.keys())
        recorder.on_row = self._telling(loggers)
        is_done = False
        try:
            yield loggers
            is_done = True
        finally:
            loggers.close(is_done=is_done)

    def _telling(self, loggers: RunLoggers) -> Callable[[dict[str, Any], int], object]:
        """A function that tells a row and its step to whom it concerns."""

        def tell(row: dict[str, Any], step: int) -> None:
            loggers.tell_row(row, step)
            if self.on_row is not None:
                self.on_row(row)

        return tell


def _seed_everything(seed: int) -> None:
    from lightning_fabric import seed_everything  # takes seconds to import, and most commands train nothing

    seed_everything(seed, verbose=False)


def _seed_of_process(seed: int, rank: int) -> int:
    """The seed of the dropout and the augmentation of a process other than the first."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
