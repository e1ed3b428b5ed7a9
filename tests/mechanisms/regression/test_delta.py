"""Delta attention is a step of least mean squares for each pair, and what many of them come to."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention.features import cosine
from kernel_attention.functional import delta_attention, ridge_attention
from kernel_attention.mechanisms.regression import functional
from kernel_attention.mechanisms.regression.functional import delta_states, read_states
from kernel_attention.tensors.recompute import formulas_only
from reference.regression import delta_rule

F64 = torch.float64
BATCH, HEADS, WIDTH, VALUES = 2, 3, 7, 5


def draw(length: int, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """Queries, keys and values, steps, and logarithms of decays, some of which are very small."""
    q, k = torch.randn(2, BATCH, HEADS, length, WIDTH, dtype=dtype)
    v = torch.randn(BATCH, HEADS, length, VALUES, dtype=dtype)
    step, decay = torch.rand(2, BATCH, HEADS, length, dtype=dtype)
    return [q, k, v, step, 4 * decay.log()]


def one_by_one(q, k, v, step, log_decay):
    """The rule from the first token on, for every query."""
    rows = []
    for b in range(q.size(0)):
        for h in range(q.size(1)):
            keys = list(k[b, h] / k[b, h].norm(dim=-1, keepdim=True))
            decays = torch.zeros_like(step) if log_decay is None else log_decay
            pairs = keys, list(v[b, h]), list(step[b, h]), list(decays[b, h].exp())
            for i, query in enumerate(q[b, h]):
                memory = delta_rule(*(x[: i + 1] for x in pairs))
                rows.append(query / query.norm() @ memory)
    return torch.stack(rows).view_as(v)


@pytest.mark.parametrize("gated", [False, True])
def test_the_block_form_is_the_rule_and_so_are_its_gradients(gated):
    leaves = [x.requires_grad_() for x in draw(37)[: 5 if gated else 4]]
    wanted = one_by_one(*leaves, *([] if gated else [None]))
    towards = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, towards)
    for size in (1, 3, 16, 100):
        q, k, *rest = leaves
        q, k = cosine(q), cosine(k)
        found = read_states(q, k, delta_states(k, *rest, size=size), size)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, leaves, towards), gradients)
    found = delta_attention(*leaves, is_causal=True)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, towards), gradients)
    with formulas_only():
        found = delta_attention(*leaves, is_causal=True)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, towards), gradients)


def test_the_backward_pass_can_be_differentiated():
    leaves = [x[:1, :, :5].requires_grad_() for x in draw(5)]

    def call(q, k, v, step, log_decay):
        return read_states(q, k, delta_states(cosine(k), v, step, log_decay, size=2), 2)

    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_a_decay_of_one_is_none():
    q, k, v, step, _ = draw(70)
    for is_causal in (False, True):
        plain = delta_attention(q, k, v, step, is_causal=is_causal)
        gated = delta_attention(q, k, v, step, torch.zeros_like(step), is_causal=is_causal)
        torch.testing.assert_close(gated, plain)


def test_a_token_is_one_step_of_least_mean_squares():
    _, k, v, step, log_decay = draw(9)
    before = delta_states(cosine(k)[:, :, :8], v[:, :, :8], step[:, :, :8], log_decay[:, :, :8]).last
    memory = (log_decay[:, :, 8, None, None].exp() * before).requires_grad_()
    error = v[:, :, 8] - (memory.mT @ cosine(k)[:, :, 8, :, None])[..., 0]
    (slope,) = torch.autograd.grad(error.square().sum() / 2, memory)
    wanted = memory - step[:, :, 8, None, None] * slope
    torch.testing.assert_close(delta_states(cosine(k), v, step, log_decay).last, wanted)


def test_many_passes_of_small_steps_end_at_ridge_regression_without_a_penalty():
    q, k, v, _, _ = draw(4)  # fewer pairs than features: the map with the least norm
    q = k[:, :, :1]
    for step, off in ((0.5, 1e-3), (0.2, 1e-3)):
        passes = [x.repeat(1, 1, int(200 / step), 1) for x in (k, v)]
        steps = torch.full(passes[0].shape[:3], step, dtype=F64)
        found = delta_attention(q, *passes, steps)
        assert (found - ridge_attention(q, k, v, 1e-12)).abs().max() < off
    k = k[:, :, :1] + 0.3 * torch.randn(BATCH, HEADS, 40, WIDTH, dtype=F64)  # more pairs than features
    v = torch.randn(BATCH, HEADS, 40, VALUES, dtype=F64)
    wanted = ridge_attention(k, k, v, 1e-12)
    errors = []
    for step in (0.1, 0.01):
        passes = [x.repeat(1, 1, int(75 / step / 40 * 10), 1) for x in (k, v)]
        steps = torch.full(passes[0].shape[:3], step, dtype=F64)
        errors.append((delta_attention(k, *passes, steps) - wanted).norm() / wanted.norm())
    assert errors[1] < errors[0] / 5  # its distance is of the order of the step
    assert errors[1] < 0.05


def test_the_whole_sequence_reads_what_its_last_token_reads():
    inputs = draw(70)
    for n in (1, 32, 70):
        part = [x[:, :, :n] for x in inputs]
        last = delta_attention(*part, is_causal=True)[:, :, -1]
        torch.testing.assert_close(delta_attention(*part)[:, :, -1], last)


def test_a_pair_that_is_written_with_a_whole_step_is_recalled_exactly_and_replaces_the_old_one():
    _, k, v, step, _ = draw(70)
    k[:, :, 69] = k[:, :, 30]
    step[:, :, 69] = 1.0
    torch.testing.assert_close(delta_attention(k, k, v, step, is_causal=True)[:, :, 69], v[:, :, 69])


def test_masked_pairs_write_nothing_wherever_they_are():
    inputs = draw(41)
    mask = torch.rand(BATCH, 41) < 0.6
    found = delta_attention(*inputs, attention_mask=mask)
    for b in range(BATCH):
        alone = [x[b : b + 1, :, mask[b]] for x in inputs]
        torch.testing.assert_close(found[b : b + 1, :, mask[b]], delta_attention(*alone))


@pytest.mark.parametrize("kind", ["repeated", "zero", "decays of zero", "large"])
def test_extreme_pairs_have_finite_outputs_and_gradients_in_float32(kind):
    q, k, v, step, log_decay = draw(2048, torch.float32)
    if kind == "repeated":
        k = k[:, :, :1].expand_as(k).clone()
    elif kind == "zero":
        k = torch.zeros_like(k)
    elif kind == "large":
        q, k = 1e4 * q, 1e4 * k
    else:
        log_decay = torch.full_like(log_decay, -200.0)  # the decay itself is zero in float32
    for steps in (step, torch.ones_like(step)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, steps, log_decay)]
        for is_causal in (False, True):
            y = delta_attention(*leaves, is_causal=is_causal)
            assert y.isfinite().all()
            found = torch.autograd.grad(y.square().sum(), leaves)
            assert all(gradient.isfinite().all() for gradient in found)


def saved_numbers(length: int) -> int:
    """Numbers that autograd keeps for the backward of a causal call."""
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.numel()
        return tensor

    leaves = [x.requires_grad_() for x in draw(length)]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        delta_attention(*leaves, is_causal=True)
    return total


def test_memory_is_linear_in_the_length():
    assert saved_numbers(4096) < 2.1 * saved_numbers(2048)


def test_gradients_reproduce_to_the_bit():
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        leaves = [x.requires_grad_() for x in draw(500, torch.float32)]
        y = delta_attention(*leaves, is_causal=True)
        runs.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def test_the_names_are_one_layer():
    assert ka.create_attention("delta", 8, 2).gated is False
    layer = ka.create_attention("gated_delta", 8, 2)
    assert layer.gated
    decays = layer.steps(torch.zeros(1, 3, 8))[1].exp()
    torch.testing.assert_close(decays, torch.full((1, 2, 3), 0.982), rtol=0, atol=1e-3)
    with pytest.raises(ka.InputError, match="cannot attend with given heads: its steps are projections"):
        layer.attend_heads(*torch.zeros(3, 1, 2, 4, 4))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("blocks", [1, 8, 9, 75])
def test_groups_of_blocks_give_the_states_of_one_block_after_another(blocks, gated, monkeypatch):
    leaves = [x.requires_grad_() for x in draw(2 * blocks)[: 5 if gated else 4]]
    found = []
    for in_groups in (True, False):
        monkeypatch.setattr(functional, "has_groups", lambda _, chosen=in_groups: chosen)
        q, k, *others = leaves
        states = delta_states(cosine(k), *others, size=2)
        y = read_states(q, cosine(k), states, size=2)
        loss = y.sin().sum() + states.last.cos().sum()
        grads = torch.autograd.grad(loss, leaves)
        found.append([y, states.before, states.last, *grads])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_the_gradient_of_a_recursion_in_groups_can_be_differentiated(monkeypatch):
    monkeypatch.setattr(functional, "has_groups", lambda _: True)
    monkeypatch.setattr(functional, "_GROUP", 2)
    maps, steps = torch.randn(1, 1, 5, 2, 2, dtype=F64), torch.randn(1, 1, 5, 2, 3, dtype=F64)
    leaves = maps.requires_grad_(), steps.requires_grad_()
    assert torch.autograd.gradcheck(functional.recursion, leaves)
    assert torch.autograd.gradgradcheck(functional.recursion, leaves)


def test_in_float32_groups_of_blocks_are_as_exact_as_one_block_after_another(monkeypatch):
    inputs, errors = draw(4096, torch.float32), []
    exact = delta_attention(*(x.double() for x in inputs[:4]), is_causal=True)
    for in_groups in (True, False):
        monkeypatch.setattr(functional, "has_groups", lambda _, chosen=in_groups: chosen)
        errors.append((delta_attention(*inputs[:4], is_causal=True) - exact).norm())
    assert errors[0] <= 2 * errors[1]
