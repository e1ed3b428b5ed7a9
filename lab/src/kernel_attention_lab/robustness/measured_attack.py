"""One step of a plan on one model: the entry of ``robustness.json``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention_lab.packing import pack_bits
from kernel_attention_lab.robustness.attack_plan import AttackStep
from kernel_attention_lab.robustness.image_attack import attack_images, attackable
from kernel_attention_lab.robustness.protocols import find_protocol

NORMS = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}


def measure_attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    step: AttackStep,
    *,
    source: nn.Module | None = None,
    batch_size: int = 64,
    on_progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Run a step of a plan and measure the model on the attacked images.

    Args:
        model: (B, C, H, W) in [0, 1] -> logits.
        images: (n, C, H, W) in [0, 1].
        labels: (n,), the true classes.
        step: the attack, its protocol and its options; its ``cases`` is not read.
        source: the model against which a transferred attack works.
        batch_size: number of images attacked together.
        on_progress: called after every batch with the number of images done.

    Returns:
        The record of the step and, in JSON's types: ``cases``, the number of images; ``accuracy`` on the
        attacked images; ``bits``, which of them are right (``statistics.pack_bits``); ``distances``, medians
        of the shift in three norms over the images that were changed and are wrong, in the units of the
        protocol's inputs; ``seconds``. An attack that minimises the distance has ``shifts`` too, the distance
        of every image in its norm, None where the model stays right.
    """
    protocol, attack = find_protocol(step.protocol), step.made()
    attacked = source if step.transferred and source is not None else model
    started = time.perf_counter()
    target = protocol.target(attacked, images, labels, attack)
    result = attack_images(
        target.model,
        target.inputs,
        target.labels,
        attack,
        eps=1.0 if step.eps is None else step.eps,
        bounds=protocol.bounds(attack),
        seed=step.seed,
        batch_size=batch_size,
        also_wrong=step.transferred,
        on_progress=on_progress,
    )
    seconds = time.perf_counter() - started
    if attacked is not model:
        own = protocol.target(model, images, labels, attack).model
        result = result._replace(predictions=_predictions(own, result.images, batch_size))
    right = (result.predictions == labels).cpu()
    shift = (result.images - target.inputs).flatten(1)
    broken = ~right & (shift != 0).any(dim=1).cpu()
    entry = step.record() | {
        "cases": len(images),
        "accuracy": right.double().mean().item(),
        "bits": pack_bits(right.numpy()),
        "distances": _medians(shift[broken.to(shift.device)]),
        "seconds": round(seconds, 2),
    }
    if attack.minimises:
        lengths = shift.norm(p=NORMS[attack.norm], dim=1).tolist()
        entry["shifts"] = [
            None if kept else round(length, 5) for kept, length in zip(right, lengths, strict=True)
        ]
    return entry


def _predictions(model: nn.Module, images: Tensor, batch_size: int) -> Tensor:
    with attackable(model), torch.no_grad():
        return torch.cat([model(part).argmax(dim=1) for part in images.split(batch_size)])


def _medians(shift: Tensor) -> dict[str, float | None]:
    if not len(shift):
        return dict.fromkeys(NORMS)
    return {name: shift.norm(p=p, dim=1).median().item() for name, p in NORMS.items()}
