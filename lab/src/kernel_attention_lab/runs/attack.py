"""Attacks on a finished run, and its uncertainty: figures next to its weights, one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError, require_positive, writing
from kernel_attention.version import __version__
from kernel_attention_lab.data.images.batches import channels_first
from kernel_attention_lab.data.images.sets import ImageSplit
from kernel_attention_lab.data.tokens.sets import TokenSplit
from kernel_attention_lab.lock import locked
from kernel_attention_lab.robustness.attack_plan import AttackStep
from kernel_attention_lab.robustness.image_attack import attacked_cases, require_classes
from kernel_attention_lab.robustness.masking import attack_title, masking_warnings
from kernel_attention_lab.robustness.measured_attack import measure_attack
from kernel_attention_lab.robustness.shifts import OF_MODELS, measure_shift
from kernel_attention_lab.robustness.uncertainty import measure_uncertainty, require_members
from kernel_attention_lab.run_folder import RunFolder
from kernel_attention_lab.runs.files import write_json
from kernel_attention_lab.runs.saved import SavedRun
from kernel_attention_lab.tasks.images import ImageExperiment
from kernel_attention_lab.tasks.tokens import TokenExperiment

OnProgress = Callable[[str], object]
_Experiment: TypeAlias = ImageExperiment | TokenExperiment

_SAME_DATA = ("channels", "height", "width", "class_names", "test_cases")
_LIBRARIES = ("torch", "foolbox", "pyautoattack")


class TransferSource(NamedTuple):
    """The model against which transferred attacks work, and what the record says of it."""

    model: nn.Module
    record: dict[str, Any]


def attack_run(
    run: SavedRun,
    steps: Sequence[AttackStep],
    *,
    shifts: Sequence[str] = (),
    shift_cases: int | None = None,
    seed: int | None = None,
    transfer: SavedRun | None = None,
    members: Sequence[SavedRun] = (),
    data_root: str | Path | None = None,
    output: Path | None = None,
    again: bool = False,
    batch_size: int = 64,
    on_progress: OnProgress | None = None,
) -> dict[int, dict[str, Any]]:
    """Attack the trained models of a run on images of its test split, or measure their uncertainty.

    Write ``seed-K/robustness.json`` into the run, or into ``output``, after every attack. An attack that
    is in the file already, with the same options, images and weights, is not run again. The images are the
    first ones of ``attacked_cases``, the same for every run on the data set.

    Args:
        run: a run of task ``images`` with at least one trained seed; for the shifts of ``OF_MODELS`` alone,
            of task ``tokens`` too.
        steps: of ``choose_steps``.
        shifts: of ``SHIFTS``, measured after the attacks.
        shift_cases: number of images of each shift, by default as ``measure_shift`` says.
        seed: of the model; by default every trained one.
        transfer: the run against which transferred attacks work, with the model of the same seed, or of its
            first one.
        members: runs whose models join those of this run in the shift ``ensemble``, which is measured once
            and written beside the run's last seed.
        data_root: folder of the data; by default the one used in training.
        output: folder to write into; by default the run.
        again: whether to run attacks again that are in the file.
        batch_size: number of images attacked together.
        on_progress: called with a line of progress.

    Returns:
        The content of the file of every seed.

    Raises:
        InputError: for a run of another task or without seeds, for a ``transfer`` on other data, for a file
            that is damaged, and for a folder that cannot be written.
    """
    require_positive(batch_size=batch_size)
    experiment = _experiment(run, data_root, shifts if not steps else [*shifts, "attacks"])
    _check_transfer(run, steps, transfer)
    for step in steps:
        require_classes(step.made(), len(run.facts["class_names"]))
    seeds = run.seeds if seed is None else [seed]
    models = {each: run.fast_model(each) for each in seeds}
    if not seeds:
        raise InputError(f"run {run.folder}: no trained seed in it yet")
    folder = RunFolder(output or run.folder)
    records = {}
    for each, model in models.items():
        source = None if transfer is None else _source(transfer, each)
        with contextlib.ExitStack() as held:
            with writing(f"output {folder.path}"):
                folder.seed_path(each).mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(folder.seed_path(each)))
            session = _Session(run, experiment, folder, each, again)
            for number, step in enumerate(steps, 1):
                session.run_step(
                    model, step, source, batch_size, _numbered(on_progress, each, number, len(steps))
                )
            for name in shifts:
                if name == "ensemble":
                    if each != seeds[-1]:
                        continue
                    found = [run.fast_model(one) for one in run.seeds]
                    found += [member.fast_model(one) for member in members for one in member.seeds]
                    require_members(len(found), f"run {run.folder}")
                else:
                    found = [model]
                session.run_shift(found, name, shift_cases, _numbered(on_progress, each))
            records[each] = session.record
    return records


class _Session:
    """The file of one seed, and the attacks that are added to it."""

    def __init__(
        self, run: SavedRun, experiment: _Experiment, folder: RunFolder, seed: int, again: bool
    ) -> None:
        self.experiment = experiment
        self.seed = seed
        if isinstance(experiment, ImageExperiment):
            self.split: ImageSplit | TokenSplit = experiment.whole_test
        else:
            self.split = experiment.data.test
        self.path = folder.robustness_path(seed)
        self.record: dict[str, Any] = _heading(run, len(self.split), seed)
        self.earlier: list[dict[str, Any]] = []
        found = folder.robustness(seed)
        if found is not None and found["weights"] == self.record["weights"]:
            self.record = found | self.record  # what other commands have written into it stays
            self.earlier = found["attacks"]
        self.record |= {"attacks": list(self.earlier), "warnings": masking_warnings(self.earlier)}
        self.again = again

    def run_shift(
        self, models: Sequence[nn.Module], name: str, cases: int | None, on_progress: OnProgress
    ) -> None:
        """Measure a shift that is not in the file yet, and write the file."""
        if name in self.record and not self.again:
            return
        if name in OF_MODELS:
            self.record[name] = self._measure_uncertainty(models, cases, on_progress)
        else:
            assert isinstance(self.experiment, ImageExperiment)
            self.record[name] = measure_shift(
                name, models[0], self.experiment.whole_test, cases=cases,
                kept_size=self.experiment.recipe.kept_size, data_root=self.experiment.data_root,
                on_progress=on_progress,
            )  # fmt: skip
        with writing(f"output {self.path}"):
            write_json(self.path, self.record)

    def _measure_uncertainty(
        self, models: Sequence[nn.Module], cases: int | None, on_progress: OnProgress
    ) -> dict[str, Any]:
        if isinstance(self.experiment, ImageExperiment):
            found, absent = self.experiment.uncertain_cases(self.seed, cases, on_progress)
        else:
            found, absent = self.experiment.uncertain_cases(self.seed, cases)
        return measure_uncertainty(models, found, on_progress=on_progress) | {"absent": absent}

    def run_step(
        self,
        model: nn.Module,
        step: AttackStep,
        source: TransferSource | None,
        batch_size: int,
        on_progress: OnProgress,
    ) -> None:
        """Run a step that is not in the file yet, and write the file."""
        indices = attacked_cases(len(self.split), step.cases)
        step = dataclasses.replace(step, cases=len(indices))
        key = step.record() | {"source": source.record if source and step.transferred else None}
        attacks = self.record["attacks"]
        same = [entry for entry in attacks if all(entry.get(name) == value for name, value in key.items())]
        if any(entry not in self.earlier or not self.again for entry in same):
            return
        title = attack_title(key)
        on_progress(f"{title}, {len(indices)} images")
        assert isinstance(self.split, ImageSplit)
        images, labels = _tensors(self.split.subset(indices), model)
        entry = measure_attack(
            model,
            images,
            labels,
            step,
            source=source.model if source else None,
            batch_size=batch_size,
            on_progress=lambda done: on_progress(f"{title}, {done} of {len(indices)} images"),
        )
        self.record["attacks"] = [other for other in attacks if other not in same] + [key | entry]
        self.record["warnings"] = masking_warnings(self.record["attacks"])
        with writing(f"output {self.path}"):
            write_json(self.path, self.record)


def _experiment(run: SavedRun, data_root: str | Path | None, measured: Sequence[str]) -> _Experiment:
    task = run.recipe.task_name
    if task == "tokens" and set(measured) <= set(OF_MODELS):
        experiment = run.experiment(data_root)
        assert isinstance(experiment, TokenExperiment)
        return experiment
    if task != "images":
        accepted = f"accepted: task images; task tokens with {' and '.join(OF_MODELS)}"
        raise InputError(f"run {run.folder}: task {task} has no images to attack ({accepted})")
    experiment = run.experiment(data_root)
    assert isinstance(experiment, ImageExperiment)
    return experiment


def _check_transfer(run: SavedRun, steps: Sequence[AttackStep], transfer: SavedRun | None) -> None:
    if transfer is None:
        if any(step.transferred for step in steps):
            raise InputError("a transferred attack needs --transfer RUN, the run against which it works")
        return
    differing = [key for key in _SAME_DATA if transfer.facts.get(key) != run.facts.get(key)]
    if differing:
        raise InputError(
            f"transfer {transfer.folder}: its data are not those of {run.folder} (they differ in "
            f"{', '.join(differing)})"
        )


def _source(transfer: SavedRun, seed: int) -> TransferSource:
    chosen = seed if seed in transfer.seeds else None
    model = transfer.fast_model(chosen)
    chosen = transfer.seeds[0] if chosen is None else chosen
    weights = _digest(RunFolder(transfer.folder).weights_path(chosen))
    record = {"run": transfer.folder.name, "seed": chosen, "weights": weights}
    return TransferSource(model, record)


def _heading(run: SavedRun, cases: int, seed: int) -> dict[str, Any]:
    """The content of the file besides the attacks."""
    return {
        "weights": _digest(RunFolder(run.folder).weights_path(seed)),
        "images": {
            "dataset": run.facts["dataset"],
            "split": "test",
            "cases": cases,
            "order": "the first of torch.randperm(cases) with seed 0",
        },
        "versions": {"kernel-attention": __version__} | {name: _version(name) for name in _LIBRARIES},
    }


def _tensors(split: ImageSplit, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Images as floats in [0, 1], (n, C, H, W), and targets, where the model is."""
    device = next(model.parameters()).device
    images = channels_first(split.images).to(device).float() / 255
    return images, torch.from_numpy(split.targets).to(device)


def _numbered(on_progress: OnProgress | None, seed: int, number: int = 0, count: int = 0) -> OnProgress:
    place = f"seed {seed}, attack {number} of {count}" if number else f"seed {seed}"
    return lambda line: None if on_progress is None else on_progress(f"{place}: {line}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
