"""A trained run for other people's tools: a folder of Hugging Face transformers, or a file of one program."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.errors import InputError, unknown, writing
from kernel_attention_lab.data.texts.vocabulary import (
    END_OF_LINE,
    UNKNOWN,
    BytePairVocabulary,
    Vocabulary,
    WordVocabulary,
    vocabulary_from_state,
)
from kernel_attention_lab.data.tokens.loading import BREAK, WORD
from kernel_attention_lab.runs.saved import SavedRun
from kernel_attention_lab.tasks.images import kept_size

FORMATS = ("hugging-face", "torch", "onnx")
PADDING = "<|pad|>"
"""The token that fills up a batch. Its number is V, which no text has; the models never look at it."""


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
    from kernel_attention_lab.runs.program_export import export_file

    return export_file(run, path, format=format, seed=seed)


def is_model(folder: Path) -> bool:
    """True of a folder that transformers wrote, and not a run."""
    return (folder / "config.json").is_file() and not (folder / "config.yaml").exists()


def export_model(folder: Path, path: Path, *, format: str, seed: int | None = None) -> str:
    """Write the model of a folder of transformers, such as a converted one, as the file of a program.

    Returns:
        What the program takes, in a few words.

    Raises:
        InputError: for another format, a seed, a model that is not exported, and a file that exists.
        RuntimeError: where an ONNX file does not compute what the model computes.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if format == "hugging-face":
        raise InputError(
            f"model {folder}: is a folder of transformers already (accepted: --to torch, --to onnx)"
        )
    if seed is not None:
        raise InputError(f"seed={seed}: the model {folder} has no seeds")
    from kernel_attention_lab.runs.program_export import export_model_file

    return export_model_file(folder, path, format=format)


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
    with writing(f"folder {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as around:
            part = Path(around) / "part"
            part.mkdir()
            yield part
            os.replace(part, folder)


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


def make_tokenizer(vocabulary: Vocabulary, max_len: int, *, sentences: bool = False) -> Any:
    """A tokenizer that gives every text the numbers that the vocabulary gives it.

    Args:
        vocabulary: of the run.
        max_len: the model's longest sequence.
        sentences: whether words are those of ``words_of``, as in classification, or stand between blanks.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(vocabulary, sentences),
        model_max_length=max_len,
        pad_token=PADDING,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _tokenizer(vocabulary: Vocabulary, sentences: bool) -> Any:
    import tokenizers

    if isinstance(vocabulary, BytePairVocabulary):
        return tokenizers.Tokenizer.from_str(vocabulary.state()["tokenizer"])
    if isinstance(vocabulary, WordVocabulary):
        return _word_tokenizer(vocabulary, sentences)
    letters = _letters_of_bytes()
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def _word_tokenizer(vocabulary: WordVocabulary, sentences: bool) -> Any:
    import tokenizers
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    numbers = {word: number for number, word in enumerate(vocabulary.words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=numbers, unk_token=UNKNOWN))
    # Python knows four separators of ASCII as white space that Unicode's definition lacks.
    steps: list[Any] = [normalizers.Replace(Regex("[\x1c-\x1f]"), " ")]
    if sentences:
        steps += [normalizers.Lowercase(), normalizers.Replace(Regex(BREAK), " ")]
        made.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    else:
        steps += [normalizers.Replace("\n", f" {END_OF_LINE} ")]
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.normalizer = normalizers.Sequence(steps)
    # A blank stands before every word, the first one too, so that a continuation can be put after a prompt.
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("^"), " "),
            decoders.Fuse(),
            decoders.Replace(f" {END_OF_LINE}", "\n"),
            decoders.Replace("\n ", "\n"),
        ]
    )
    return made


def _letters_of_bytes() -> list[str]:
    """The letters by which byte-level tokenizers write the 256 bytes.

    Printable characters of Latin-1 stand for themselves, and the others, in order, for U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
