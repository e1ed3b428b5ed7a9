"""What is kept is made once, and is a tensor like any other."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_attention.tensors.constants import kept_constant


def test_it_is_made_once_for_a_key_and_a_device():
    made = []

    def ask(*key, like):
        return kept_constant(("test once", *key), like, lambda: made.append(key) or like.new_zeros(3))

    x = torch.zeros(1)
    assert ask(1, like=x) is ask(1, like=x)
    assert ask(2, like=x) is not ask(1, like=x)
    assert ask(1, like=x.to("meta")).is_meta
    assert made == [(1,), (2,), (1,)]


def test_nothing_that_a_mode_or_a_transform_makes_is_kept():
    x = torch.zeros(())

    def ask(like):
        return kept_constant(("test modes",), like, lambda: torch.arange(3.0)).sum() * like

    with FakeTensorMode() as mode:
        ask(mode.from_tensor(x))
    torch.func.grad(ask)(x)
    torch.vmap(ask)(x.expand(2))
    with torch.inference_mode():
        ask(x)
    leaf = x.clone().requires_grad_()
    ask(leaf).backward()
    assert leaf.grad == 3
    assert not kept_constant(("test modes",), x, lambda: torch.arange(3.0)).is_inference()
