"""Replace the attention of every small model of timm and transformers, and write docs/replaced-hosts.md.

make hosts                                # write the page (ten minutes); needs timm and transformers
python tools/replaced_hosts.py --check    # say whether it is what it should be; exit code 1

Each kind of attention of a model is replaced by softmax attention with the host's weights. Then the outputs
agree, or the report says what differs, or the model is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import re
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.hosts.sites import find_sites
from kernel_attention_lab.evidence.pages import between_marks, settle
from kernel_attention_lab.evidence.tables import markdown

ROOT = Path(__file__).parents[1]

PAGE = Path("docs") / "replaced-hosts.md"
LARGEST = 130_000_000  # parameters
LARGEST_ERROR = 1e-3  # of the largest output
SECONDS = 60  # for one model
SHOWN = 3  # names of dropped parameters
TITLES = {"exact": "Exact", "reported": "Reported", "refused": "Refused", "wrong": "Wrong"}

# Options that make a configuration small, by what a name means. Lists keep their length.
DEPTHS = {
    r".*layers|(num_|n_)?(layer|blocks)|.*_depth|depth": 2,
    r"(.*_)?vocab_size": 99,
    r"max_(2d_)?(.*_)?position(_embedding)?s|n_positions|n_ctx": 64,
    r"image_size": 32,
    r"patch_size": 8,
    r"(bos|eos|pad|sep|cls|mask|decoder_start)_token_id": 1,
    r"depths|num_layers|layers": 1,
}
WIDTHS = {
    r"hidden_size|d_model|n_embd|embed_dim|dim|embedding_size|projection_dim|word_embed_proj_dim": 32,
    r"(encoder|decoder|output|conv|text|vision|proj|input)_?(hidden_size|dim|embed_dim|hidden_dim)": 32,
    r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|hidden_dim)": 64,
    r".*(attention_heads|num_heads|n_head|n_heads)|num_key_value_heads|num_kv_heads": 4,
    r"head_dim|d_kv|kv_channels|attention_head_dim": 8,
    r"num_local_experts|num_experts|n_routed_experts": 4,
    r"num_mel_bins": 16,
}

# The smallest models of a family of timm have one of these words.
WORDS = ("test_", "atto", "femto", "pico", "nano", "xxs", "tiny", "_t", "_xs", "small", "_s", "b0")

Make = Callable[[], nn.Module]


class Example(NamedTuple):
    """A model, the ways to make it, the smallest first, and how to call it."""

    library: str
    name: str
    ways: tuple[Make, ...]
    call: Callable[[Any], Tensor]


class Row(NamedTuple):
    """One kind of attention in one model, and what became of it: a key of ``TITLES``, and words for it."""

    library: str
    model: str
    attention: str
    outcome: str
    words: str


class NoExample(Exception):
    """A model that cannot be made small, or that takes none of the inputs."""


def examine(example: Example) -> list[Row]:
    """A row for each kind of self-attention of a model; none for a model without attention.

    Raises:
        NoExample: for a model that cannot be tried.
    """
    model, expected = working(example)
    kinds: dict[str, list[str]] = {}
    for site in find_sites(model):
        if not site.cross:
            kinds.setdefault(type(site.module).__name__, []).append(site.path)
    if not kinds:
        try:
            ka.replace_attention(model, {"all": "softmax"})
        except ka.InputError as error:
            reason = str(error).partition("can be replaced: ")[2]
            has_attention = reason and not reason.startswith("accepted")
            return [Row(example.library, example.name, "", "refused", reason)] * bool(has_attention)
    return [
        Row(
            example.library, example.name, kind, *outcome(copy.deepcopy(model), paths, example.call, expected)
        )
        for kind, paths in kinds.items()
    ]


def working(example: Example) -> tuple[nn.Module, Tensor]:
    """The smallest form of a model that can be called, and its output."""
    for make in example.ways:
        with contextlib.suppress(Exception):  # a configuration that is too small for its class, say
            with torch.device("meta"):
                if sum(parameter.numel() for parameter in make().parameters()) > LARGEST:
                    continue
            torch.manual_seed(0)
            model = scattered(make())
            output = example.call(model)
            if output.isfinite().all():
                return model, output
    raise NoExample(example.name)


def outcome(
    model: nn.Module, paths: Iterable[str], call: Callable[[nn.Module], Tensor], expected: Tensor
) -> tuple[str, str]:
    """What becomes of a model with softmax attention in these places, and the words for it."""
    try:
        report = ka.replace_attention(model, dict.fromkeys(paths, "softmax"))
        found = call(model)
    except ka.InputError as error:
        return "refused", re.sub(r"^layers: [^:]*: ", "", str(error))
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    words = list(dict.fromkeys(record.differs for record in report if record.differs))
    if dropped := sorted({name for record in report for name in record.dropped}):
        more = f" and {len(dropped) - SHOWN} more" if len(dropped) > SHOWN else ""
        words.append(f"dropped: {', '.join(dropped[:SHOWN])}{more}")
    if words:
        return "reported", "; ".join(words)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= LARGEST_ERROR:
        return "wrong", f"the outputs are off by {error:.0e}, and the report does not say so"
    return "exact", ""


def timm_examples() -> Iterator[Example]:
    """One small model of every module of timm."""
    import timm

    for module in sorted(timm.list_modules()):
        names = timm.list_models(module=module)
        if names:
            name = next((name for word in WORDS for name in names if word in name), names[0])
            ways = [
                functools.partial(timm.create_model, name, num_classes=5, **more)
                for more in ({"depth": 2}, {})
            ]
            yield Example("timm", name, tuple(ways), call_timm)


def call_timm(model: Any) -> Tensor:
    """The output on an image of the model's size."""
    configured = getattr(model, "default_cfg", {})
    return first_tensor(model(fixed_random(1, *configured.get("input_size", (3, 224, 224)))))


def transformers_examples() -> Iterator[Example]:
    """The bodies of transformers' models, and those with a head for the next token."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found: dict[str, str] = {}
    for mapping in (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for kind, names in mapping.items():
            if kind in CONFIG_MAPPING_NAMES:
                named = [names] if isinstance(names, str) else names
                found |= dict.fromkeys(named, CONFIG_MAPPING_NAMES[kind])
    for name, config in sorted(found.items()):
        sizes = ({**DEPTHS, **WIDTHS}, DEPTHS, {})
        ways = [functools.partial(make_transformers, name, config, patterns) for patterns in sizes]
        yield Example("transformers", name, tuple(ways), call_transformers)


def make_transformers(name: str, config: str, patterns: dict[str, int]) -> nn.Module:
    """A model of transformers, small in what these patterns name."""
    import transformers

    kind = getattr(transformers, config)
    options = small(kind(), patterns)
    if name.endswith(("CausalLM", "LMHeadModel")):
        options["is_decoder"] = True
    return getattr(transformers, name)(kind(**options))


def small(config: Any, patterns: dict[str, int]) -> dict[str, Any]:
    """Options that make a configuration of this class small."""
    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        numbers = [number for pattern, number in patterns.items() if re.fullmatch(pattern, name)]
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            options[name] = type(value)(**small(value, patterns))
        elif numbers and type(value) is int:
            options[name] = numbers[0]
        elif numbers and isinstance(value, list) and all(type(part) is int for part in value):
            options[name] = [numbers[-1]] * len(value)
    return options


def call_transformers(model: Any) -> Tensor:
    """The first output of a model on the first inputs that it takes."""
    config = model.config
    takes = inspect.signature(model.forward).parameters
    tokens = torch.arange(10, 34).reshape(2, 12)
    parts = [part for part in (config, getattr(config, "vision_config", None)) if part is not None]
    size = next((part.image_size for part in parts if isinstance(getattr(part, "image_size", None), int)), 64)
    bins, length = getattr(config, "num_mel_bins", 16), 2 * getattr(config, "max_source_positions", 32)
    images, answer = fixed_random(1, 3, size, size), {"decoder_input_ids": tokens[:1, :7]}
    trials: list[dict[str, Any]] = [
        {"input_ids": tokens},
        {"input_ids": tokens[:1], **answer},
        {"pixel_values": images},
        {"input_ids": tokens[:1], "pixel_values": images},
        {"input_values": fixed_random(1, 4000)},
        {"input_features": fixed_random(1, bins, length), **answer},
        {"input_features": fixed_random(1, length, bins), **answer},
        {"input_features": fixed_random(1, bins, length)},
        {"input_features": fixed_random(1, length, bins)},
    ]
    reasons: list[Exception] = []
    for trial in trials:
        if trial.keys() <= takes.keys():
            torch.manual_seed(0)  # some models hide a part of their input
            try:
                return first_tensor(model(**trial))
            except ka.InputError:
                raise
            except Exception as error:
                reasons.append(error)
    raise reasons[0] if reasons else NoExample(type(model).__name__)


def scattered(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, with no parameter at its first value: zeros would hide a difference."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.eval()
    return model


def fixed_random(*shape: int) -> Tensor:
    """The same numbers at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def first_tensor(output: Any) -> Tensor:
    """The first tensor of numbers in an output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def examples() -> Iterator[Example]:
    """All models that may be tried."""
    runpy.run_path(str(ROOT / "tests" / "hosts" / "timm_beside_cpu_torch.py"))
    yield from timm_examples()
    yield from transformers_examples()


def rows(wanted: Callable[[Example], bool] = lambda example: True) -> Iterator[Row]:
    """The rows of all wanted models that can be tried."""
    for example in examples():
        if wanted(example):
            with contextlib.suppress(NoExample, TimeoutError), quiet(), torch.no_grad():
                yield from examine(example)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without others' remarks, and not for longer than a model may take."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    logging.disable(logging.ERROR)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)


def line(row: Row) -> list[str]:
    """The cells of a row."""
    attention = f"`{row.attention}`" if row.attention else ""
    words = [] if row.outcome == "exact" else [re.sub(r"([|<>_*])", r"\\\1", row.words)]
    return [row.library, f"`{row.model}`", attention, *words]


def sections(found: list[Row]) -> list[str]:
    """The page's tables, one for each outcome."""
    text = [""]
    for kind, title in TITLES.items():
        chosen = [row for row in found if row.outcome == kind]
        if chosen:
            head = [
                "library",
                "model",
                "attention",
                *["why" if kind == "refused" else "what"] * (kind != "exact"),
            ]
            text += [f"## {title}: {len(chosen)}", "", *markdown(head, map(line, chosen)), ""]
    return text


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    text = between_marks((ROOT / PAGE).read_text(encoding="utf-8"), "hosts", sections(list(rows())))
    return settle(ROOT, {PAGE: text}, arguments, "python tools/replaced_hosts.py would change")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
