"""Makes timm importable beside a CPU build of PyTorch; a plugin of ``kernel-attention bench``.

    PYTHONPATH=tests/hosts kernel-attention bench --suite vision --plugin timm_beside_cpu_torch

timm needs torchvision, whose wheel on the registry is built for a CUDA build of PyTorch. Its import fails on
describing operators that are missing then. Their signatures are all that it needs: nothing here calls them.
Where timm is not installed, the folder is searched in which ``make env`` puts it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")


def import_torchvision() -> None:
    """Import torchvision, with its operators declared where they are missing; nothing where it is absent."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in _OPERATORS:
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", signature)
        importlib.import_module("torchvision")


if (_hosts := Path(sys.prefix) / "hosts").is_dir() and str(_hosts) not in sys.path:
    sys.path.append(str(_hosts))
import_torchvision()
