"""Signs that a model looks robust because its gradient misleads, not because it is.

An attack that follows the gradient should break what cheaper or blinder attacks break (Athalye, Carlini,
Wagner, ICML 2018; Carlini et al., "On Evaluating Adversarial Robustness", 2019). The accuracy under PGD says
too much where one step beats many, where an attack without gradients or one made against another model beats
the attack on the model itself, or where a surrogate of the gradient beats the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernel_attention_lab.packing import unpack_bits
from kernel_attention_lab.robustness.attack_plan import ATTACKS, eps_text

Entry = Mapping[str, Any]


def masking_warnings(entries: Sequence[Entry]) -> list[str]:
    """One sentence for every attack that breaks more images than PGD although it knows less.

    Args:
        entries: of ``measure_attack``. Compared are those with the same protocol and eps, on the images that
            both attacked.
    """
    warnings = []
    for reference in filter(_is_plain_pgd, entries):
        for entry in entries:
            if _knows_less(entry) and all(entry[key] == reference[key] for key in ("protocol", "eps")):
                warnings += _compared(entry, reference)
    return list(dict.fromkeys(warnings))


def attack_title(entry: Entry) -> str:
    """The name of an attack with what sets it apart from the plain one."""
    words = [str(entry["attack"])]
    options = entry["options"]
    if entry["transferred"]:
        words.append("transferred")
    if options.get("restarts", 1) > 1:
        words.append(f"{options['restarts']} restarts")
    if options.get("gradient", "exact") != "exact":
        words.append(f"{str(options['gradient']).replace('_', '-')} gradient")
    return ", ".join(words)


def _is_plain_pgd(entry: Entry) -> bool:
    options = entry["options"]
    return (
        entry["attack"] == "pgd"
        and not entry["transferred"]
        and options["restarts"] == 1
        and options["gradient"] == "exact"
    )


def _knows_less(entry: Entry) -> bool:
    """Return whether PGD with the model's gradient should be at least as strong."""
    attack = ATTACKS[entry["attack"]]
    if not attack.takes_eps or entry["attack"] == "autoattack":
        return False
    is_surrogate = entry["options"].get("gradient", "exact") != "exact"
    return entry["transferred"] or not attack.needs_gradient or is_surrogate or entry["attack"] == "fgsm"


def _compared(entry: Entry, reference: Entry) -> list[str]:
    cases = min(entry["cases"], reference["cases"])
    wrong, wrong_by_pgd = (~unpack_bits(each["bits"], each["cases"])[:cases] for each in (entry, reference))
    alone, pgd_alone = int(np.sum(wrong & ~wrong_by_pgd)), int(np.sum(wrong_by_pgd & ~wrong))
    if alone <= pgd_alone:
        return []
    return [
        f"{attack_title(entry)} breaks more than pgd at eps {eps_text(entry['eps'])} (protocol "
        f"{entry['protocol']}): {alone} of {cases} images that pgd does not break, against {pgd_alone} the "
        f"other way round (p = {_tail(alone, alone + pgd_alone):.2g}); the model's gradient may be masked"
    ]


def _tail(successes: int, trials: int) -> float:
    """The probability of at least so many heads of a fair coin: McNemar's test, one-sided and exact."""
    return sum(math.comb(trials, count) for count in range(successes, trials + 1)) / 2**trials
