"""The states of the global random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_generators() -> dict[str, Any]:
    """States of all global generators, in types that ``weights_only`` loading accepts."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), [int(key) for key in keys], *rest],
        "python": random.getstate(),
    }


def set_generators(state: dict[str, Any]) -> None:
    """Continue with these states, of ``get_generators``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
