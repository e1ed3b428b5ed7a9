"""What attacks and corruptions are tried on: digits and photographs, and small classifiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.models import VisionTransformer

Images = tuple[Tensor, Tensor]


@pytest.fixture(scope="session")
def digits() -> Images:
    """1797 images (n, 3, 8, 8) in [0, 1] and their classes; the last 297 are for testing."""
    bunch = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1) / 16
    return images, torch.as_tensor(bunch.target)


def _trained(model: nn.Module, digits: Images, steps: int, batch_size: int = 256) -> nn.Module:
    images, targets = digits[0][:1500], digits[1][:1500]
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(1500, (batch_size,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), targets[batch]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="session")
def linear(digits: Images) -> nn.Module:
    """A linear classifier, for which the images that an attack can break are known."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _trained(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), digits, 200)


@pytest.fixture(scope="session")
def convolutional(digits: Images) -> nn.Module:
    """A classifier with one convolution."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
        return _trained(nn.Sequential(*layers), digits, 60)


@pytest.fixture(scope="session")
def photos() -> np.ndarray:
    """Six 32 x 40 crops of scikit-learn's two colour photographs."""
    return np.stack(
        [
            image[row : row + 32 * 8 : 8, column : column + 40 * 8 : 8]
            for image in load_sample_images().images
            for row, column in ((0, 0), (150, 100), (100, 300))
        ]
    )


@pytest.fixture
def classifier() -> nn.Module:
    """Ten classes from pixels in [0, 1], with dropout, whose effect would show in training mode."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.5))
    return nn.Sequential(*layers, nn.Linear(32, 10))


@pytest.fixture(scope="session")
def vision(digits: Images) -> VisionTransformer:
    """A vision transformer with RPC-Attention whose threshold is small enough that most clamps hold."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(
            8, 4, 10, attention={"rpc": {"iterations": 3, "lam": 0.1}}, embed_dim=32, num_heads=2,
            num_layers=2, feedforward_dim=64, pooling="mean",
        )  # fmt: skip
        model.set_scale([0.305] * 3, [0.376] * 3)
        return _trained(model, digits, 150, 64)
