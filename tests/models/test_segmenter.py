"""Segmenter: what the pixels get, windows and padding, weights of a classifier, what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from kernel_attention import InputError
from kernel_attention.models import Segmenter, VisionTransformer

# Rows, columns, channels, width, heads and classes differ, so that a swapped axis cannot pass.
WINDOW, PATCH, GRID, CLASSES, BATCH = (6, 10), 2, (3, 5), 7, 4
SMALL = {"embed_dim": 28, "num_heads": 4, "num_layers": 2, "feedforward_dim": 31}


def classifier(size=WINDOW, **options) -> VisionTransformer:
    torch.manual_seed(3)
    model = VisionTransformer(size, PATCH, 11, **{**SMALL, "dtype": torch.float64, **options})
    with torch.no_grad():  # zero biases and unit norms would hide a mistake
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_scale([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    return model.eval()


def segmenter(**options) -> Segmenter:
    model = Segmenter(classifier(**options), CLASSES).eval()
    with torch.no_grad():
        model.encoder.head.weight.normal_()
        model.encoder.head.bias.normal_()
    return model


def images(size=WINDOW, count: int = BATCH) -> torch.Tensor:
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def bilinear(grid: torch.Tensor) -> torch.Tensor:
    """By the definition: the centres of patches carry the values, and beyond them the border is constant."""
    rows, columns = grid.shape
    result = grid.new_empty(rows * PATCH, columns * PATCH)
    for i in range(rows * PATCH):
        for j in range(columns * PATCH):
            y = min(max((i + 0.5) / PATCH - 0.5, 0), rows - 1)
            x = min(max((j + 0.5) / PATCH - 0.5, 0), columns - 1)
            top, left = min(int(y), rows - 2), min(int(x), columns - 2)
            dy, dx = y - top, x - left
            result[i, j] = (1 - dy) * ((1 - dx) * grid[top, left] + dx * grid[top, left + 1]) + dy * (
                (1 - dx) * grid[top + 1, left] + dx * grid[top + 1, left + 1]
            )
    return result


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_pixel_gets_the_head_of_its_patches_interpolated(pooling):
    model, x = segmenter(pooling=pooling), images()
    tokens = model.encoder.encode(x)[:, int(pooling == "class") :]
    logits = (tokens @ model.encoder.head.weight.T + model.encoder.head.bias).view(BATCH, *GRID, CLASSES)
    found = model(x)
    assert found.shape == (BATCH, CLASSES, *WINDOW)
    for case, number in [(0, 0), (1, 3), (3, 6)]:
        torch.testing.assert_close(found[case, number], bilinear(logits[case, :, :, number]))


@pytest.mark.parametrize("size", [(5, 10), (6, 7), (3, 9), (1, 1)])
def test_a_smaller_image_is_padded_with_the_mean_and_the_result_cropped(size):
    model, x = segmenter(), images(size)
    padded = model.encoder.input_mean.view(3, 1, 1).expand(BATCH, 3, *WINDOW).clone()
    padded[..., : size[0], : size[1]] = x
    torch.testing.assert_close(model(x), model(padded)[..., : size[0], : size[1]], rtol=0, atol=0)


def test_windows_side_by_side_are_so_many_images():
    model, x = segmenter(), images((12, 20))
    quarters = [model(x[..., i : i + 6, j : j + 10]) for i in (0, 6) for j in (0, 10)]
    expected = torch.cat([torch.cat(quarters[:2], dim=3), torch.cat(quarters[2:], dim=3)], dim=2)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_overlapping_windows_are_averaged():
    """Columns 0 to 9 and, shifted back to the end, 4 to 13."""
    model, x = segmenter(), images((6, 14))
    left, right = model(x[..., :10]), model(x[..., 4:])
    found = model(x)
    torch.testing.assert_close(found[..., :4], left[..., :4])
    torch.testing.assert_close(found[..., 4:10], (left[..., 4:] + right[..., :6]) / 2)
    torch.testing.assert_close(found[..., 10:], right[..., 6:])


def test_one_side_may_be_smaller_and_the_other_larger_than_a_window():
    model, x = segmenter(), images((4, 23))
    found = model(x)
    assert found.shape == (BATCH, CLASSES, 4, 23)
    torch.testing.assert_close(found[..., :10], model(x[..., :10]))
    torch.testing.assert_close(found[..., 20:], model(x[..., 13:])[..., 7:])


def test_the_encoder_of_a_classifier_keeps_its_features_at_its_own_size():
    trained = classifier()
    expected = trained.encode(images())
    model = Segmenter(trained.resized(WINDOW), CLASSES).eval()
    torch.testing.assert_close(model.encoder.encode(images()), expected, rtol=0, atol=0)
    assert model.encoder.head.out_features == CLASSES
    assert trained.head.out_features == 11, "resized made a copy"
    assert model.encoder.resized((4, 6)).head.out_features == CLASSES


def test_every_parameter_has_a_gradient():
    model = Segmenter(classifier(pooling="mean"), CLASSES)
    target = torch.randint(CLASSES, (BATCH, *WINDOW))
    F.cross_entropy(model(images()), target).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "attention", ["symmetric", "conv2d", {"primal": {"rank": 3}}, {"rpc": {"iterations": 2}}]
)
def test_mechanisms_that_need_the_grid_or_the_length_take_any_image(attention):
    model = Segmenter(classifier(attention=attention, dtype=torch.float32), CLASSES)
    assert model(images((9, 13), 1).float()).isfinite().all()


def test_wrong_input_is_refused():
    model = segmenter()
    with pytest.raises(InputError, match=re.escape("(3, 6, 10), expected (B, 3, H, W)")):
        model(images()[0])
    with pytest.raises(InputError, match=re.escape("expected (B, 3")):
        model(images((4, 9))[:, :2])
    with pytest.raises(InputError, match=re.escape("expected (B, 3")):
        model(images((0, 10)))
    with pytest.raises(InputError, match="num_classes=0 must be a whole number"):
        Segmenter(classifier(), 0)
