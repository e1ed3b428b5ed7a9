"""Launches of a training step on an accelerator, counted on the device meta: no mechanism exceeds its budget.

A row is a mechanism, its options, how it is called, and the launches of the forward and of the backward pass.
A number that falls is written down here; one that rises says what it bought.
"""

from __future__ import annotations

import pytest
import torch

from kernel_attention import collect_objectives, create_attention
from kernel_attention.testing import Subject, check_attention, count_launches, counting_launches

CAUSAL, PADDED = {"is_causal": True}, {"padded": True}
BUDGETS = [
    ("softmax", {}, {}, 4, 9),
    ("softmax", {}, CAUSAL | PADDED, 18, 13),
    ("linear", {}, {}, 12, 17),
    ("linear", {}, PADDED, 14, 17),
    ("linear", {}, CAUSAL, 17, 28),
    ("cosine", {}, {}, 10, 16),
    ("primal", {"rank": 30}, {}, 12, 20),
    ("primal", {"rank": 30, "eta": 0.1}, {}, 20, 36),
    ("primal", {"rank": 30, "eta": 0.1, "dtype": torch.bfloat16}, {}, 27, 45),
    ("primal", {"rank": 30, "data_dependent": False}, {}, 10, 18),
    ("primal", {"rank": 30, "data_dependent": False}, CAUSAL, 13, 22),
    ("primal", {"rank": 30, "max_len": 1024}, CAUSAL, 25, 44),
    ("primal_values", {}, {}, 17, 26),
    ("primal_values", {"eta": 0.1}, {}, 26, 33),
    ("primal_values", {}, CAUSAL, 24, 44),
    ("primal_values", {"eta": 0.1}, CAUSAL, 39, 57),
    ("multilinear", {}, {}, 14, 23),
    ("multilinear", {"eta": 0.1}, {}, 35, 37),
    ("multilinear", {"eta": 0.1, "variant": "learnable_diagonal"}, {}, 60, 102),
    ("multilinear", {"eta": 0.1, "variant": "learnable"}, {}, 72, 109),
    ("batch_norm_scaled_heads", {}, {}, 23, 33),
    ("scaled_heads", {}, CAUSAL, 23, 42),
    ("batch_norm_scaled_heads", {}, CAUSAL, 27, 48),
    ("rpc", {}, {}, 30, 69),
    ("rpc", {}, CAUSAL, 36, 75),
    ("ridge", {}, {}, 34, 46),
    ("ridge", {}, CAUSAL, 63, 93),
    ("delta", {}, CAUSAL, 44, 79),
]
BATCH, LENGTH, EMBED_DIM, HEADS = 2, 512, 64, 4


def _count(name, options, arguments):
    arguments = dict(arguments)
    layer = create_attention(name, embed_dim=EMBED_DIM, num_heads=HEADS, device="meta", **options)
    if arguments.pop("padded", False):
        arguments["attention_mask"] = torch.empty(BATCH, LENGTH, dtype=torch.bool, device="meta")
    x = torch.empty(BATCH, LENGTH, EMBED_DIM, device="meta", dtype=options.get("dtype"))
    return count_launches(layer.train(), x, **arguments)


@pytest.mark.parametrize(("name", "options", "arguments", "forward", "backward"), BUDGETS)
def test_a_training_step_keeps_to_its_budget(name, options, arguments, forward, backward):
    found = _count(name, options, arguments)
    assert not found.hidden
    assert not found.synchronizations
    assert not found.decompositions
    assert (found.forward, found.backward) <= (forward, backward), found.names
    assert found.backward <= backward, found.names


@pytest.mark.parametrize("name", ["primal", "multilinear"])
def test_the_penalties_of_all_layers_cost_little_more_than_one(name):
    made = [
        create_attention(name, embed_dim=EMBED_DIM, num_heads=HEADS, eta=0.1, device="meta") for _ in range(6)
    ]
    x = torch.empty(BATCH, LENGTH, EMBED_DIM, device="meta")
    with collect_objectives() as objectives:
        torch.nn.Sequential(*made).train()(x)
    with counting_launches() as counter:
        loss = objectives.total()
    forward = counter.launches.total()
    values = [call.objective.value for call in objectives.calls]
    with counting_launches() as counter:
        torch.autograd.grad(loss, values)
    assert (forward, counter.launches.total()) == (10 + 6, 5 + 6)  # of each layer the weight


def test_views_and_allocations_launch_nothing_and_fills_and_copies_do():
    class Module(torch.nn.Module):
        def forward(self, x):
            torch.empty_like(x)
            return x.mT[..., None].squeeze(-1).contiguous() + torch.zeros(1, device=x.device)

    found = count_launches(Module(), torch.empty(2, 3, device="meta"))
    assert dict(found.names[0]) == {"clone": 1, "zeros": 1, "add": 1}


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.amax().item() > 0,
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0].sum(),
        lambda x: (x > 0).nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x + torch.tensor([1.0], device="cpu").to(x.device),
    ],
)
def test_a_question_slipped_into_a_layer_is_found(question):
    class Asking(type(create_attention("softmax", 15, 3))):
        def attend(self, x, context, attention_mask, is_causal):
            question(x)
            return super().attend(x, context, attention_mask, is_causal)

    with pytest.raises(AssertionError, match="no_call_waits_for_the_device"):
        check_attention(Subject("asking", Asking), only=["no_call_waits_for_the_device"])
