"""The choice of the layers to convert, by the measured loss of the whole model.

The old model stays as it is. A layer is converted for a measurement by hooks: the new layer reads what the
old one is given, and its output takes the place of the old one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import first_tensor, projection_beside
from kernel_attention.hosts.sites import Site


@contextmanager
def converted(old: Sequence[Site], new: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block these layers of a model do what the new ones do."""
    with ExitStack() as stack:
        for site, layer in zip(old, new, strict=True):
            projection = projection_beside(site)
            stack.callback(site.module.register_forward_hook(_Instead(layer), with_kwargs=True).remove)
            if projection is not None:  # the new layer holds a copy of it
                stack.callback(projection.register_forward_hook(lambda module, given, y: given[0]).remove)
        yield


class _Instead:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, arguments: Any, named: Any, output: Any) -> Any:
        y = first_tensor(self.layer(*arguments, **named))
        return y if isinstance(output, Tensor) else (y, *output[1:])


def choose_greedily(
    count: int, loss: Callable[[Sequence[int]], float], tolerance: float, is_late: Callable[[], bool]
) -> tuple[list[int], list[float]]:
    """Add the layer whose conversion costs least, as long as the loss is within the tolerance.

    Args:
        count: number of layers.
        loss: the loss of a model with these layers converted.
        tolerance: the highest loss.
        is_late: True ends the choice.

    Returns:
        The layers in the order of the choice, and the loss with each layer alone.
    """
    alone = [loss([index]) for index in range(count)]
    chosen: list[int] = []
    while len(chosen) < count and not is_late():
        rest = [index for index in range(count) if index not in chosen]
        losses = {index: loss([*chosen, index]) if chosen else alone[index] for index in rest}
        best = min(rest, key=lambda index: losses[index])
        if not losses[best] <= tolerance:
            break
        chosen.append(best)
    return chosen, alone
