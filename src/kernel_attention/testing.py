"""The contract of every attention mechanism, as checks to run on ours or on yours.

    import kernel_attention as ka

    ka.testing.check_attention("mine")                            # a registered mechanism
    ka.testing.check_attention(lambda d, h: MyAttention(d, h))    # or any function that makes a layer

In a test suite each check is a test of its own:

    @pytest.mark.parametrize("check", ka.testing.CHECKS)
    def test_mine(check):
        ka.testing.check_attention("mine", only=[check])

The sizes are different primes, so that a swapped axis cannot pass. Padding has no influence whatever its
finite content; the caller must keep NaN and infinity out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernel_attention.core.decoding import reorder
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.objective import PenalizedAttention, auxiliary_loss
from kernel_attention.errors import InputError, unknown
from kernel_attention.mechanisms import get_mechanism

BATCH, HEADS, LENGTH, HEAD_DIM, CONTEXT = 7, 3, 11, 5, 13
EMBED_DIM = HEADS * HEAD_DIM
MAX_LEN = 17
LENGTHS = (11, 7, 2, 5, 1, 10, 3)  # real tokens of each sequence in a padded batch
PROMPTS = (6, 1, 4, 3, 2, 0, 5)  # real tokens of each sequence's prompt

_BFLOAT16_ERROR = 8 * 2.0**-9  # a few products, each rounded to 2^-9


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
        """Whether ``make`` accepts ``device`` and ``dtype``."""
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
    set where the mechanism has it and the options do not.
    """
    if not isinstance(mechanism, str):
        return Subject(getattr(mechanism, "__name__", repr(mechanism)), mechanism)
    row = get_mechanism(mechanism)
    options = {**row.example, **options}
    if "max_len" in row.options:
        options.setdefault("max_len", MAX_LEN)
    make = functools.partial(row.build, **options)
    is_fixed = _is_fixed(row.build(EMBED_DIM, HEADS, **options))
    return Subject(mechanism, make, mixes_tokens=row.mixes_tokens, fixed_length=is_fixed)


def _is_fixed(layer: AttentionLayer) -> bool:
    """Whether the layer takes ``LENGTH`` tokens and refuses fewer."""
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


Check = Callable[[Subject], None]

CHECKS: dict[str, Check] = {}
"""Every check by name."""

_NEEDS: dict[
    str, str
] = {}  # "causal", "context" or "decoding", which the layer must support; "any length"; or "placement"


def _check(needs: str = "") -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[function.__name__] = function
        _NEEDS[function.__name__] = needs
        return function

    return register


def checks_of(case: Subject) -> list[str]:
    """The names of the checks that apply to a subject."""
    layer = case.build()
    able = {name for name in ("causal", "context", "decoding") if layer.supports(**{name: True})}
    able |= {""} if case.fixed_length else {"", "any length"}
    able |= {"placement"} if case.places_parameters() else set()
    return [name for name, needs in _NEEDS.items() if needs in able and name not in case.exempt]


def check_attention(
    mechanism: str | Callable[..., AttentionLayer] | Subject,
    *,
    only: Iterable[str] | None = None,
    exempt: Mapping[str, str] | None = None,
    **options: Any,
) -> list[str]:
    """Check the contract of every attention mechanism. Return the names of the checks that ran.

    Args:
        mechanism: a registered name, ``make(embed_dim, num_heads)``, or a ``Subject``.
        only: names of ``CHECKS``; None: all.
        exempt: {name of a check: why it does not apply}.
        options: of a registered mechanism.

    Raises:
        AssertionError: for the first check that fails, with its name.
        InputError: for an unknown mechanism, option or check.
    """
    case = mechanism if isinstance(mechanism, Subject) else subject(mechanism, **options)
    case = dataclasses.replace(case, exempt={**case.exempt, **(exempt or {})})
    wanted = set(CHECKS) if only is None else set(only)
    for name in (*wanted, *case.exempt):
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    run = [name for name in checks_of(case) if name in wanted]
    for name in run:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                CHECKS[name](case)
            except AssertionError as error:
                raise AssertionError(f"{case.name}: {name}: {error}") from error
    return run


# --- shapes and refusals ------------------------------------------------------------------------------------


def _close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected)


def _refused(call: Callable[[], Any], *words: str) -> None:
    """Check that the call raises InputError with one of the words, in one line."""
    try:
        call()
    except InputError as error:
        message = str(error)
    else:
        raise AssertionError(f"a call was not refused; expected an error that names one of {words}")
    assert any(word in message for word in words), f"refused without one of {words}: {message}"
    assert "\n" not in message, f"more than one line: {message}"


@_check()
def output_has_the_shape_and_dtype_of_the_input(case: Subject) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layer, x = case.build(dtype), inputs(dtype)
        for form in case.call_forms():
            for mask in (None, right_padding()):
                y = layer(x, attention_mask=mask, **form)
                assert y.shape == (BATCH, LENGTH, EMBED_DIM), f"shape {tuple(y.shape)}"
                assert y.dtype == dtype, f"{dtype} became {y.dtype}"


@_check()
def what_a_layer_does_not_support_it_refuses(case: Subject) -> None:
    layer, x = case.build(), inputs()
    if not layer.supports(causal=True):
        _refused(lambda: layer(x, is_causal=True), "is_causal")
    if not layer.supports(context=True):
        _refused(lambda: layer(x, context=x), "context")
    _refused(lambda: layer(x, context=x, is_causal=True), "context", "is_causal")
    if not layer.supports(decoding=True):
        _refused(lambda: layer.initial_state(BATCH), "does not decode")
        _refused(lambda: layer.step(x[:, 0], None), "does not decode")
        _refused(lambda: layer.prefill(x), "does not decode")


@_check("context")
def cross_attention_reads_another_sequence_of_its_own_length(case: Subject) -> None:
    layer = case.build()
    x, context = inputs(), inputs(length=CONTEXT)
    y = layer(x, context=context)
    assert y.shape == (BATCH, LENGTH, EMBED_DIM)
    _close(layer(x, context=x), layer(x))
    assert not torch.allclose(layer(x, context=2 * context), y), "the context is not read"
    mask = torch.arange(CONTEXT)[None] < torch.arange(1, BATCH + 1)[:, None]
    y = layer(x, context=context, attention_mask=mask)
    for b in range(BATCH):
        _close(y[b : b + 1], layer(x[b : b + 1], context=context[b : b + 1, : b + 1]))


@_check()
def printing_a_layer_says_its_sizes(case: Subject) -> None:
    assert f"{EMBED_DIM}, {HEADS}" in repr(case.build())


# --- padding ------------------------------------------------------------------------------------------------


def _with_garbage(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[..., None], x, 1e4 * torch.randn_like(x))


@_check("any length")
def a_padded_batch_gives_each_sequence_its_own_output(case: Subject) -> None:
    layer, x = case.build(), inputs()
    for mask in masks():
        for form in case.call_forms():
            y = layer(_with_garbage(x, mask), attention_mask=mask, **form)
            for b in range(BATCH):
                _close(y[b, mask[b]], layer(x[b, mask[b]][None], **form)[0])


@_check("any length")
def a_padded_batch_has_the_mean_objective_of_its_sequences(case: Subject) -> None:
    layer, x = case.build(), inputs()
    layer(x)
    if objective(layer) is None:
        return
    for mask in masks():
        for form in case.call_forms():
            layer(_with_garbage(x, mask), attention_mask=mask, **form)
            together, alone = _required(objective(layer)), []
            for b in range(BATCH):
                layer(x[b, mask[b]][None], **form)
                alone.append(_required(objective(layer)))
            if together.dim() == 1:  # every sequence has its own
                _close(together, torch.cat(alone))
                continue
            weight = mask.sum(1) if case.objective_over == "tokens" else torch.ones(BATCH)
            _close(together, (torch.stack(alone) * weight).sum() / weight.sum())


def _required(value: Tensor | None) -> Tensor:
    assert value is not None, "the objective is gone"
    return value


@_check()
def the_content_of_the_padding_changes_neither_outputs_nor_gradients(case: Subject) -> None:
    x = inputs()
    for mask in masks():
        for form in case.call_forms():
            results = []
            for content in (x, _with_garbage(x, mask), x.masked_fill(~mask[..., None], 0.0)):
                layer, leaf = case.build(), content.clone().requires_grad_()
                y = layer(leaf, attention_mask=mask, **form)
                (y[mask].square().sum() + auxiliary_loss(layer)).backward()
                grad = _required(leaf.grad)
                assert not grad[~mask].any(), "gradients flow into the padding"
                results.append([y[mask], grad[mask], *(p.grad for p in layer.parameters())])
            for other in results[1:]:
                _close(other, results[0])


@_check()
def a_full_mask_is_no_mask(case: Subject) -> None:
    layer, x = case.build(), inputs()
    full = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    for form in case.call_forms():
        _close(layer(x, attention_mask=full, **form), layer(x, **form))


@_check()
def an_empty_sequence_disturbs_nobody(case: Subject) -> None:
    x, mask = inputs().requires_grad_(), right_padding().clone()
    mask[2] = False
    rest = torch.arange(BATCH) != 2
    for form in case.call_forms():
        layer = case.build()
        y = layer(x, attention_mask=mask, **form)
        _close(y[rest], layer(x[rest], attention_mask=mask[rest], **form))
        (y[mask].sum() + auxiliary_loss(layer)).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in (x, *layer.parameters()))


@_check()
def a_sequence_does_not_depend_on_its_batch(case: Subject) -> None:
    layer, x, mask = case.build(), inputs(), right_padding()
    order = torch.randperm(BATCH)
    for form in case.call_forms():
        y = layer(x, attention_mask=mask, **form)
        before = auxiliary_loss(layer)
        _close(layer(x[order], attention_mask=mask[order], **form), y[order])
        _close(auxiliary_loss(layer), before)
        for b in range(BATCH):
            alone = layer(x[b : b + 1], attention_mask=mask[b : b + 1], **form)
            _close(alone[:, : LENGTHS[b]], y[b : b + 1, : LENGTHS[b]])


@_check()
def tokens_mix_as_the_table_says(case: Subject) -> None:
    if case.mixes_tokens not in ("yes", "no"):
        return
    layer, x = case.build(), inputs()
    y = layer(x)
    x[:, 3] = torch.randn(BATCH, EMBED_DIM)
    changed = (layer(x) - y).abs().amax(dim=(0, 2)) > 1e-9
    assert changed[3], "a token does not change its own output"
    mixes = bool(changed[torch.arange(LENGTH) != 3].any())
    assert mixes == (case.mixes_tokens == "yes"), f"mixes_tokens={case.mixes_tokens!r}, tokens mix: {mixes}"


# --- causality ----------------------------------------------------------------------------------------------


@_check("causal")
def the_future_changes_no_bit_of_the_past(case: Subject) -> None:
    for dtype in (torch.float64, torch.float32):
        layer, x = case.build(dtype), inputs(dtype)
        for mask in (None, right_padding(), right_padding().flip(1)):
            y = layer(x, attention_mask=mask, is_causal=True)
            for now in range(1, LENGTH):
                for size in (1.0, 1e4):
                    future = x.clone()
                    future[:, now:] = size * torch.randn(BATCH, LENGTH - now, EMBED_DIM, dtype=dtype)
                    seen = layer(future, attention_mask=mask, is_causal=True)
                    real = slice(None) if mask is None else mask[:, :now]
                    assert torch.equal(seen[:, :now][real], y[:, :now][real]), f"token {now} changes its past"


@_check("causal")
def the_future_of_the_mask_changes_no_bit_of_the_past(case: Subject) -> None:
    layer, x = case.build(), inputs()
    mask = torch.rand(BATCH, LENGTH) < 0.7
    y = layer(x, attention_mask=mask, is_causal=True)
    for now in range(1, LENGTH):
        other = torch.cat([mask[:, :now], ~mask[:, now:]], dim=1)
        seen = layer(x, attention_mask=other, is_causal=True)
        assert torch.equal(seen[:, :now][mask[:, :now]], y[:, :now][mask[:, :now]]), f"mask of token {now}"


@_check("causal")
def a_prefix_alone_gives_the_same_outputs(case: Subject) -> None:
    layer, x = case.build(), inputs()
    y = layer(x, is_causal=True)
    for now in range(1, LENGTH):
        _close(layer(x[:, :now], is_causal=True), y[:, :now])


@_check("causal")
def gradients_flow_from_no_output_to_its_future(case: Subject) -> None:
    x, layer = inputs().requires_grad_(), case.build()
    y = layer(x, is_causal=True)
    for now in range(LENGTH):
        (gradient,) = torch.autograd.grad(y[:, now].sum(), x, retain_graph=True)
        assert not gradient[:, now + 1 :].any(), f"token {now} has a gradient in its future"
        assert gradient[:, now].any(), f"token {now} has no gradient in itself"


# --- numbers ------------------------------------------------------------------------------------------------


@_check("any length")
def gradients_equal_finite_differences(case: Subject) -> None:
    layer = case.build()
    names = [name for name, _ in layer.named_parameters()]
    mask = right_padding((5, 3))
    leaves = [inputs(batch=2, length=5), *layer.parameters()]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for form in case.call_forms():
        layer(inputs(batch=2, length=5), **form)
        has_objective = objective(layer) is not None

        def call(
            x: Tensor, *parameters: Tensor, form: dict[str, bool] = form, both: bool = has_objective
        ) -> Any:
            y = torch.func.functional_call(
                layer, dict(zip(names, parameters, strict=True)), x, {"attention_mask": mask, **form}
            )
            return (y[mask], auxiliary_loss(layer)) if both else y[mask]

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def extreme_inputs() -> dict[str, Tensor]:
    """Sequences whose norm, mean or variance vanishes or overflows; (B, N, d) float32."""
    x = inputs(torch.float32)
    half_zero = x.clone()
    half_zero[:, ::2] = 0.0
    one_token = inputs(torch.float32, length=1)
    return {
        "zeros": torch.zeros_like(x),
        "zero_rows": half_zero,
        "constant": torch.full_like(x, 3.0),
        "repeated_token": x[:, :1].expand(-1, LENGTH, -1).clone(),
        "large": 1e4 * x,
        "large_constant": torch.full_like(x, -1e4),
        "alternating": 1e4 * (1 - 2 * (torch.arange(LENGTH) % 2))[None, :, None].expand_as(x).float(),
        "one_token": one_token,
        "one_large_token": 1e4 * one_token,
        "one_zero_token": torch.zeros_like(one_token),
    }


@_check()
def extreme_inputs_give_finite_outputs_and_gradients(case: Subject) -> None:
    for kind, x in extreme_inputs().items():
        if case.fixed_length and x.size(1) != LENGTH:
            continue
        first = torch.zeros(x.shape[:2], dtype=torch.bool)
        first[:, 0] = True
        for form in case.call_forms():
            for mask in (None, first):
                layer, leaf = case.build(torch.float32), x.clone().requires_grad_()
                y = layer(leaf, attention_mask=mask, **form)
                (y.sum() + auxiliary_loss(layer)).backward()
                found = {"y": y, "x": leaf.grad, **{n: p.grad for n, p in layer.named_parameters()}}
                for name, value in found.items():
                    assert _required(value).isfinite().all(), f"{kind}: {name} is not finite ({form})"


@_check()
def zero_tokens_pass_no_exploding_gradient(case: Subject) -> None:
    # A token of zeros (an embedding's padding row, a dead ReLU) sits where x / ||x|| has no slope.
    x = extreme_inputs()["zero_rows"]
    for form in case.call_forms():
        layer, leaf = case.build(torch.float32), x.clone().requires_grad_()
        layer(leaf, **form).sum().backward()
        largest = _required(leaf.grad).abs().max()
        assert largest < 1e3, f"a gradient of {largest:.1e}"


@_check()
def float32_is_close_to_float64(case: Subject) -> None:
    x, mask = inputs(), right_padding()
    for form in case.call_forms():
        exact = case.build()(x, attention_mask=mask, **form)[mask]
        single = case.build(torch.float32)(x.float(), attention_mask=mask, **form)[mask]
        error = (single.double() - exact).norm() / exact.norm()
        assert error < 2e-6, f"relative error {error:.1e} ({form})"


@_check()
def autocast_stays_close_and_keeps_the_objective_in_float32(case: Subject) -> None:
    x, mask = inputs(torch.float32), right_padding()
    for form in case.call_forms():
        layer = case.build(torch.float32)
        exact = layer(x, attention_mask=mask, **form)[mask]
        before = objective(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x, attention_mask=mask, **form)
        assert (y[mask].float() - exact).norm() < _BFLOAT16_ERROR * exact.norm(), "far from float32"
        if before is not None:
            after = _required(objective(layer))
            assert after.dtype == torch.float32, f"the objective is {after.dtype}"
            assert ((after - before).abs() < _BFLOAT16_ERROR * (1 + before.abs())).all()
        (y[mask].float().sum() + auxiliary_loss(layer)).backward()
        assert all(_required(p.grad).isfinite().all() for p in layer.parameters())
        assert all(_required(p.grad).dtype == torch.float32 for p in layer.parameters())


@_check()
def a_bfloat16_layer_keeps_its_objective_in_float32(case: Subject) -> None:
    layer = case.build(torch.bfloat16)
    layer(inputs(torch.bfloat16))
    found = objective(layer)
    assert found is None or found.dtype == torch.float32


@_check()
def training_forwards_are_deterministic(case: Subject) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        layer = case.build(torch.float32)
        y = layer(inputs(torch.float32), attention_mask=right_padding())
        (y.square().sum() + auxiliary_loss(layer)).backward()
        runs.append([y, *(_required(p.grad) for p in layer.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@_check()
def non_contiguous_inputs_are_inputs(case: Subject) -> None:
    layer = case.build()
    x = torch.randn(EMBED_DIM, BATCH, LENGTH, dtype=torch.float64).permute(1, 2, 0)
    _close(layer(x), layer(x.contiguous()))


# --- training -----------------------------------------------------------------------------------------------


def _step(layer: AttentionLayer, x: Tensor, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs and gradients of one training step."""
    layer.zero_grad()
    y = layer(x, **arguments)
    (y.square().sum() + auxiliary_loss(layer)).backward()
    return y, {name: _required(p.grad).clone() for name, p in layer.named_parameters()}


@_check()
def every_parameter_is_trained(case: Subject) -> None:
    # DistributedDataParallel refuses a parameter that the loss does not reach.
    for form in case.call_forms():
        layer = case.build()
        y = layer(inputs(), attention_mask=right_padding(), **form)
        (y.square().sum() + auxiliary_loss(layer)).backward()
        assert [name for name, p in layer.named_parameters() if p.grad is None] == []


@_check()
def the_objective_belongs_to_training(case: Subject) -> None:
    layer = case.build()
    assert auxiliary_loss(layer).item() == 0.0, "a fresh layer adds to the loss"
    names = set(layer.state_dict())
    layer(inputs())
    assert set(layer.state_dict()) == names, "the objective is in the state dict"
    before = objective(layer)
    layer.eval()
    with torch.no_grad():
        layer(inputs())
    layer(inputs())
    assert objective(layer) is before, "an evaluation changes the objective of training"
    fresh = case.build().eval()
    fresh(inputs())
    assert auxiliary_loss(fresh).item() == 0.0, "an evaluated layer adds to the loss"


@_check()
def the_auxiliary_loss_of_a_model_is_the_sum_over_its_layers(case: Subject) -> None:
    layers = [case.build(), case.build(), case.build()]
    nn.Sequential(nn.Linear(EMBED_DIM, EMBED_DIM).double(), *layers)(inputs())
    losses = torch.stack([auxiliary_loss(layer) for layer in layers])
    model = nn.ModuleList(layers)
    _close(auxiliary_loss(model), losses.sum())
    _close(auxiliary_loss(model, reduction="mean"), losses.mean())


@_check()
def weights_return_from_a_state_dict_to_the_same_outputs(case: Subject) -> None:
    layer, x = case.build(), inputs()
    y, _ = _step(layer, x)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = case.build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other(x), y)
    assert set(layer.state_dict()) >= {name for name, _ in layer.named_parameters()}


@_check()
def a_layer_can_be_copied_after_a_training_forward(case: Subject) -> None:
    for copied in (copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))):
        layer, x = case.build(), inputs()
        y = layer(x)
        before = objective(layer)
        twin = copied(layer)
        assert objective(layer) is before
        assert objective(twin) is None
        assert torch.equal(twin(x), y)
        assert all(a is not b for a, b in zip(twin.parameters(), layer.parameters(), strict=True))


@_check()
def activation_checkpointing_gives_the_same_gradients(case: Subject) -> None:
    layer, x = case.build(), inputs()
    for form in case.call_forms():
        y, gradients = _step(layer, x, **form)
        layer.zero_grad()
        again = checkpoint(functools.partial(layer, **form), x, use_reentrant=False)
        (again.square().sum() + auxiliary_loss(layer)).backward()
        _close(again, y)
        _close({name: p.grad for name, p in layer.named_parameters()}, gradients)


@_check()
def reentrant_checkpointing_is_found_out_by_the_auxiliary_loss(case: Subject) -> None:
    layer, x = case.build(), inputs().requires_grad_()
    checkpoint(layer, x, use_reentrant=True)
    if objective(layer) is None:
        assert auxiliary_loss(layer).item() == 0.0
        return
    try:
        auxiliary_loss(layer)
    except RuntimeError as error:
        message = str(error)
    else:
        raise AssertionError("an objective without gradients passed unnoticed")
    assert "use_reentrant=False" in message
    with torch.no_grad():  # for a log, which needs no gradients
        assert auxiliary_loss(layer).isfinite()


# --- making -------------------------------------------------------------------------------------------------


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _same_numbers(layer: nn.Module, other: nn.Module, what: str) -> None:
    for (name, value), expected in zip(_tensors(layer).items(), _tensors(other).values(), strict=True):
        assert value.dtype == expected.dtype, f"{what}: {name} is {value.dtype}, not {expected.dtype}"
        assert torch.equal(value, expected), f"{what}: {name} has other numbers than in a new layer"


def _new(case: Subject, **where: Any) -> AttentionLayer:
    torch.manual_seed(1)
    return case.make(EMBED_DIM, HEADS, **where)


@_check()
def a_layer_made_on_meta_becomes_a_new_layer(case: Subject) -> None:
    with torch.device("meta"):
        layer = _new(case)
    for name, value in _tensors(layer).items():
        assert value.is_meta, f"{name} was made on {value.device}"
    layer.to_empty(device="cpu")
    for value in _tensors(layer).values():
        value.detach().fill_(float("nan") if value.is_floating_point() else -1)
    torch.manual_seed(1)
    layer.reset_parameters()
    new = _new(case)
    _same_numbers(layer, new, "reset_parameters")
    x = inputs(torch.float32)
    assert torch.equal(layer.eval()(x), new.eval()(x)), "a materialised layer has other outputs"


@_check("placement")
def device_and_dtype_say_where_and_in_which_precision_a_layer_is_made(case: Subject) -> None:
    for name, value in _tensors(_new(case, device="meta")).items():
        assert value.is_meta, f"device='meta': {name} was made on {value.device}"
    _same_numbers(
        _new(case, device="cpu", dtype=torch.float32), _new(case, dtype=torch.float32), "device='cpu'"
    )
    for dtype in (torch.float64, torch.bfloat16):
        layer = _new(case, dtype=dtype)
        for name, value in _tensors(layer).items():
            assert value.dtype == dtype or not value.is_floating_point(), f"{dtype}: {name} is {value.dtype}"
        assert layer(inputs(dtype)).isfinite().all(), f"{dtype}: outputs are not finite"


# --- compilers ----------------------------------------------------------------------------------------------


@_check()
def one_graph_serves_forward_and_backward(case: Subject) -> None:
    _compiled_equals_eager(case, lengths=(LENGTH,))


@_check()
def graphs_of_dynamic_length_equal_eager(case: Subject) -> None:
    _compiled_equals_eager(case, lengths=(11,) if case.fixed_length else (11, 7, 2), dynamic=True)


def _compiled_equals_eager(case: Subject, lengths: tuple[int, ...], dynamic: bool | None = None) -> None:
    torch.compiler.reset()
    for form in case.call_forms():
        eager, compiled = case.build(), case.build()
        call = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for length in lengths:
            x, mask = inputs(length=length), right_padding()[:, :length]
            found = []
            for run, layer in ((call, compiled), (eager, eager)):
                leaf = x.clone().requires_grad_()
                layer.zero_grad()
                y = run(leaf, attention_mask=mask, **form)
                (y.square().sum() + auxiliary_loss(layer)).backward()
                found.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
            _close(found[0], found[1])
            if objective(eager) is not None:
                _close(objective(compiled), objective(eager))
    torch.compiler.reset()


@_check("any length")
def new_lengths_do_not_compile_anew(case: Subject) -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    layer = case.build()
    call = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for length in (11, 7, 13, 17, 9, 2, 3):
        x = inputs(length=length)
        _close(call(x), layer(x))
    torch.compiler.reset()
    # Two graphs: one for sampled sequences, one for sequences so short that all tokens are sampled.
    assert len(graphs) <= 2, f"{len(graphs)} graphs"


@_check("any length")
def an_evaluated_layer_can_be_exported_with_any_length(case: Subject) -> None:
    layer = case.build().eval()
    x, mask = inputs(), right_padding()
    tokens = torch.export.Dim("tokens", min=5, max=13)  # shorter sequences need another graph
    program = torch.export.export(
        layer,
        (x,),
        {"attention_mask": mask},
        dynamic_shapes={"x": {1: tokens}, "attention_mask": {1: tokens}},
    )
    for length in (11, 7):
        arguments = {"attention_mask": mask[:, :length]}
        _close(program.module()(x[:, :length], **arguments), layer(x[:, :length], **arguments))


# --- decoding -----------------------------------------------------------------------------------------------


def decoded(layer: AttentionLayer, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """The outputs for x (B, N, d), decoded token by token, and the last state."""
    y = []
    for token in x.unbind(dim=1):
        out, state = layer.step(token, state)
        y.append(out)
    return torch.stack(y, dim=1), state


def _nearly(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-10, atol=1e-10)


@_check("decoding")
def steps_equal_the_parallel_causal_form(case: Subject) -> None:
    layer, x = case.build(), inputs()
    expected = layer(x, is_causal=True)
    y, _ = decoded(layer, x, layer.initial_state(BATCH))
    _nearly(y, expected)
    for now in (1, 4, 6, LENGTH - 1):
        y, state = layer.prefill(x[:, :now])
        _nearly(y, expected[:, :now])
        _nearly(decoded(layer, x[:, now:], state)[0], expected[:, now:])


@_check("decoding")
def prompts_of_different_lengths_go_on_as_if_each_were_alone(case: Subject) -> None:
    layer, new = case.build(), inputs(length=6)
    right = right_padding((*PROMPTS, LENGTH))[:BATCH]
    for mask in (right, right.flip(1), right[:, torch.randperm(LENGTH)]):
        x = inputs().masked_fill(~mask[..., None], torch.nan)
        _, state = layer.prefill(x, mask)
        y, _ = decoded(layer, new, state)
        for b in range(BATCH):
            alone = torch.cat([x[b, mask[b]], new[b]])[None]
            _nearly(y[b], layer(alone, is_causal=True)[0, -6:])


@_check("decoding")
def a_reordered_state_goes_on_from_the_sequences_asked_for(case: Subject) -> None:
    layer, x = case.build(), inputs()
    expected = layer(x, is_causal=True)
    kept = torch.tensor([2, 2, 0, 5])
    _, state = layer.prefill(x[:, :5])
    beams = reorder(state, kept)
    assert type(beams) is type(state)
    new = torch.randn(4, 3, EMBED_DIM, dtype=x.dtype)
    y, _ = decoded(layer, new, beams)
    _nearly(y, layer(torch.cat([x[kept, :5], new], dim=1), is_causal=True)[:, 5:])
    # Decoding wrote into the copy, not into the state it was made from.
    _nearly(decoded(layer, x[:, 5:], state)[0], expected[:, 5:])


@_check("decoding")
def an_older_state_can_be_gone_back_to(case: Subject) -> None:
    layer, x = case.build(), inputs()
    _, state = layer.prefill(x[:, :5])
    decoded(layer, inputs(length=4), state)
    _nearly(decoded(layer, x[:, 5:], state)[0], layer(x, is_causal=True)[:, 5:])
