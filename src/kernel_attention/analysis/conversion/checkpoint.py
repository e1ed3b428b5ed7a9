"""A file of the layers that a conversion has trained, from which the same conversion goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kernel_attention.errors import InputError, writing


class Checkpoint:
    """The trained layers of a conversion, by their dotted names.

    Args:
        path: the file; None: nothing is kept.
        settings: of the conversion. A file of other settings is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.settings = json.loads(json.dumps(settings, default=str))
        self.layers: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            self.layers = self._read(self.path)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            settings, layers = content["settings"], content["layers"]
        except Exception as error:  # the unpickler's own of many kinds
            reason = str(error).partition("\n")[0]
            raise InputError(f"checkpoint {path}: not a file of a conversion ({reason})") from None
        names = self.settings.keys() | settings.keys()
        other = sorted(name for name in names if self.settings.get(name) != settings.get(name))
        if other:
            raise InputError(
                f"checkpoint {path}: is of a conversion with other {', '.join(other)}; remove it or go on "
                "with the same"
            )
        return dict(layers)

    def keep(self, path: str, layer: nn.Module, **found: Any) -> None:
        """Add a trained layer and what was found about it, and write the file."""
        if self.path is None:
            return
        weights = {name: value.detach().cpu().clone() for name, value in layer.state_dict().items()}
        self.layers[path] = {"weights": weights, **found}
        with writing(f"checkpoint {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(f"{self.path.name}.part")
            torch.save({"settings": self.settings, "layers": self.layers}, part)
            part.replace(self.path)


def digest(batches: Sequence[Any]) -> str:
    """A short digest of the tensors of batches."""
    found = hashlib.sha256()
    for batch in batches:
        parts = dict(batch) if isinstance(batch, Mapping) else batch
        for value in tree_leaves(parts):
            if isinstance(value, Tensor):
                found.update(repr((value.dtype, tuple(value.shape))).encode())
                found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
