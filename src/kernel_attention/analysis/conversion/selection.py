"""The agreement of a converted model with the old one, and the choice of layers by the measured loss.

The old model stays as it is. A layer is converted for a measurement by hooks: the new layer reads what the
old one is given, and its output takes the place of the old one's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import Recording, first_tensor, projection_beside, run
from kernel_attention.hosts.sites import Site


class Agreement(NamedTuple):
    """The agreement of a model with the old one on batches: see ``ConversionReport``."""

    error: float
    cosine: float
    neighbours: float | None


@torch.no_grad()
def measure_agreement(model: nn.Module, recording: Recording, held_out: range) -> Agreement:
    """The share of the old outputs' variance that is missed, mean cosine similarity, neighbours kept."""
    pairs, means = [], []
    for index in held_out:
        y, wanted = first_tensor(run(model, recording.batches[index])), recording.outputs[index]
        real = recording.real_outputs(index)
        pairs.append((y[real], wanted[real]) if real is not None else (y, wanted))
        if (layout := recording.sequences(index)) is not None:
            means.append([layout(z) for z in (y, wanted)])
    found, wanted = (torch.cat([p[side].flatten(0, -2) for p in pairs]).double() for side in (0, 1))
    size = (wanted - wanted.mean(dim=0)).square().sum().clamp_min(1e-300)
    cosine = nn.functional.cosine_similarity(found, wanted, dim=-1).mean()
    kept = None
    if means:
        after, before = (torch.cat([mean[side] for mean in means]) for side in (0, 1))
        kept = neighbours_kept(before, after)
    return Agreement(float((found - wanted).square().sum() / size), float(cosine), kept)


def neighbours_kept(before: Tensor, after: Tensor, most: int = 10) -> float | None:
    """The share of every row's nearest rows by the cosine before, (B, d), that are nearest after, too."""
    count = min(most, (len(before) - 1) // 2)
    if count < 1:
        return None
    near = []
    for rows in (before, after):
        x = nn.functional.normalize(rows.double(), dim=-1)
        near.append((x @ x.mT).fill_diagonal_(-2).topk(count).indices)
    return float((near[0][:, :, None] == near[1][:, None, :]).any(-1).double().mean())


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
    """Add the layer whose conversion costs least, as long as the loss with these layers converted is within
    ``tolerance``.

    ``is_late`` ends the choice. Returns the layers in the order of the choice, and the loss with each layer
    alone.
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
