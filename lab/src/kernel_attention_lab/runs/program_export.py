"""A trained run as one file that runs without this package: a program of ``torch.export``, or ONNX."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import UserError

from kernel_attention.errors import InputError, writing
from kernel_attention.files import write_atomically
from kernel_attention.hosts.exporting import (
    export_program,
    export_step,
    onnx_bytes,
    onnx_error,
    onnx_step_error,
    program_lengths,
)
from kernel_attention.models.sequence import is_resolved
from kernel_attention.version import __version__
from kernel_attention_lab.runs.saved import SavedRun

_SEQUENCES = 3  # of the inputs that a program is traced and checked with
_STEPS = 4
_LARGEST_ERROR = 16.0
"""In units of the model's rounding error; two right orders of the same sums differ by a few."""
_LONGEST_TEXT = 512


def export_file(run: SavedRun, file: Path, *, format: str, seed: int | None = None) -> str:
    """Write the model of a seed, and say in one line what it takes.

    An ONNX file is compared with the model by onnxruntime before it is written.

    Raises:
        InputError: for a task or a model that is not exported, and a file that exists or cannot be written.
        RuntimeError: where the ONNX file does not compute what the model computes.
    """
    task = run.recipe.task_name
    _require_new(file)
    if task != "language" and task not in _INPUTS:
        raise InputError(
            f"run {run.folder}: task {task} is not exported (accepted: {', '.join([*_INPUTS, 'language'])})"
        )
    model = run.model(seed)
    measure: Callable[[bytes], float]
    if task == "language":
        remark = "one step of decoding; the state before the first token is zero"
        text = torch.randint(model.vocabulary_size, (_SEQUENCES, min(_STEPS, model.max_len)))
        program, measure = export_step(model), partial(onnx_step_error, model=model, text=text)
    else:
        inputs = _INPUTS[task](model, run.facts)
        program = export_program(model, *inputs)
        remark, measure = _takes(program, "sequences"), _distance(model, *inputs)
    names = [str(name) for name in run.facts.get("class_names") or []]
    recipe: Any = run.recipe
    facts = {"task": task, "dataset": recipe.dataset, "class_names": json.dumps(names), "takes": remark}
    _write_program(program, file, format, facts, measure)
    return remark


def export_model_file(folder: Path, file: Path, *, format: str) -> str:
    """``export_file`` of a folder of transformers with a tokenizer, whose model has layers of ours or not.

    The program takes texts as long as the model's, and up to 512 tokens.

    Raises:
        InputError: also for a folder without a tokenizer, and a model that torch.export cannot trace.
    """
    from kernel_attention_lab.runs.convert import open_model

    _require_new(file)
    model, tokenizer = open_model(str(folder))
    places = getattr(model.config, "max_position_embeddings", _LONGEST_TEXT)
    mask = _mask(_SEQUENCES, min(_LONGEST_TEXT, places, tokenizer.model_max_length)).long()
    tokens = torch.randint(model.config.vocab_size, mask.shape)
    try:
        program = export_program(model, tokens, mask)
    except (RuntimeError, UserError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"model {folder}: torch.export cannot trace {type(model).__name__} ({reason}); "
            "in Python, kernel_attention.hosts.exporting.export_program exports a part of it"
        ) from error
    remark = _takes(program, "texts")
    kind = type(model).__name__
    names = list(model.config.id2label.values()) if "Classification" in kind else []
    facts = {"model": kind, "class_names": json.dumps(names), "takes": remark}
    _write_program(program, file, format, facts, _distance(model, tokens, mask))
    return remark


def _require_new(file: Path) -> None:
    if file.exists():
        raise InputError(f"file {file}: exists (accepted: a new file)")


def _takes(program: torch.export.ExportedProgram, cases: str) -> str:
    lengths = program_lengths(program)
    return (
        "any number of images"
        if lengths is None
        else f"{cases} of {lengths[0]} to {lengths[1]}; pad shorter ones"
    )


def _distance(model: Any, *inputs: Tensor) -> Callable[[bytes], float]:
    return lambda content: onnx_error(content, model, *inputs)


def _write_program(
    program: torch.export.ExportedProgram,
    file: Path,
    format: str,
    facts: dict[str, str],
    measure: Callable[[bytes], float],
) -> None:
    """Write the program with facts that its reader needs; ``measure`` gives the error of a file of ONNX."""
    facts = {"kernel_attention": __version__, **facts}
    if format == "torch":
        _write(
            file, lambda part: torch.export.save(program, part, extra_files={"facts.json": json.dumps(facts)})
        )
        return
    content = onnx_bytes(program, facts)
    error = measure(content)
    if not error <= _LARGEST_ERROR:
        raise RuntimeError(f"the ONNX file is {error:.3g} rounding errors from the model")
    _write(file, lambda part: part.write(content))


def _write(file: Path, write: Callable[[Any], object]) -> None:
    with writing(f"file {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, write)


def _time_series(model: Any, facts: dict[str, Any]) -> tuple[Tensor, Tensor]:
    mask = _mask(_SEQUENCES, facts["max_len"])
    x = torch.randn(*mask.shape, facts["num_features"])
    mean, std = model.encoder.scale_in(torch.float64)
    # A program takes one type. A signal far from zero needs the wider one.
    return (x if is_resolved(mean, std).all() else x * std + mean), mask


def _tokens(model: Any, facts: dict[str, Any]) -> tuple[Tensor, Tensor]:
    parts = facts["parts"]
    mask = _mask(_SEQUENCES * parts, facts["max_len"])
    if parts > 1:
        mask = mask.unflatten(0, (_SEQUENCES, parts))
    return torch.randint(facts["vocabulary_size"], mask.shape), mask


def _images(model: Any, facts: dict[str, Any]) -> tuple[Tensor]:
    return (torch.rand(_SEQUENCES, len(model.input_mean), facts["height"], facts["width"]),)


def _mask(sequences: int, length: int) -> Tensor:
    """Of sequences of different lengths, the first of them whole."""
    lengths = torch.arange(sequences, 0, -1) * length / sequences
    return torch.arange(length) < lengths.ceil()[:, None]


_INPUTS: dict[str, Callable[[Any, dict[str, Any]], tuple[Tensor, ...]]] = {
    "time_series": _time_series,
    "tokens": _tokens,
    "images": _images,
}
