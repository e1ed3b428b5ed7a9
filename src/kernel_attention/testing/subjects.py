"""Layers under test, and the inputs that they get."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.errors import InputError
from kernel_attention.mechanisms import get_mechanism

BATCH, HEADS, LENGTH, HEAD_DIM, CONTEXT = 7, 3, 11, 5, 13
EMBED_DIM = HEADS * HEAD_DIM
MAX_LEN = 17
LENGTHS = (11, 7, 2, 5, 1, 10, 3)  # real tokens of each sequence in a padded batch
PROMPTS = (6, 1, 4, 3, 2, 0, 5)  # real tokens of each sequence's prompt


@dataclass(frozen=True)
class Subject:
    """A mechanism under test.

    Attributes:
        name: for messages.
        make: ``make(embed_dim, num_heads)`` gives a new layer. Where it accepts ``device`` and ``dtype`` too,
            they are checked.
        objective_over: what an objective that is one number is a mean over, "tokens" or "sequences".
        mixes_tokens: "yes", "no", or words for "it depends", which are not checked.
        fixed_length: whether the layer takes sequences of ``LENGTH`` tokens only, as one over a grid does.
        exempt: {name of a check: why it does not apply}.
    """

    name: str
    make: Callable[..., AttentionLayer]
    objective_over: str = "tokens"
    mixes_tokens: str = "yes"
    fixed_length: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)

    def build(self, dtype: torch.dtype = torch.float64) -> AttentionLayer:
        """A layer in training mode, with no parameter at its initial value, where zeros hide errors."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            layer = self.make(EMBED_DIM, HEADS)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return layer.to(dtype).train()

    def places_parameters(self) -> bool:
        """True where ``make`` accepts ``device`` and ``dtype``."""
        try:
            inspect.signature(self.make).bind(EMBED_DIM, HEADS, device=None, dtype=None)
        except TypeError:
            return False
        return True

    def call_forms(self) -> list[dict[str, bool]]:
        """The ways in which the layer may be called on one batch of sequences."""
        forms = [{"is_causal": False}]
        return [*forms, {"is_causal": True}] if self.build().supports(causal=True) else forms


def subject(mechanism: str | Callable[..., AttentionLayer], **options: Any) -> Subject:
    """A registered mechanism with these options, or what makes a layer, to be checked.

    Options that the mechanism cannot do without come from the ``example`` of its registration. ``max_len`` is
    set where the mechanism has it and the options do not. ``sample`` is off, because calls are compared.
    """
    if not isinstance(mechanism, str):
        return Subject(getattr(mechanism, "__name__", repr(mechanism)), mechanism)
    row = get_mechanism(mechanism)
    options = {**row.example, **options}
    if "sample" in row.options:
        options.setdefault("sample", False)
    if "max_len" in row.options:
        options.setdefault("max_len", MAX_LEN)
    is_fixed = _is_fixed(row.build(EMBED_DIM, HEADS, **options))
    placed = {"device", "dtype"} <= set(inspect.signature(row.layer).parameters)
    make = functools.partial(row.build, **options)
    return Subject(
        mechanism,
        make if placed else lambda *sizes: make(*sizes),
        mixes_tokens=row.mixes_tokens,
        fixed_length=is_fixed,
    )


def _is_fixed(layer: AttentionLayer) -> bool:
    """True where the layer takes ``LENGTH`` tokens and refuses fewer."""
    layer(torch.zeros(1, LENGTH, EMBED_DIM))
    try:
        layer(torch.zeros(1, LENGTH - 1, EMBED_DIM))
    except InputError:
        return True
    return False


def inputs(dtype: torch.dtype = torch.float64, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Standard normal inputs, (B, N, d)."""
    return torch.randn(batch, length, EMBED_DIM, dtype=dtype)


def right_padding(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """A mask of right padding, (B, N) bool, True = real token."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def masks() -> Iterator[Tensor]:
    """Masks with right padding, left padding, and holes."""
    yield right_padding()
    yield right_padding().flip(1)
    holes = torch.rand(BATCH, LENGTH) < 0.6
    holes[:, 4] = True
    yield holes


def objective(layer: AttentionLayer) -> Tensor | None:
    """J of the last training forward, a number or (B,); None for a layer without one."""
    return layer.objective if isinstance(layer, PenalizedAttention) else None
