"""A trained run for other people's tools: a folder of Hugging Face transformers, or a file of one program."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.errors import InputError, unknown
from kernel_attention.experiments.data.texts.vocabulary import vocabulary_from_state
from kernel_attention.experiments.training.hugging_face_tokenizer import make_tokenizer
from kernel_attention.experiments.training.image_prediction import kept_size
from kernel_attention.experiments.training.saved import SavedRun

FORMATS = ("hugging-face", "torch", "onnx")


class _Export(NamedTuple):
    """The name of the model's class, the arguments of its configuration, and what prepares its input."""

    model: str
    options: dict[str, Any]
    processor: Any = None


def export_run(run: SavedRun, path: Path, *, format: str = "hugging-face", seed: int | None = None) -> str:
    """Write the model of a seed (by default the run's first) into a new folder or file.

    It is complete or not there.

    Returns:
        What the program takes, in a few words; empty for a folder of transformers.

    Raises:
        InputError: for a task or a format that is not exported, and a folder that has content, a file that
            exists, or a place that cannot be written.
        RuntimeError: where an ONNX file does not compute what the model computes.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if format == "hugging-face":
        _export_folder(run, path, seed)
        return ""
    from kernel_attention.experiments.training.program_export import export_file

    return export_file(run, path, format=format, seed=seed)


def _export_folder(run: SavedRun, folder: Path, seed: int | None) -> None:
    task = run.recipe.task_name
    if task not in _EXPORTS:
        raise InputError(f"run {run.folder}: task {task} is not exported (accepted: {', '.join(_EXPORTS)})")
    export = _EXPORTS[task](run)
    from kernel_attention.hosts import hugging_face

    kind = getattr(hugging_face, export.model)
    config = hugging_face.KernelAttentionConfig(**export.options)
    model = kind.from_model(run.model(seed), config)
    with _new_folder(folder) as part:
        model.save_pretrained(part)
        if export.processor is not None:
            export.processor.save_pretrained(part)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"folder {folder}: exists (accepted: a new or an empty folder)")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as around:
            part = Path(around) / "part"
            part.mkdir()
            yield part
            os.replace(part, folder)
    except OSError as error:
        raise InputError(f"folder {folder}: cannot be written ({error.strerror or error})") from None


def _language(run: SavedRun) -> _Export:
    recipe: Any = run.recipe
    options = {"vocabulary_size": run.facts["vocabulary_size"], **recipe.model_options()}
    vocabulary = vocabulary_from_state(run.facts["vocabulary_state"])
    return _Export("KernelAttentionForCausalLM", options, make_tokenizer(vocabulary, options["max_len"]))


def _tokens(run: SavedRun) -> _Export:
    recipe: Any = run.recipe
    facts = run.facts
    if facts["parts"] != 1:
        raise InputError(f"run {run.folder}: a model of pairs of texts has no counterpart in transformers")
    options = {name: facts[name] for name in ("vocabulary_size", "max_len")} | recipe.encoder_options()
    options["is_causal"] = recipe.is_causal
    tokenizer = None
    if facts.get("vocabulary") is not None:
        vocabulary = vocabulary_from_state(facts["vocabulary"])
        tokenizer = make_tokenizer(vocabulary, facts["max_len"], sentences=True)
    return _Export(
        "KernelAttentionForSequenceClassification", options | _classes(facts["class_names"]), tokenizer
    )


def _images(run: SavedRun) -> _Export:
    from transformers import CLIPImageProcessor

    recipe: Any = run.recipe
    facts = run.facts
    options = {"image_size": [facts["height"], facts["width"]], **recipe.model_options()}
    kept = kept_size(recipe, facts)
    processor = CLIPImageProcessor(
        do_resize=bool(kept),
        size={"shortest_edge": kept or facts["height"]},
        crop_size={"height": facts["height"], "width": facts["width"]},
        do_normalize=False,  # the model does that
    )
    return _Export(
        "KernelAttentionForImageClassification", options | _classes(facts["class_names"]), processor
    )


def _time_series(run: SavedRun) -> _Export:
    recipe: Any = run.recipe
    facts = run.facts
    options = {"in_features": facts["num_features"], "max_len": facts["max_len"], **recipe.encoder_options()}
    return _Export("KernelAttentionForTimeSeriesClassification", options | _classes(facts["class_names"]))


def _classes(names: list[str]) -> dict[str, Any]:
    """The names of the classes; a regression has none and one value."""
    if not names:
        return {"num_labels": 1}
    labels = {number: str(name) for number, name in enumerate(names)}
    return {"id2label": labels, "label2id": {name: number for number, name in labels.items()}}


_EXPORTS: dict[str, Callable[[SavedRun], _Export]] = {
    "language": _language,
    "tokens": _tokens,
    "images": _images,
    "time_series": _time_series,
}
