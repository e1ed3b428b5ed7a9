"""On the device meta, sizes alone are computed: of every layer's output and objective."""

import torch
from contracts.cases import BATCH, EMBED_DIM, HEADS, LENGTH, cases_where, objective

from kernel_attention.models import CausalLanguageModel


@cases_where(others_slow=True)
def test_outputs_and_objectives_have_their_sizes_on_meta(case):
    real, layer = case.make(EMBED_DIM, HEADS), case.make(EMBED_DIM, HEADS, device="meta")
    for is_causal in (False, True) if layer.supports(causal=True) else (False,):
        for mask in (None, torch.ones(BATCH, LENGTH, dtype=torch.bool)):
            x = torch.randn(BATCH, LENGTH, EMBED_DIM)
            expected = real(x, attention_mask=mask, is_causal=is_causal)
            found = layer(
                x.to("meta"), attention_mask=None if mask is None else mask.to("meta"), is_causal=is_causal
            )
            assert found.is_meta
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            j, expected_j = objective(layer), objective(real)
            assert (j is None) == (expected_j is None)
            assert j is None or (j.is_meta and j.shape == expected_j.shape)


def test_a_language_models_loss_has_its_size_on_meta():
    model = CausalLanguageModel(7, 5, "rpc", embed_dim=6, num_heads=2, num_layers=1, device="meta")
    tokens = torch.zeros(3, 5, dtype=torch.long, device="meta")
    loss = model.loss(tokens, tokens)
    assert loss.is_meta
    assert loss.dim() == 0
