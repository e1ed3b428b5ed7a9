"""Compilers, transforms of torch.func, forward mode, hooks of all modules, modes and defaults of torch."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.objective import auxiliary_loss
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.errors import InputError
from kernel_attention.testing.battery import (
    EMBED_DIM,
    HEADS,
    LENGTH,
    Subject,
    check,
    close,
    inputs,
    objective,
    required,
    right_padding,
)


@check()
def one_graph_serves_forward_and_backward(case: Subject) -> None:
    _compiled_equals_eager(case, lengths=(LENGTH,))


@check()
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
            close(found[0], found[1])
            if objective(eager) is not None:
                close(objective(compiled), objective(eager))
    torch.compiler.reset()


@check("any length")
def new_lengths_do_not_compile_anew(case: Subject) -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    layer = case.build()
    call = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    # Two graphs: one for sampled sequences, one for sequences so short that all tokens are sampled. A length
    # of a single block of pooled tokens has one of its own, because PyTorch keeps a size of 1 apart.
    for lengths, most in (((11, 7, 13, 17, 9), 2), ((2, 3), 3)):
        for length in lengths:
            x = inputs(length=length)
            close(call(x), layer(x))
        assert len(graphs) <= most, f"{len(graphs)} graphs"
    torch.compiler.reset()


@check("any length")
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
        close(program.module()(x[:, :length], **arguments), layer(x[:, :length], **arguments))


_FEW = (5, 3)  # real tokens of each sequence, where two sequences are enough


def _calls(case: Subject, *, each: bool = True) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The ways to call a layer on two sequences, and which outputs are those of real tokens.

    Without ``each`` only the causal call has padding.
    """
    full = inputs(batch=len(_FEW)).shape[:2]
    for form in case.call_forms():
        if each or not form["is_causal"]:
            yield {"attention_mask": None, **form}, torch.ones(full, dtype=torch.bool)
        if each or form["is_causal"]:
            mask = torch.arange(full[1])[None] < torch.tensor(_FEW)[:, None]
            yield {"attention_mask": mask, **form}, mask


def _unless_refused(call: Callable[[], None]) -> None:
    """Make the call; a form that was asked for by ``impl`` may be refused with that name instead."""
    try:
        with warnings.catch_warnings():  # forward mode imports torch's own scripted derivatives
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            warnings.filterwarnings(
                "ignore", "There is a performance drop", UserWarning
            )  # vmap over torch's own
            call()
    except InputError as error:
        if "impl=" not in str(error):
            raise


@check()
def forward_mode_is_the_transpose_of_the_backward_pass(case: Subject) -> None:
    # <u, J t> = <J^T u, t>, in the input and the parameters.
    layer = case.build().eval()
    names = [name for name, _ in layer.named_parameters()]
    for arguments, real in _calls(case):

        def call(x: Tensor, *parameters: Tensor, given: Any = arguments, kept: Tensor = real) -> Tensor:
            found = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x, given)
            return found[kept]

        leaves = [inputs(batch=len(_FEW)), *layer.parameters()]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        tangents = [torch.randn_like(leaf) for leaf in leaves]
        y = call(*leaves)
        probe = torch.randn_like(y)
        pulled = torch.autograd.grad(y, leaves, probe, materialize_grads=True)
        expected = torch.stack([(a * b).sum() for a, b in zip(pulled, tangents, strict=True)]).sum()
        values = tuple(leaf.detach() for leaf in leaves)

        def compare(
            values: tuple[Tensor, ...] = values, tangents: Any = tangents, call: Any = call, y: Tensor = y,
            probe: Tensor = probe, expected: Tensor = expected,
        ) -> None:  # fmt: skip
            found, pushed = torch.func.jvp(call, values, tuple(tangents))[:2]
            close(found, y)
            torch.testing.assert_close((probe * pushed).sum(), expected, rtol=1e-7, atol=1e-8)
            with forward_ad.dual_level():
                dual = [forward_ad.make_dual(*pair) for pair in zip(values, tangents, strict=True)]
                close(required(forward_ad.unpack_dual(call(*dual)).tangent), pushed)

        _unless_refused(compare)


@check()
def vmap_over_sequences_equals_a_loop(case: Subject) -> None:
    layer = case.build().eval()
    for arguments, real in _calls(case):
        form = {"is_causal": arguments["is_causal"]}
        x = torch.stack([inputs(batch=len(_FEW)) for _ in range(2)])
        mask, real = (each.expand(2, *real.shape) for each in (real, real))

        def compare(x: Tensor = x, mask: Tensor = mask, form: Any = form, real: Tensor = real) -> None:
            y = torch.vmap(lambda x, mask: layer(x, attention_mask=mask, **form))(x, mask)
            loop = [layer(each, attention_mask=own, **form) for each, own in zip(x, mask, strict=True)]
            close(y[real], torch.stack(loop)[real])

        _unless_refused(compare)


@check()
def vmap_over_the_weights_of_an_ensemble_equals_a_loop(case: Subject) -> None:
    layers = [case.make(EMBED_DIM, HEADS).double().eval() for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = inputs(batch=len(_FEW))
    for arguments, real in _calls(case, each=False):

        def loss(parameters: Any, buffers: Any, given: Any = arguments, kept: Tensor = real) -> Any:
            y = torch.func.functional_call(layers[0], (parameters, buffers), (x,), given)
            y = y.masked_fill(~kept[..., None], 0.0)
            return y.square().sum(), y

        def compare(loss: Any = loss, given: Any = arguments, kept: Tensor = real) -> None:
            found, y = torch.vmap(torch.func.grad(loss, has_aux=True))(parameters, buffers)
            for i, layer in enumerate(layers):
                layer.zero_grad()
                own = layer(x, **given).masked_fill(~kept[..., None], 0.0)
                own.square().sum().backward()
                close(y[i], own)
                for name, parameter in layer.named_parameters():
                    grad = parameter.grad
                    close(found[name][i], torch.zeros_like(parameter) if grad is None else grad)

        _unless_refused(compare)


@check()
def both_kinds_of_checkpointing_give_the_same_outputs_and_gradients(case: Subject) -> None:
    layer = case.build()
    for arguments, real in _calls(case, each=False):
        leaf = inputs(batch=len(_FEW)).requires_grad_()
        leaves = [leaf, *layer.parameters()]

        def call(x: Tensor, given: Any = arguments, kept: Tensor = real) -> Tensor:
            return layer(x, **given)[kept]

        y = call(leaf)
        expected = torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True)
        for use_reentrant in (False, True):
            for each in leaves:
                each.grad = None
            again = checkpoint(call, leaf, use_reentrant=use_reentrant)
            again.square().sum().backward()
            close(again, y)
            close([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves], list(expected))


@check()
def hooks_of_all_modules_see_every_projection(case: Subject) -> None:
    for arguments, _ in _calls(case, each=False):
        layer, x = case.build(), inputs(batch=len(_FEW)).requires_grad_()
        linear = {module for module in layer.modules() if isinstance(module, nn.Linear)}
        y = case.build()(x, **arguments)
        for register in (
            hooks.register_module_forward_pre_hook,
            hooks.register_module_forward_hook,
            hooks.register_module_full_backward_hook,
        ):
            seen: set[nn.Module] = set()
            handle = register(lambda module, *_, seen=seen: seen.add(module))
            try:

                def compare(layer: Any = layer, x: Tensor = x, y: Tensor = y, given: Any = arguments) -> None:
                    again = layer(x, **given)
                    close(again, y)
                    again.sum().backward()

                refused = True

                def called(compare: Any = compare) -> None:
                    nonlocal refused
                    compare()
                    refused = False

                _unless_refused(called)
            finally:
                handle.remove()
            assert refused or seen >= linear, f"{register.__name__}: {len(linear - seen)} passed by"


@contextlib.contextmanager
def _defaults(dtype: torch.dtype | None, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        with contextlib.nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _decoded(layer: AttentionLayer, x: Tensor, arguments: dict[str, Any]) -> list[Tensor]:
    """Outputs of decoding, from the start and after a prompt; none of a layer that does not decode."""
    if not (arguments["is_causal"] and layer.supports(decoding=True)):
        return []
    first, _ = layer.step(x[:, 0], layer.initial_state(x.size(0)))
    _, state = layer.prefill(x, arguments["attention_mask"])
    return [first, layer.step(x[:, 0], state)[0]]


@check()
def defaults_and_modes_of_torch_change_no_number(case: Subject) -> None:
    for arguments, _ in _calls(case, each=False):
        x = inputs(torch.float32, batch=len(_FEW))
        layer = case.build(torch.float32)
        with torch.no_grad():
            expected = [layer.eval()(x, **arguments), *_decoded(layer, x, arguments)]
        for mode in (
            _defaults(torch.float64, None), _defaults(None, "meta"), torch.inference_mode(), torch.no_grad(),
        ):  # fmt: skip
            layer = case.build(torch.float32)
            with mode:
                found = [layer.eval()(x, **arguments), *_decoded(layer, x, arguments)]
                close(found, expected)
                if torch.is_grad_enabled():
                    (layer.train()(x, **arguments).square().sum() + auxiliary_loss(layer)).backward()
            layer.zero_grad()
            layer.train()(x, **arguments).sum().backward()  # what a mode made is no inference tensor
    with torch.inference_mode():
        made = case.make(EMBED_DIM, HEADS)
        made(inputs(torch.float32))


@check()
def a_batch_of_no_sequences_has_no_outputs_and_no_objective(case: Subject) -> None:
    for arguments, _ in _calls(case):
        layer, x = case.build(), inputs(batch=0).requires_grad_()
        mask = None if arguments["attention_mask"] is None else right_padding()[:0]
        y = layer(x, attention_mask=mask, is_causal=arguments["is_causal"])
        assert y.shape == x.shape, f"shape {tuple(y.shape)}"
        found = layer.measure_objective(x) if isinstance(layer, PenalizedAttention) else None
        assert found is None or found == 0, f"an objective of {found}"
        (y.sum() + auxiliary_loss(layer)).backward()
        for name, parameter in layer.named_parameters():
            assert required(parameter.grad).isfinite().all(), f"the gradient of {name} is not finite"
        with torch.no_grad():
            layer.eval()(x, attention_mask=mask, is_causal=arguments["is_causal"])
        if arguments["is_causal"] and layer.supports(decoding=True):
            _, state = layer.prefill(x, mask)
            assert layer.step(x[:, 0], state)[0].shape == (0, EMBED_DIM)
