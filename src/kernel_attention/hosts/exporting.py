"""Models with our layers as programs that run without this package: ``torch.export`` and ONNX.

A program is traced from the readable forms of the mechanisms, so it holds PyTorch's own operators only.

Legend: B sequences, N tokens, V tokens of the vocabulary.
"""

import contextlib
import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kernel_attention.core.decoding import bound_positions, fill_tensors, tensors_of
from kernel_attention.errors import InputError
from kernel_attention.models import CausalLanguageModel
from kernel_attention.models.language.decoding import is_recurrent

__all__ = [
    "CausalStep",
    "export_program",
    "export_step",
    "onnx_bytes",
    "onnx_error",
    "onnx_step_error",
    "program_lengths",
]

_BATCH = 3  # of the inputs that a program is traced with; 1 would be taken for a constant


def export_program(model: nn.Module, x: Tensor, attention_mask: Tensor | None = None) -> ExportedProgram:
    """A classifier ``model(x)`` or ``model(x, attention_mask)`` as a program of ``torch.export``.

    The model is one of ours, or one of torch, timm or transformers after ``replace_attention``, whose own
    names the inputs of the program then have (``pixel_values``, ``input_ids``).

    The program takes any number of sequences. With a mask it also takes any length from the program's least,
    see ``program_lengths``, to that of ``x``: pad shorter sequences, which changes nothing. Where the tokens
    lie on a grid (``conv2d``), it takes the length of ``x`` only. torch.export raises its own error for what
    it cannot trace.

    Args:
        model: in evaluation mode.
        x: an input with at least two sequences, as long as the longest. Its values do not matter.
        attention_mask: a mask for it, bool, the tokens last; None: the program has no mask.

    Raises:
        InputError: for a model in training mode, and a single sequence.
    """
    if model.training:
        raise InputError("model: it is in training mode (accepted: model.eval())")
    if len(x) < 2:
        raise InputError(f"x has {len(x)} sequences, expected at least 2: one would be taken for a constant")
    inputs = {next(iter(inspect.signature(model.forward).parameters)): x}
    sizes = {0: Dim.DYNAMIC}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
        sizes[attention_mask.dim() - 1] = Dim.AUTO(min=1, max=attention_mask.size(-1))
    return _traced(model, inputs, dict.fromkeys(inputs, sizes))


def program_lengths(program: ExportedProgram) -> tuple[int, int] | None:
    """The least and the greatest length that a program with a mask takes; None for one without a mask."""
    mask = _input_values(program).get("attention_mask")
    if mask is None:
        return None
    length = mask.shape[-1]
    limits = program.range_constraints.get(length.node.expr) if isinstance(length, torch.SymInt) else None
    return (int(length), int(length)) if limits is None else (int(limits.lower), int(limits.upper))


class CausalStep(nn.Module):
    """One step of decoding as a map from tensors to tensors: token and state -> logits and next state.

    The state is a list of tensors, all zero before the first token, with the sequences first. A layer that
    remembers keys and values has room for ``max_len`` of them.

    Args:
        model: in evaluation mode.

    Raises:
        InputError: for a layer without a step-by-step form.
    """

    def __init__(self, model: CausalLanguageModel) -> None:
        super().__init__()
        for number, layer in enumerate(model.layers):
            attention: Any = layer.attention
            if not is_recurrent(attention):
                raise InputError(
                    f"layer {number}, {attention.mechanism_name!r}, has no exportable step: "
                    f"{attention.why_not(decoding=True)}"
                )
        self.model = model
        # The positions of padded texts are tensors. A step at the last place makes the buffers long enough.
        tokens = torch.zeros(1, model.max_len, dtype=torch.int64)
        first = torch.arange(model.max_len)[None] == 0
        _, state = model.prefill(tokens, attention_mask=first)
        _, state = model.step(tokens[:, 0], bound_positions(state, model.max_len - 1))
        self._state = bound_positions(state, model.max_len - 1)

    def initial_state(self, batch_size: int) -> list[Tensor]:
        """The state before the first token of B texts."""
        return [tensor.new_zeros(batch_size, *tensor.shape[1:]) for tensor in tensors_of(self._state)]

    @torch.no_grad()
    def forward(self, tokens: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Tokens (B,) int64 and the state -> logits of the next tokens (B, V), and the state after them."""
        # A step writes into the buffers that it is given, and a program should leave its inputs alone.
        before = fill_tensors(self._state, [tensor.clone() for tensor in state])
        logits, after = self.model.step(tokens, before)
        return logits, tensors_of(after)


def export_step(model: CausalLanguageModel) -> ExportedProgram:
    """``CausalStep`` of a model as a program of ``torch.export``, for any number of texts.

    Raises:
        InputError: for a model in training mode, and a layer without a step-by-step form.
    """
    if model.training:
        raise InputError("model: it is in training mode (accepted: model.eval())")
    step = CausalStep(model)
    state = step.initial_state(_BATCH)
    inputs = {"tokens": torch.zeros(_BATCH, dtype=torch.int64), "state": state}
    sizes = {0: Dim.DYNAMIC}
    return _traced(step, inputs, {"tokens": sizes, "state": [sizes] * len(state)})


def onnx_bytes(program: ExportedProgram, metadata: Mapping[str, str] | None = None) -> bytes:
    """A program as the content of an ONNX file.

    The inputs have their names in PyTorch. The outputs are ``logits`` and, of a step, ``next_state_0`` and so
    on. Needs the extra ``export``.

    Args:
        program: what ``export_program`` or ``export_step`` gives.
        metadata: texts that the file keeps, by name.

    Raises:
        InputError: for a program with an operator that ONNX does not have.
    """
    import onnxscript  # noqa: F401  the exporter needs it, and says so in many lines

    outputs = ["logits"]
    outputs += [f"next_state_{number}" for number in range(len(program.graph_signature.user_outputs) - 1)]
    try:
        with _quiet():
            made = torch.onnx.export(program, dynamo=True, verbose=False, output_names=outputs)
    except torch.onnx.errors.OnnxExporterError as error:
        operator = re.search(r"torch\.ops\.(\w+\.\w+)", str(error.__cause__))
        if operator is None:
            raise
        raise InputError(f"ONNX has no operator for {operator[1]}, which the model uses") from error
    assert made is not None
    made.model.metadata_props.update(metadata or {})
    return made.model_proto.SerializeToString()


def onnx_error(content: bytes, model: nn.Module, x: Tensor, attention_mask: Tensor | None = None) -> float:
    """How far an ONNX classifier is from the model, in units of the model's own rounding error.

    The unit is the distance of the model from itself in float64, and at least one rounding of its largest
    logit. Any right order of the sums has an error of a few units, at every size and condition. Needs the
    extra ``export``.

    Args:
        content: what ``onnx_bytes`` gives.
        model: the model that was exported.
        x: an input of the model.
        attention_mask: its mask, where the program has one.
    """
    given = [x] if attention_mask is None else [x, attention_mask]
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
    (found, *_) = _session(content)(given)
    with torch.no_grad():
        return _rounding_errors(found, _first(model(*given)), _first(copy.deepcopy(model).double()(*exact)))


def onnx_step_error(content: bytes, model: CausalLanguageModel, text: Tensor) -> float:
    """As ``onnx_error`` for a step: it reads the text (B, N) token by token, and the model all at once."""
    run = _session(content)
    state = CausalStep(model).initial_state(len(text))
    logits = []
    for tokens in text.unbind(1):
        found, *state = run([tokens, *state])
        logits.append(found)
    with torch.no_grad():
        return _rounding_errors(torch.stack(logits, 1), model(text), copy.deepcopy(model).double()(text))


def _first(output: Any) -> Tensor:
    """The output of a model, or the first of several tensors, such as the logits of transformers."""
    return output if isinstance(output, Tensor) else output[0]


def _session(content: bytes) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(content)
    names = [node.name for node in session.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return run


def _rounding_errors(found: Tensor, expected: Tensor, reference: Tensor) -> float:
    largest = reference.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    unit = torch.maximum((expected - reference).abs().max(), torch.finfo(expected.dtype).eps * largest)
    return float((found - reference).abs().max() / unit)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own remarks, which a caller can do nothing about."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _traced(model: nn.Module, inputs: dict[str, Any], sizes: dict[str, Any]) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, (), inputs, dynamic_shapes=sizes)


def _input_values(program: ExportedProgram) -> dict[str, Tensor]:
    names = set(program.graph_signature.user_inputs)
    return {node.name: node.meta["val"] for node in program.graph.nodes if node.name in names}
