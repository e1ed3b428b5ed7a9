"""The projection loss in both forms, against loops over what the paper prints and its released code does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernel_attention.errors import InputError

pytest.importorskip("sklearn")

from kernel_attention import solvers

BATCH, HEADS, TOKENS, WIDTH, VALUES = 2, 3, 11, 7, 5
SCALE = 1 / math.sqrt(WIDTH)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def parts() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of self-attention."""
    return (
        draw(BATCH, HEADS, TOKENS, WIDTH),
        draw(BATCH, HEADS, TOKENS, WIDTH),
        draw(BATCH, HEADS, TOKENS, VALUES),
    )


def equation_13(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, (N, p) each: the sum as printed, query by query."""
    terms = []
    for query in q:
        weights = [math.exp(SCALE * float(query @ key)) for key in k]
        length = math.exp(SCALE * float(query @ query)) / sum(weights) ** 2
        output = sum(weight * value for weight, value in zip(weights, v, strict=True)) / sum(weights)
        terms.append(length - float(output @ output))
    return torch.tensor(sum(terms) / len(terms), dtype=torch.float64)


def released(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean before the logarithm, one head: scores of q and k, and g from the first column of A.

    The column's logits lack 1/sqrt(p), as q.q does; the softmax has it.
    """

    def scores(x: Tensor) -> Tensor:
        return torch.stack([(row - row.mean()) / row.std() for row in x])

    q, k = scores(q), scores(k)
    attention = torch.stack([torch.stack([SCALE * query @ key for key in k]).softmax(0) for query in q])
    terms = []
    for query, row in zip(q, attention, strict=True):
        denominator = math.exp(2 * float(query @ k[0]) - math.log(float(row[0]) ** 2))
        output = row @ v
        terms.append(math.exp(float(query @ query)) / denominator - float(output @ output))
    return torch.tensor(sum(terms) / len(terms), dtype=torch.float64)


def by_head(function, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    flat = [part.flatten(0, 1) for part in parts]
    return torch.stack([function(*each) for each in zip(*flat, strict=True)]).unflatten(0, (BATCH, HEADS))


def test_the_raw_form_is_equation_13(parts):
    found = solvers.projection_loss(*parts)
    expected = by_head(equation_13, parts)
    torch.testing.assert_close(found.error, expected)
    torch.testing.assert_close(solvers.projection_error(*parts), expected)
    positive = expected > 0
    assert positive.any()
    assert not positive.all(), "with values of any scale J_proj may be negative"
    torch.testing.assert_close(found.log_error[positive], expected[positive].log())
    assert found.log_error[~positive].isnan().all()


def test_the_released_form_is_the_log_of_what_the_code_averages(parts):
    found = solvers.projection_loss(*parts, form="released")
    expected = by_head(released, parts)
    torch.testing.assert_close(found.error, expected)
    torch.testing.assert_close(found.log_error, expected.log())
    # One figure a layer: the code takes the mean of batch, heads and queries, and then the logarithm.
    torch.testing.assert_close(found.pooled().log_error, expected.mean().log())


def test_the_released_form_does_not_know_the_scale_or_shift_of_queries_and_keys(parts):
    q, k, v = parts
    moved = solvers.projection_loss(3.0 * q + 2.0, 0.1 * k - 5.0, v, form="released")
    torch.testing.assert_close(moved, solvers.projection_loss(q, k, v, form="released"))
    assert not torch.allclose(solvers.projection_error(3.0 * q, k, v), solvers.projection_error(q, k, v))


def test_the_released_form_depends_on_which_key_is_first(parts):
    """Eq. 13 is a function of the set of keys; the code's figure is not."""
    q, k, v = parts
    turned = q, k.roll(1, dims=-2), v.roll(1, dims=-2)
    torch.testing.assert_close(solvers.projection_loss(*turned), solvers.projection_loss(q, k, v))
    first, other = (solvers.projection_loss(*each, form="released") for each in ((q, k, v), turned))
    torch.testing.assert_close(first.output, other.output)
    assert ((first.log_length - other.log_length).abs() > 1e-3).all()


def test_the_values_hardly_count_in_the_released_form():
    """At the width of a ViT's heads the length is near e^63, whatever the values are."""
    torch.manual_seed(0)
    q, k, v = draw(TOKENS, 64), draw(TOKENS, 64), draw(TOKENS, VALUES)
    small, large = (solvers.projection_loss(q, k, size * v, form="released") for size in (1.0, 1e3))
    torch.testing.assert_close(small.log_error, large.log_error, rtol=1e-12, atol=0)
    assert small.log_error > 40


@pytest.mark.parametrize("form", ["raw", "released"])
def test_padding_on_either_side_counts_for_nothing(parts, form):
    for real in (slice(0, 7), slice(4, TOKENS)):
        mask = torch.zeros(BATCH, 1, TOKENS, dtype=torch.bool)
        mask[..., real] = True
        spoiled = [part.masked_fill(~mask[..., None], torch.nan) for part in parts]
        found = solvers.projection_loss(*spoiled, form=form, attention_mask=mask)
        expected = solvers.projection_loss(*(part[..., real, :] for part in parts), form=form)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ["raw", "released"])
def test_a_causal_layer_has_a_kernel_for_every_prefix(parts, form):
    found = solvers.projection_loss(*parts, form=form, is_causal=True)
    q, k, v = parts
    prefixes = [
        solvers.projection_loss(q[..., i : i + 1, :], k[..., : i + 1, :], v[..., : i + 1, :], form=form)
        for i in range(TOKENS)
    ]
    torch.testing.assert_close(found.error, torch.stack([prefix.error for prefix in prefixes]).mean(0))


def test_a_length_beyond_the_range_keeps_its_logarithm():
    """q.q / sqrt(p) near 1e4: exp overflows, and J_proj is infinite; its logarithm is the length's."""
    q, k, v = 100.0 * torch.ones(3, 2), torch.zeros(3, 2), torch.ones(3, 2)
    found = solvers.projection_loss(q.double(), k.double(), v.double())
    assert found.error == math.inf
    expected = torch.tensor(2e4 / math.sqrt(2) - 2 * math.log(3), dtype=torch.float64)
    torch.testing.assert_close(found.log_length, expected)
    torch.testing.assert_close(found.log_error, expected)


def test_a_vector_of_equal_channels_has_the_score_0(parts):
    """As an untrained class token may: the code divides by its deviation, 0 or rounding error."""
    q, k, v = parts
    flat = q.clone()
    flat[..., 0, :] = 0.1 + 0.2
    found = solvers.projection_loss(flat, k, v, form="released")
    q = (q - q.mean(-1, keepdim=True)) / q.std(-1, keepdim=True)
    q[..., 0, :] = 0.0
    k = (k - k.mean(-1, keepdim=True)) / k.std(-1, keepdim=True)
    logits = SCALE * q @ k.mT
    lengths = q.square().sum(-1) - 2 * (q @ k.mT)[..., 0] + 2 * (logits[..., 0] - logits.logsumexp(-1))
    torch.testing.assert_close(found.log_length, lengths.exp().mean(-1).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_precision_is_that_of_double(parts, dtype):
    low = [part.to(dtype) for part in parts]
    found = solvers.projection_loss(*low, form="released")
    expected = solvers.projection_loss(*(part.double() for part in low), form="released")
    for part, reference in zip(found, expected, strict=True):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part, reference.float(), rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: solvers.projection_loss(q, q, q, form="paper"), "unknown form 'paper'"),
        (lambda q: solvers.projection_loss(q[..., :1], q[..., :1], q, form="released"), "p at least 2"),
        (lambda q: solvers.projection_loss(q, q, q[..., :3, :]), "a row for every key"),
    ],
)
def test_bad_input_is_named(parts, call, message):
    with pytest.raises(InputError, match=message):
        call(parts[0])
