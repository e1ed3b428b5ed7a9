"""The attacks by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kernel_attention.errors import InputError, unknown
from kernel_attention.experiments.robustness.black_box_attacks import SPSA, AutoAttack, Clean, Noise, Square
from kernel_attention.experiments.robustness.gradient_attacks import (
    FGSM,
    PGD,
    CarliniWagner,
    SparseL1Descent,
)
from kernel_attention.experiments.robustness.image_attack import ImageAttack

ATTACKS: dict[str, type[ImageAttack]] = {
    "clean": Clean,
    "fgsm": FGSM,
    "pgd": PGD,
    "spsa": SPSA,
    "cw": CarliniWagner,
    "sld": SparseL1Descent,
    "noise": Noise,
    "square": Square,
    "autoattack": AutoAttack,
}


def make_attack(name: str, options: Mapping[str, Any] | None = None) -> ImageAttack:
    """An attack with options.

    Args:
        name: one of ``ATTACKS``.
        options: fields of the attack's class; its defaults hold for the rest.

    Raises:
        InputError: for an unknown name or option, and for a value that the option does not accept.
    """
    if name not in ATTACKS:
        raise unknown("attack", name, ATTACKS)
    options = dict(options or {})
    known = [entry.name for entry in dataclasses.fields(ATTACKS[name])]
    for option in options:
        if option not in known:
            raise unknown(f"option of attack {name}", option, known)
    try:
        return ATTACKS[name](**options)
    except InputError as error:
        raise InputError(f"attack {name}: {error}") from None
