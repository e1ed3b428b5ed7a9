"""Padded tokens influence nothing: a batch gives each sequence what it would get alone.

Promised for any finite content of the padding; NaN and infinity are the caller's to keep out (0 times NaN is
NaN in the products of attention, and in the gradients of every projection).
"""

from __future__ import annotations

import torch
from contracts.cases import (
    BATCH,
    EMBED_DIM,
    LENGTH,
    LENGTHS,
    cases_where,
    every_case,
    inputs,
    objective,
    objective_cases,
    right_padding,
)

from kernel_attention import auxiliary_loss


def masks():
    """Right padding, left padding and holes."""
    yield right_padding()
    yield right_padding().flip(1)
    holes = torch.rand(BATCH, LENGTH) < 0.6
    holes[:, 4] = True
    yield holes


def with_garbage(x, mask, size=1e4):
    return torch.where(mask[..., None], x, size * torch.randn_like(x))


@every_case
def test_a_padded_batch_gives_each_sequence_its_own_output(case):
    layer, x = case.build(), inputs()
    for mask in masks():
        for form in case.call_forms():
            y = layer(with_garbage(x, mask), key_padding_mask=mask, **form)
            for b in range(BATCH):
                torch.testing.assert_close(y[b, mask[b]], layer(x[b, mask[b]][None], **form)[0])


@objective_cases
def test_a_padded_batch_has_the_mean_objective_of_its_sequences(case):
    layer, x = case.build(), inputs()
    for mask in masks():
        for form in case.call_forms():
            layer(with_garbage(x, mask), key_padding_mask=mask, **form)
            together, alone = objective(layer), []
            for b in range(BATCH):
                layer(x[b, mask[b]][None], **form)
                alone.append(objective(layer))
            if together.dim() == 1:  # every sequence has its own
                torch.testing.assert_close(together, torch.cat(alone))
                continue
            weight = mask.sum(1) if case.variant.objective_over == "tokens" else torch.ones(BATCH)
            torch.testing.assert_close(together, (torch.stack(alone) * weight).sum() / weight.sum())


@every_case
def test_the_content_of_the_padding_changes_neither_outputs_nor_gradients(case):
    x = inputs()
    for mask in masks():
        for form in case.call_forms():
            results = []
            for content in (x, with_garbage(x, mask), x.masked_fill(~mask[..., None], 0.0)):
                layer, leaf = case.build(), content.clone().requires_grad_()
                y = layer(leaf, key_padding_mask=mask, **form)
                (y[mask].square().sum() + auxiliary_loss(layer)).backward()
                assert not leaf.grad[~mask].any()
                results.append([y[mask], leaf.grad[mask], *(p.grad for p in layer.parameters())])
            for other in results[1:]:
                torch.testing.assert_close(other, results[0])


@every_case
def test_a_full_mask_is_no_mask(case):
    layer, x = case.build(), inputs()
    for form in case.call_forms():
        full = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        torch.testing.assert_close(layer(x, key_padding_mask=full, **form), layer(x, **form))


@every_case
def test_an_empty_sequence_disturbs_nobody(case):
    x, mask = inputs().requires_grad_(), right_padding().clone()
    mask[2] = False
    rest = torch.arange(BATCH) != 2
    for form in case.call_forms():
        layer = case.build()
        y = layer(x, key_padding_mask=mask, **form)
        torch.testing.assert_close(y[rest], layer(x[rest], key_padding_mask=mask[rest], **form))
        (y[mask].sum() + auxiliary_loss(layer)).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in (x, *layer.parameters()))


@every_case
def test_a_sequence_does_not_depend_on_its_batch(case):
    layer, x, mask = case.build(), inputs(), right_padding()
    order = torch.randperm(BATCH)
    for form in case.call_forms():
        y = layer(x, key_padding_mask=mask, **form)
        permuted = layer(x[order], key_padding_mask=mask[order], **form)
        torch.testing.assert_close(permuted, y[order])
        for b in range(BATCH):
            alone = layer(x[b : b + 1], key_padding_mask=mask[b : b + 1], **form)
            torch.testing.assert_close(alone[:, : LENGTHS[b]], y[b : b + 1, : LENGTHS[b]])


@objective_cases
def test_the_objective_does_not_depend_on_the_order_of_the_batch(case):
    layer, x, mask = case.build(), inputs(), right_padding()
    order = torch.randperm(BATCH)
    losses = []
    for take in (slice(None), order):
        layer(x[take], key_padding_mask=mask[take])
        losses.append(auxiliary_loss(layer))
    torch.testing.assert_close(*losses)


@cases_where(lambda case: case.mechanism.mixes_tokens in ("yes", "no"))  # of others it depends on the form
def test_whether_tokens_mix_is_as_the_table_says(case):
    layer, x = case.build(), inputs()
    y = layer(x)
    x[:, 3] = torch.randn(BATCH, EMBED_DIM)
    changed = (layer(x) - y).abs().amax(dim=(0, 2)) > 1e-9
    assert changed[3]
    assert changed[torch.arange(LENGTH) != 3].any() == (case.mechanism.mixes_tokens == "yes")
