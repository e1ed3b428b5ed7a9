"""A handful of photographs and a small classifier."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def photos() -> np.ndarray:
    """Six 32 x 40 crops of scikit-learn's two colour photographs."""
    from sklearn.datasets import load_sample_images

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
