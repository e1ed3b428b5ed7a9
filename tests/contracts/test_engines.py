"""Every engine of ``plan``, at a length where it runs by itself and where it is asked for."""

from __future__ import annotations

import pytest
import torch
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

import kernel_attention as ka

FORMS = {
    "primal": ("primal", {"rank": 2}, False, 257),
    "primal, data-independent": ("primal", {"rank": 2, "data_dependent": False}, True, 257),
    "primal, causal slices": ("primal", {"rank": 2, "max_len": 600}, True, 515),
    "primal, long rank": ("primal", {"rank": 9, "max_len": 600}, True, 515),
    "multilinear": ("multilinear", {"rank": 2}, False, 257),
    "multilinear, data-dependent": ("multilinear", {"rank": 2, "variant": "data_dependent"}, False, 257),
    "rpc": ("rpc", {"iterations": 2}, False, 257),
    "rpc, causal": ("rpc", {"iterations": 2}, True, 257),
    "dual, chunked": ("dual_multilinear", {"rank": 2, "chunk_size": 4}, False, 6),
    "sparse": ("sparse", {"stride": 16}, True, 520),
}
# Forward mode imports torch's own scripted derivatives.
pytestmark = [
    pytest.mark.usefixtures("built_engines"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # of vmap, over torch's own
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # of linearize
]
every_form = pytest.mark.parametrize("name", FORMS)


def options_of(name: str) -> list[dict[str, object]]:
    """The automatic form, and each that can be asked for."""
    mechanism, options, is_causal, _ = FORMS[name]
    forms = {"primal": ["fused", "native"], "multilinear": ["fused"], "rpc": ["fused"]}
    asked = forms.get(mechanism, [])
    if mechanism == "primal" and is_causal and options.get("data_dependent", True):
        asked = ["fused"]
    return [options, *({**options, "impl": impl} for impl in asked)]


def made(name: str, options: dict[str, object]) -> tuple[ka.AttentionLayer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mechanism, _, _, length = FORMS[name]
    layer = ka.create_attention(mechanism, 4, 2, **options).double()
    mask = torch.arange(length)[None] < torch.tensor([length, length - 2, 1])[:, None]
    return layer, torch.randn(3, length, 4, dtype=torch.float64), mask


@every_form
def test_the_forms_are_those_of_the_plan(name):
    mechanism, options, is_causal, _ = FORMS[name]
    layer, x, _ = made(name, options)
    if mechanism in ("primal", "multilinear"):
        has_native = mechanism == "primal" and not (is_causal and layer.data_dependent)
        assert layer.plan(x, is_causal=is_causal).engine == ("native" if has_native else "fused")


@every_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(name, use_reentrant):
    is_causal = FORMS[name][2]
    for options in options_of(name):
        layer, x, mask = made(name, options)
        leaves = [x.requires_grad_(), *layer.parameters()]

        def call(x, layer=layer, mask=mask):
            return layer(x, attention_mask=mask, is_causal=is_causal)[mask]

        expected = torch.autograd.grad(call(x).square().sum(), leaves, materialize_grads=True)
        checkpoint(call, x, use_reentrant=use_reentrant).square().sum().backward()
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        torch.testing.assert_close(found, list(expected))


@every_form
def test_a_batch_without_a_real_token_and_one_without_a_sequence(name):
    is_causal = FORMS[name][2]
    for options in options_of(name):
        layer, x, mask = made(name, options)
        for batch, empty in ((x, torch.zeros_like(mask)), (x[:0], mask[:0])):
            leaf = batch.clone().requires_grad_()
            y = layer(leaf, attention_mask=empty, is_causal=is_causal)
            assert y.shape == batch.shape
            assert y.isfinite().all()
            layer.zero_grad()
            y.sum().backward()
            assert all(
                each.grad is None or each.grad.isfinite().all() for each in (leaf, *layer.parameters())
            )


@every_form
def test_hooks_of_all_modules_see_every_projection(name):
    _, options, is_causal, _ = FORMS[name]
    layer, x, mask = made(name, options)
    y = layer(x, attention_mask=mask, is_causal=is_causal)
    seen = set()
    handle = hooks.register_module_forward_hook(lambda module, *_: seen.add(module))
    try:
        again = layer(x, attention_mask=mask, is_causal=is_causal)
    finally:
        handle.remove()
    torch.testing.assert_close(again[mask], y[mask])
    assert seen >= {module for module in layer.modules() if isinstance(module, torch.nn.Linear)}


@every_form
def test_torch_func_transforms_every_length(name):
    _, options, is_causal, _ = FORMS[name]
    layer, x, _ = made(name, options)
    layer.eval()

    def call(x):
        return layer(x, is_causal=is_causal)

    tangent = torch.randn_like(x)
    y, pushed = torch.func.jvp(call, (x,), (tangent,))
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(call(leaf), y)
    probe = torch.randn_like(y)
    (pulled,) = torch.autograd.grad(call(leaf), leaf, probe)
    torch.testing.assert_close((probe * pushed).sum(), (pulled * tangent).sum(), rtol=1e-7, atol=1e-8)
    if name in ("primal", "multilinear"):  # it traces the layer, and many blocks take seconds
        _, linear = torch.func.linearize(call, x)
        torch.testing.assert_close(linear(tangent), pushed)
    both = torch.vmap(lambda x: call(x[None])[0])(x)
    torch.testing.assert_close(both, y)
