"""The attacks by name, and which of them are run, on how many images, with which options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.robustness.black_box_attacks import SPSA, AutoAttack, Clean, Noise, Square
from kernel_attention_lab.robustness.gradient_attacks import (
    FGSM,
    PGD,
    CarliniWagner,
    SparseL1Descent,
)
from kernel_attention_lab.robustness.image_attack import ImageAttack, require_bounds
from kernel_attention_lab.robustness.protocols import find_protocol

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

PIXEL_STEP = 1 / 255
"""The eps of the table: one step of an 8-bit pixel."""

CURVE = tuple(steps / 255 for steps in range(1, 7))
"""The eps of the kernel-PCA paper's curves."""

CASES = {
    "clean": 512, "fgsm": 512, "pgd": 512, "sld": 512, "noise": 512,
    "spsa": 128, "cw": 128, "square": 128, "autoattack": 64,
}  # fmt: skip
"""Images of each attack: fewer where an image takes hundreds of passes."""

CURVE_CASES = 256
MASKING_CASES = 128

# The papers' numbers of steps take minutes an image. With two steps of its search, Carlini-Wagner must begin
# at a constant that succeeds.
_BRIEF: dict[str, dict[str, Any]] = {
    "spsa": {"steps": 10, "samples": 32},
    "cw": {"steps": 100, "search_steps": 2, "initial_const": 1.0, "learning_rate": 0.01},
    "square": {"queries": 500},
}
_QUICK: dict[str, dict[str, Any]] = {
    "spsa": {"steps": 3, "samples": 8},
    "cw": {"steps": 20, "search_steps": 1},
    "square": {"queries": 50},
}
_QUICK_CASES = 16
_QUICK_AUTOATTACK_CASES = 4
_RELEASED_NOISE = 0.3  # standard deviations of a channel


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


@dataclass(frozen=True, kw_only=True)
class AttackStep:
    """One row of a plan.

    Args:
        attack: one of ``ATTACKS``.
        protocol: one of ``PROTOCOLS``.
        eps: radius of the ball in the supremum norm; None where the attack takes none.
        cases: number of images, the first of ``attacked_cases``.
        options: of the attack; its defaults hold for the rest.
        seed: of the attack's random draws.
        transferred: whether the images are made against another model.

    Raises:
        InputError: for a name, an option or a number that is not accepted.
    """

    attack: str
    protocol: str = "pixel"
    eps: float | None = PIXEL_STEP
    cases: int = 512
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    transferred: bool = False

    def __post_init__(self) -> None:
        takes_eps = type(self.made()).takes_eps
        require_bounds(self.made(), find_protocol(self.protocol).bounds(self.made()))
        if takes_eps and not (self.eps is not None and 0 < self.eps < float("inf")):
            raise InputError(f"eps={self.eps!r} must be a positive number")
        if not takes_eps:
            object.__setattr__(self, "eps", None)
        if self.cases < 1:
            raise InputError(f"cases={self.cases} must be at least 1")
        if self.seed < 0:
            raise InputError(f"attack_seed={self.seed} must be at least 0")

    def made(self) -> ImageAttack:
        """The attack with its options."""
        return make_attack(self.attack, self.options)

    def record(self) -> dict[str, Any]:
        """The step with every option, in JSON's types; two steps with the same record are the same."""
        return dataclasses.asdict(self) | {"options": dataclasses.asdict(self.made())}


def table_step(attack: str, protocol: str = "pixel", eps: float | None = None) -> AttackStep:
    """An attack as in the robustness table, or under protocol ``paper`` as in the released kernel-PCA code.

    Args:
        attack: one of ``ATTACKS``.
        protocol: one of ``PROTOCOLS``.
        eps: radius; by default 1/255, and 0.3 for the noise of the released code.
    """
    if attack not in ATTACKS:
        raise unknown("attack", attack, ATTACKS)
    options = _BRIEF.get(attack, {})
    if protocol == "paper":
        # The released code gives eps to Carlini-Wagner as its confidence.
        confidence = PIXEL_STEP if eps is None else eps
        released: dict[str, dict[str, Any]]
        released = {"sld": {"projection": "radial"}, "cw": {"confidence": confidence}}
        options = released.get(attack, {})
        if attack == "noise" and eps is None:
            eps = _RELEASED_NOISE
    eps = PIXEL_STEP if eps is None else eps
    return AttackStep(attack=attack, protocol=protocol, eps=eps, cases=CASES[attack], options=options)


def _of_curve(protocol: str) -> tuple[AttackStep, ...]:
    steps = (table_step(attack, protocol, eps) for attack in ("fgsm", "pgd") for eps in CURVE)
    return tuple(dataclasses.replace(step, cases=CURVE_CASES) for step in steps)


_MASKING_OPTIONS: tuple[dict[str, Any], ...] = (
    {"restarts": 5}, {"gradient": "straight_through"}, {"gradient": "smooth"},
)  # fmt: skip

PLANS: dict[str, tuple[AttackStep, ...]] = {
    "table": tuple(map(table_step, ("clean", "fgsm", "pgd", "sld", "noise", "square", "spsa", "cw"))),
    "autoattack": (table_step("autoattack"),),
    "curves": _of_curve("pixel"),
    "paper": _of_curve("paper"),
    "masking": tuple(
        AttackStep(attack="pgd", cases=MASKING_CASES, options=options) for options in _MASKING_OPTIONS
    ),
}
"""Steps by the name of a plan. The first images of all of them are the same."""


def choose_steps(
    *,
    plans: Sequence[str] = (),
    attacks: Sequence[str] = (),
    protocol: str | None = None,
    eps: Sequence[float] = (),
    cases: int | None = None,
    seed: int = 0,
    transfer: bool = False,
    quick: bool = False,
) -> list[AttackStep]:
    """The steps of plans, or of attacks by name, each once.

    Args:
        plans: names of ``PLANS``; by default ``table`` where no attacks are named.
        attacks: names of ``ATTACKS``, with the settings of the table.
        protocol: of ``attacks``; by default ``pixel``.
        eps: of ``attacks``, several for a curve.
        cases: number of images in every step.
        seed: of the attacks' random draws.
        transfer: whether to add FGSM and PGD against another model, at every ``eps`` and under ``protocol``.
        quick: a few images and steps, to see that everything runs.

    Raises:
        InputError: for names and numbers that are not accepted, and for options that do not go together.
    """
    if attacks and plans:
        raise InputError(f"give plans or attacks, not both (plans {list(plans)}, attacks {list(attacks)})")
    if not attacks and (eps or protocol):
        raise InputError("eps and protocol are for attacks by name; a plan has its own")
    for name in plans:
        if name not in PLANS:
            raise unknown("plan", name, PLANS)
    if attacks:
        radii = eps or (None,)
        steps = [table_step(attack, protocol or "pixel", radius) for attack in attacks for radius in radii]
    else:
        steps = [step for name in plans or ("table",) for step in PLANS[name]]
    if transfer:
        steps += _transferred(eps or (PIXEL_STEP,), protocol or "pixel")
    if quick:
        steps = [_quick(step) for step in steps]
    changes: dict[str, Any] = {"seed": seed} | ({} if cases is None else {"cases": cases})
    return _once(dataclasses.replace(step, **changes) for step in steps)


def read_eps(text: str) -> float:
    """A radius given as ``1/255`` or ``0.004``; InputError where it is neither."""
    try:
        value = float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError, OverflowError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"--eps {text!r} must be a positive number, such as 1/255")
    return value


def eps_text(eps: float | None) -> str:
    """A radius in words: as a multiple of 1/255 where it is one."""
    if eps is None:
        return ""
    steps = eps * 255
    return f"{round(steps)}/255" if abs(steps - round(steps)) < 1e-6 and round(steps) else f"{eps:g}"


def _transferred(radii: Iterable[float], protocol: str) -> list[AttackStep]:
    return [
        AttackStep(attack=attack, protocol=protocol, eps=eps, cases=MASKING_CASES, transferred=True)
        for attack in ("fgsm", "pgd")
        for eps in radii
    ]


def _quick(step: AttackStep) -> AttackStep:
    cases = _QUICK_AUTOATTACK_CASES if step.attack == "autoattack" else _QUICK_CASES
    options = {**step.options, **_QUICK.get(step.attack, {})}
    return dataclasses.replace(step, cases=min(step.cases, cases), options=options)


def _once(steps: Iterable[AttackStep]) -> list[AttackStep]:
    found: list[AttackStep] = []
    for step in steps:
        if all(step.record() != other.record() for other in found):
            found.append(step)
    return found
