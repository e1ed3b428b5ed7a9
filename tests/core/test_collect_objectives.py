"""The objectives of a model, in every way it is called: value and gradient of the written-out sum."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import kernel_attention as ka
from kernel_attention.core import penalized
from kernel_attention.core.layer import AttentionLayer

ETA = 0.3


def layer(mechanism: str = "primal", **options) -> nn.Module:
    torch.manual_seed(0)
    made = ka.create_attention(mechanism, embed_dim=8, num_heads=2, rank=2, eta=ETA, **options)
    return made.double().train()


def data(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (3, 5, 8)), dtype=torch.float64)


Run = Callable[[nn.Module, Tensor], Tensor]


class Stack(nn.Module):
    """Two layers with a residual; ``called`` says which are called in a forward, and how often."""

    def __init__(self, mechanism: str = "primal", called: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(mechanism), layer(mechanism)])
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        for index in self.called:
            x = x + self.layers[index](x)
        return x


def written_out(model: Stack, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the sum of the penalties of every call, each read right after the call."""
    total = torch.zeros((), dtype=x.dtype)
    for index in model.called:
        attention = model.layers[index]
        y = attention(x)
        total, x = total + attention.penalty(), x + y
    return x, total


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def close(found: Tensor, wanted: Tensor, model: nn.Module, other: nn.Module | None = None) -> None:
    """Both have the same value and the same gradients."""
    torch.testing.assert_close(found.detach(), wanted.detach())
    assert abs(wanted.detach()) > 1e-6
    both = gradients(found, model), gradients(wanted, model if other is None else other)
    for a, b in zip(*both, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


MODELS = ["primal", "primal_values", "multilinear"]


@pytest.mark.parametrize("mechanism", MODELS)
@pytest.mark.parametrize(
    "called", [(0, 1), (0, 0), (1, 0, 1), (1,)], ids=["once", "twice", "thrice", "skipped"]
)
def test_every_call_counts_once_and_a_skipped_layer_adds_nothing(mechanism, called):
    model = Stack(mechanism)
    model(data())  # a call before the block
    model.called = called
    x = data()
    with ka.collect_objectives() as objectives:
        y = model(x)
    wanted = written_out(other := twin(model), x)
    torch.testing.assert_close(y, wanted[0])
    close(objectives.total(), wanted[1], model, other)
    torch.testing.assert_close(objectives.total("mean"), objectives.total() / len(called))
    assert [call.module for call in objectives.calls] == [model.layers[index] for index in called]
    assert [len(objectives.of(each)) for each in model.layers] == [called.count(0), called.count(1)]


def test_auxiliary_loss_leaves_out_a_layer_that_the_step_left_out():
    model = Stack()
    for called in ((0, 1), (0,), (1,), (0, 1)):
        model.called, x = called, data()
        model(x)
        wanted = written_out(other := twin(model), x)[1]
        found = ka.auxiliary_loss(model)
        assert torch.equal(ka.auxiliary_loss(model), found), "it may be asked for twice"
        close(found, wanted, model, other)


def test_auxiliary_loss_of_a_part_and_then_of_the_whole_leaves_out_the_same_layers():
    model = Stack()
    model(data())
    ka.auxiliary_loss(model)
    model.called = (0,)
    model(data())
    part = ka.auxiliary_loss(model.layers[0])
    assert torch.equal(ka.auxiliary_loss(model), part)


def test_auxiliary_loss_refuses_a_layer_called_twice():
    model = Stack(called=(0, 1, 0))
    model(data())
    with pytest.raises(
        RuntimeError, match=r"layers\.0 \(PrimalAttention\) was called more than once.*collect"
    ):
        ka.auxiliary_loss(model)


def test_auxiliary_loss_refuses_a_step_without_a_forward():
    model = Stack()
    with pytest.raises(RuntimeError, match="no forward in training mode has left an objective"):
        ka.auxiliary_loss(model)
    assert ka.auxiliary_loss(model.eval()) == 0
    model(data())
    model.train()
    with pytest.raises(RuntimeError, match="no forward in training mode has left an objective"):
        ka.auxiliary_loss(model)
    model(data())
    ka.auxiliary_loss(model).backward()
    with pytest.raises(RuntimeError, match="no forward in training mode since the last backward pass"):
        ka.auxiliary_loss(model)
    with torch.no_grad():
        assert ka.auxiliary_loss(model) > 0


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize("frozen", ["all", "first"])
def test_a_frozen_layer_is_a_constant(frozen, collected):
    model, x = Stack(), data()
    head = nn.Linear(8, 2).double()
    (model if frozen == "all" else model.layers[0]).requires_grad_(False)
    with ka.collect_objectives() if collected else nullcontext() as objectives:
        y = model(x)
    penalty = objectives.total() if collected else ka.auxiliary_loss(model)
    torch.testing.assert_close(penalty.detach(), written_out(twin(model), x)[1].detach())
    (head(y).square().mean() + penalty).backward()
    assert head.weight.grad is not None
    assert all((p.grad is not None) == p.requires_grad for p in model.layers[1].parameters())


@pytest.mark.parametrize("collected", [True, False])
def test_accumulated_parts_add_their_own_terms(collected):
    model, parts = Stack(), data(3, 2, 5, 8)
    other = twin(model)
    for x in parts:
        with ka.collect_objectives() if collected else nullcontext() as objectives:
            y = model(x)
        (y.square().mean() + (objectives.total() if collected else ka.auxiliary_loss(model))).backward()
    whole = 0.0
    for x in parts:
        y, penalty = written_out(other, x)
        whole = whole + y.square().mean() + penalty
    for p, wanted in zip(model.parameters(), gradients(whole, other), strict=True):
        torch.testing.assert_close(p.grad, wanted)


def checkpointed(model: Stack, x: Tensor, reentrant: bool = False) -> Tensor:
    for index in model.called:
        x = x + checkpoint(model.layers[index], x, use_reentrant=reentrant)
    return x


@pytest.mark.parametrize("mechanism", MODELS)
@pytest.mark.parametrize("collected", [True, False])
def test_checkpointed_layers_count_once_and_keep_no_graph(mechanism, collected):
    model, x = Stack(mechanism), data()
    with ka.collect_objectives() if collected else nullcontext() as objectives:
        y = checkpointed(model, x)
        found = objectives.total() if collected else ka.auxiliary_loss(model)
        (y.square().mean() + found).backward()  # computes the layers again
    assert not collected or len(objectives.calls) == 2
    wanted_y, wanted = written_out(other := twin(model), x)
    (wanted_y.square().mean() + wanted).backward()
    torch.testing.assert_close(found, wanted)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("mechanism", MODELS)
def test_the_recomputation_of_a_checkpoint_leaves_nothing_on_the_layer(mechanism):
    model, x = Stack(mechanism), data()
    y = checkpointed(model, x)
    before = [each.objective for each in model.layers]
    (y.sum() + ka.auxiliary_loss(model)).backward()
    for each, kept in zip(model.layers, before, strict=True):
        assert torch.equal(each.objective, kept)
        assert all(part.grad_fn is None for part in each.last_objective if isinstance(part, Tensor))


@pytest.mark.parametrize("collected", [True, False])
def test_reentrant_checkpointing_is_refused(collected):
    model, x = Stack(), data().requires_grad_()
    with ka.collect_objectives() as objectives:
        y = checkpointed(model, x, reentrant=True)
    ask = objectives.total if collected else lambda: ka.auxiliary_loss(model)
    with pytest.raises(RuntimeError, match=r"without gradients.*use_reentrant=False"):
        ask()
    with torch.no_grad():
        torch.testing.assert_close(ask(), written_out(twin(model), x)[1])
    y.sum().backward()


@pytest.mark.parametrize(
    ("called", "inside"), [((0, 0), True), ((0, 1), False)], ids=["block_inside_twice", "block_around_once"]
)
def test_compiled_models_hand_over_every_call(called, inside):
    torch.compiler.reset()
    model, graphs = Stack(called=called), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with ka.collect_objectives() as objectives:
            y = model(x)
        return y, objectives.total()

    call = torch.compile(step if inside else model, fullgraph=True, backend=count)
    for _ in range(3):
        x = data()
        if inside:
            y, found = call(x)
        else:
            with ka.collect_objectives() as objectives:
                y = call(x)
            found = objectives.total()
        wanted = written_out(other := twin(model), x)
        torch.testing.assert_close(y, wanted[0])
        close(found, wanted[1], model, other)
    assert len(graphs) == 1
    torch.compiler.reset()


def test_a_compiled_loop_with_auxiliary_loss_has_one_graph_and_the_sum():
    torch.compiler.reset()
    model, graphs = Stack(), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(model, fullgraph=True, backend=count)
    for _ in range(3):
        x = data()
        y, wanted = call(x), written_out(other := twin(model), x)
        close(ka.auxiliary_loss(model), wanted[1], model, other)
        torch.testing.assert_close(y, wanted[0])
    assert len(graphs) == 1
    model.called = (0, 0)
    torch.compile(model, backend="eager")(data())
    with pytest.raises(RuntimeError, match="was called more than once"):
        ka.auxiliary_loss(model)
    torch.compiler.reset()


@pytest.mark.parametrize("collected", [True, False])
def test_functional_calls_are_calls(collected):
    model, x = Stack(), data()
    weights = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    with ka.collect_objectives() if collected else nullcontext() as objectives:
        functional_call(model, weights, (x,))
    found = objectives.total() if collected else ka.auxiliary_loss(model)
    other = twin(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    wanted = written_out(other, x)[1]
    torch.testing.assert_close(found, wanted)
    slopes = torch.autograd.grad(found, list(weights.values()), allow_unused=True)
    for a, b in zip(slopes, gradients(wanted, other), strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def penalty_inside(model: nn.Module, collected: bool) -> Run:
    def run(weights, x: Tensor) -> Tensor:
        with ka.collect_objectives() if collected else nullcontext() as objectives:
            functional_call(model, weights, (x,))
        return objectives.total() if collected else ka.auxiliary_loss(model)

    return run


@pytest.mark.parametrize("mechanism", MODELS)
@pytest.mark.parametrize("collected", [True, False])
def test_an_ensemble_by_vmap_has_the_term_of_every_member(mechanism, collected):
    members, x = [Stack(mechanism) for _ in range(3)], data()
    for index, member in enumerate(members):
        with torch.no_grad():
            for p in member.parameters():
                p.mul_(1 + 0.2 * index)
    weights, buffers = stack_module_state(members)
    base = twin(members[0])
    run = penalty_inside(base, collected)
    found = vmap(lambda w, b: run((w, b), x))(weights, buffers)
    wanted = torch.stack([written_out(member, x)[1] for member in members])
    torch.testing.assert_close(found, wanted)
    slopes = torch.autograd.grad(found.sum(), list(weights.values()), allow_unused=True)
    by_member = [gradients(penalty, member) for penalty, member in zip(wanted, members, strict=True)]
    for slope, parts in zip(slopes, zip(*by_member, strict=True), strict=True):
        assert (slope is None) == (parts[0] is None)
        if slope is not None:
            torch.testing.assert_close(slope, torch.stack(parts))
    assert all(each.objective is None for each in base.layers), "a tensor of a transform that has ended"


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"objective_form": "sum"}, {"objective_form": "sum", "square_per": "sequence"}],
    ids=["mean", "sum", "per_sequence"],
)
def test_a_gradient_by_torch_func_leaves_nothing_dead_behind(collected, options):
    model, x = layer(**options), data()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    slopes, value = grad_and_value(penalty_inside(model, collected))(weights, x)
    model(x)
    wanted = ka.auxiliary_loss(model)
    torch.testing.assert_close(value, wanted.detach())
    for found, slope in zip(slopes.values(), gradients(wanted, model), strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if slope is None else slope)
    grad(penalty_inside(model, collected))(weights, x)
    for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert copied.objective is None
    torch.save(model, io.BytesIO())
    assert model.objective is None
    with pytest.raises(RuntimeError, match="no forward in training mode has left an objective"):
        ka.auxiliary_loss(model)


def test_a_block_around_a_transform_that_has_ended_is_refused():
    model, x = layer(), data()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with ka.collect_objectives() as objectives:
        grad(lambda w: functional_call(model, w, (x,)).sum())(weights)
    with pytest.raises(
        RuntimeError, match=r"transform of torch\.func that has ended: open collect_objectives"
    ):
        objectives.total()


@pytest.mark.parametrize("collected", [True, False])
def test_two_threads_have_their_own_calls(collected):
    model = layer()
    begun, wrong = threading.Barrier(2), []

    def train(number: int) -> None:
        own, generator = twin(model), torch.Generator().manual_seed(number)
        begun.wait()
        for _ in range(50):
            x = torch.randn(2, 9, 8, generator=generator, dtype=torch.float64)
            with ka.collect_objectives() if collected else nullcontext() as objectives:
                model(x)
            found = objectives.total() if collected else ka.auxiliary_loss(model)
            own(x)
            try:
                close(found, own.penalty(), model, own)
            except (AssertionError, RuntimeError) as error:
                wrong.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_a_copy_of_a_trained_model_has_calls_of_its_own():
    model, x = Stack(), data()
    with ka.collect_objectives() as objectives:
        model(x)
        copied = twin(model)
        assert all(each.objective is None for each in copied.layers)
        copied(2 * x)
    close(ka.auxiliary_loss(copied), written_out(other := twin(model), 2 * x)[1], copied, other)
    assert len(objectives.calls) == 4
    close(ka.auxiliary_loss(model), written_out(other, x)[1], model, other)


@pytest.mark.parametrize("collected", [True, False])
def test_an_evaluation_between_the_forward_and_the_loss_changes_nothing(collected):
    model, x = Stack(), data()
    with ka.collect_objectives() if collected else nullcontext() as objectives:
        model(x)
        model.eval()
        with torch.no_grad():
            model(data())
        model(data())
        model.train()
    found = objectives.total() if collected else ka.auxiliary_loss(model)
    close(found, written_out(other := twin(model), x)[1], model, other)


def test_nested_blocks_both_collect():
    model, x = Stack(), data()
    with ka.collect_objectives() as outer:
        model(x)
        with ka.collect_objectives() as inner:
            model(2 * x)
        model(3 * x)
    sums = [written_out(twin(model), scale * x)[1] for scale in (1, 2, 3)]
    torch.testing.assert_close(outer.total(), sum(sums))
    torch.testing.assert_close(inner.total(), sums[1])
    model(x)
    assert len(outer.calls) == 6, "the block is over"
    assert not penalized.this_book().lists


def test_a_block_that_ends_with_an_error_is_over():
    with pytest.raises(ZeroDivisionError), ka.collect_objectives():
        raise ZeroDivisionError
    assert not penalized.this_book().lists


def test_replicas_of_data_parallel_refuse_what_nobody_would_get():
    model, x = layer(), data()
    replica = model._replicate_for_data_parallel()
    replica._parameters, replica._modules = dict(model._parameters), dict(model._modules)
    with pytest.raises(RuntimeError, match=r"nn\.DataParallel.*DistributedDataParallel"):
        replica(x)
    with ka.collect_objectives() as objectives:  # inside the replicated module, as models with a loss do
        replica(x)
    model(x)
    torch.testing.assert_close(objectives.total(), model.penalty())
    replica.eval()(x)


def test_measuring_an_objective_is_no_call():
    model, x = layer(), data()
    with ka.collect_objectives() as objectives:
        model(x)
        before = model.objective
        found = model.measure_objective(2 * x)
    assert len(objectives.calls) == 1
    assert model.objective is before
    model(2 * x)
    torch.testing.assert_close(found, model.objective)


def test_a_layer_and_its_last_objective_go_without_the_garbage_collector():
    gc.disable()
    try:
        model = layer()
        model(data())
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


class Mean(penalized.PenalizedAttention):
    """Attention with equal weights and the objective of the mean square, handed over in one of four ways."""

    def __init__(self, way: str) -> None:
        super().__init__(8, 2)
        self.way = way

    def attend(self, x, context, attention_mask, is_causal):
        value = x.square().mean()
        if self.way == "assigned":
            self.objective = value
        if self.way == "recorded":
            self.record_objective(value)
        found = {"tensor": value, "objective": penalized.Objective(value)}
        return (x, found[self.way]) if self.way in found else x

    def weigh_objective(self, objective):
        return objective.value


@pytest.mark.parametrize("way", ["tensor", "objective", "assigned", "recorded"])
def test_a_mechanism_returns_its_objective_or_hands_it_over_itself(way):
    model, x = Mean(way), torch.randn(2, 7, 8)
    with ka.collect_objectives() as objectives:
        assert model(x) is x
        model(2 * x)
    torch.testing.assert_close(objectives.total(), 5 * x.square().mean())
    torch.testing.assert_close(model.penalty(), 4 * x.square().mean())
    torch.testing.assert_close(model.measure_objective(3 * x), 9 * x.square().mean())


def test_an_objective_of_a_layer_without_a_penalty_is_refused():
    class Plain(AttentionLayer):
        attend = Mean.attend
        way = "tensor"

    with pytest.raises(TypeError, match="make the layer a PenalizedAttention"):
        Plain(8, 2)(torch.randn(2, 7, 8))
