"""A trained model of Hugging Face transformers converted to other attention, from a folder to a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import kernel_attention.hosts.hugging_face  # noqa: F401 - a model that was converted before opens with it
from kernel_attention.analysis.conversion import ConversionProgress, ConversionReport, convert_attention
from kernel_attention.errors import InputError, writing
from kernel_attention.files import write_text_atomically

CHECKPOINT = "conversion.pt"
REPORT = "conversion.json"


def convert_model(
    model: str,
    data: Path,
    output: Path,
    *,
    attention: Any,
    layers: str = "auto",
    texts: int = 1024,
    batch_size: int = 32,
    max_length: int = 256,
    on_progress: Callable[[ConversionProgress], None] | None = None,
    **settings: Any,
) -> ConversionReport:
    """Convert a model and write it with its tokenizer, so that ``from_pretrained`` opens the folder.

    The trained layers are kept in the folder from the first one on, and the same call goes on from there.

    Args:
        model: folder of the model, or its name for ``from_pretrained``.
        data: file of texts, one a line.
        output: folder to write; new, or that of an interrupted conversion.
        attention: the new mechanism.
        layers: "auto", or which, several separated by commas.
        texts: the number of lines that are read.
        batch_size: texts that the model reads together.
        max_length: tokens of a text at most.
        on_progress: called after every stage.
        settings: of ``convert_attention``.

    Raises:
        InputError: for a model that is not there, a file without texts, a folder that holds something else.
    """
    _require_free(output)
    batches_of = _lines(data, texts)
    whole, tokenizer = open_model(model)
    body = getattr(whole, "base_model", whole)
    report = convert_attention(
        body,
        {layers: attention},
        list(_batches(batches_of, tokenizer, batch_size, max_length)),
        checkpoint=output / CHECKPOINT,
        on_progress=on_progress,
        **settings,
    )
    generation = getattr(whole, "generation_config", None)
    if generation is not None and getattr(body.config, "use_cache", None) is False:
        generation.use_cache = False
    with writing(f"output {output}"):
        whole.save_pretrained(output)
        tokenizer.save_pretrained(output)
        write_text_atomically(output / REPORT, json.dumps(_record(report), indent=1) + "\n")
        (output / CHECKPOINT).unlink(missing_ok=True)
    return report


def _require_free(output: Path) -> None:
    if output.is_file():
        raise InputError(f"output {output}: is a file, expected a new folder")
    if (output / REPORT).exists():
        raise InputError(f"output {output}: holds a conversion that is done")
    if output.is_dir() and any(output.iterdir()) and not (output / CHECKPOINT).exists():
        raise InputError(f"output {output}: holds other files, expected a new folder")


def _lines(data: Path, count: int) -> list[str]:
    try:
        lines = [line.strip() for line in data.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise InputError(f"data {data}: is not a text in UTF-8") from None
    found = [line for line in lines if line][:count]
    if not found:
        raise InputError(f"data {data}: holds no text; expected one a line")
    return found


def open_model(model: str) -> tuple[Any, Any]:
    """The model in its own class, in evaluation mode, and its tokenizer.

    Raises:
        InputError: where transformers opens no model with a tokenizer there.
    """
    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(model)
            name = (getattr(config, "architectures", None) or ["AutoModel"])[0]
            made = getattr(transformers, name, transformers.AutoModel).from_pretrained(model)
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"model {model}: transformers cannot open it ({reason[:200]})") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return made.eval(), tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    bars = transformers.utils.logging
    was_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            bars.enable_progress_bar()


def _batches(
    lines: list[str], tokenizer: Any, batch_size: int, max_length: int
) -> Iterator[Mapping[str, torch.Tensor]]:
    for first in range(0, len(lines), batch_size):
        yield dict(
            tokenizer(
                lines[first : first + batch_size], padding=True, truncation=True, max_length=max_length,
                return_tensors="pt",
            )
        )  # fmt: skip


def _record(report: ConversionReport) -> dict[str, Any]:
    """The report as data for JSON."""
    found = {
        field.name: getattr(report, field.name)
        for field in dataclasses.fields(report)
        if field.name not in ("layers", "replaced", "prices")
    }
    layers = [
        {
            **{f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)},
            "options": dict(layer.options),
        }
        for layer in report.layers
    ]
    prices = [
        {
            "path": kind.path, "attention": kind.attention, "pays_from": kind.pays_from,
            "before": [dataclasses.asdict(price) for price in kind.before.values()],
            "after": [dataclasses.asdict(price) for price in kind.after.values()],
        }
        for kind in report.prices
    ]  # fmt: skip
    return {**found, "layers": layers, "prices": prices}
