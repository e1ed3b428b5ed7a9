"""Export a model of every mechanism, check what comes out, and write the table of docs/export.md.

make exports                       # write the table (two minutes); needs the extra `export`
python tools/exports.py --check    # say whether it is what it should be; exit code 1
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.hosts.exporting import (
    CausalStep,
    export_program,
    export_step,
    onnx_bytes,
    onnx_error,
    onnx_step_error,
    program_lengths,
)
from kernel_attention.mechanisms import get_mechanism, list_attention
from kernel_attention.models import CausalLanguageModel, SequenceClassifier
from kernel_attention_lab.evidence.pages import between_marks, settle
from kernel_attention_lab.evidence.tables import markdown

ROOT = Path(__file__).parents[1]

PAGE = Path("docs") / "export.md"
HEAD = ("mechanism", "`torch.export`", "ONNX", "lengths", "one causal step, both")

LENGTH, FEATURES, VOCABULARY = 11, 3, 17
SIZES = {"embed_dim": 16, "num_heads": 4, "num_layers": 1, "feedforward_dim": 19}
# Two right orders of the same sums differ by a few roundings.
LARGEST_ERROR = 16.0


def classifier_cells(name: str) -> list[str]:
    """How a masked classifier of this mechanism is exported: the second to the fourth column."""
    torch.manual_seed(0)
    spec = {name: dict(get_mechanism(name).example)}
    model = SequenceClassifier(FEATURES, 5, LENGTH, spec, **SIZES).eval()
    x, mask = inputs(5, LENGTH)
    program = export_program(model, x, mask)
    least, longest = program_lengths(program)
    cases = [inputs(batch, length) for batch, length in ((1, least), (2, least), (3, (least + longest) // 2))]
    for x, mask in cases:
        found = program.module()(x=x, attention_mask=mask)
        torch.testing.assert_close(found, model(x, mask), rtol=1e-4, atol=1e-5)
    lengths = "one" if least == longest else f"from {least}"
    try:
        content = onnx_bytes(program)
    except InputError as error:
        return ["yes", f"no: {error}", lengths]
    for x, mask in cases:
        error = onnx_error(content, model, x, mask)
        assert error <= LARGEST_ERROR, f"{name}: {error} rounding errors"
    return ["yes", "yes", lengths]


def step_cell(name: str) -> str:
    """Whether one step of a causal model is exported, and why not: the last column."""
    torch.manual_seed(0)
    try:
        model = CausalLanguageModel(VOCABULARY, LENGTH, {name: get_mechanism(name).example}, **SIZES).eval()
        program = export_step(model)
    except InputError as error:
        return f"no: {str(error).partition(': ')[2]}"
    text = torch.randint(VOCABULARY, (2, LENGTH))
    state, step = CausalStep(model).initial_state(2), program.module()
    for place, tokens in enumerate(text.unbind(1)):
        logits, state = step(tokens=tokens, state=state)
        torch.testing.assert_close(logits, model(text)[:, place], rtol=1e-4, atol=1e-5)
    error = onnx_step_error(onnx_bytes(program), model, text)
    assert error <= LARGEST_ERROR, f"{name}: {error} rounding errors"
    return "yes"


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Series and their mask; the last series is the shortest."""
    lengths = torch.arange(batch, 0, -1) * length / batch
    return torch.randn(batch, length, FEATURES), torch.arange(length) < lengths.ceil()[:, None]


def row(name: str) -> list[str]:
    """The mechanism's line of the table."""
    return [f"`{name}`", *classifier_cells(name), step_cell(name)]


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    lines = ["", *markdown(HEAD, [row(mechanism.name) for mechanism in list_attention()]), ""]
    text = between_marks((ROOT / PAGE).read_text(encoding="utf-8"), "exports", lines)
    return settle(ROOT, {PAGE: text}, arguments, "python tools/exports.py would change")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
