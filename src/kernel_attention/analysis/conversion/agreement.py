"""The agreement of a converted model with the old one, on batches that were not trained on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import Recording, first_tensor, run


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
