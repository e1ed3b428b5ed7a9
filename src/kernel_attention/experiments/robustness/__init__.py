"""Attacks on the inputs of a model."""

from kernel_attention.experiments.robustness.attacks import ATTACKS, make_attack
from kernel_attention.experiments.robustness.black_box_attacks import SPSA, AutoAttack, Noise, Square
from kernel_attention.experiments.robustness.gradient_attacks import (
    FGSM,
    PGD,
    CarliniWagner,
    SparseL1Descent,
)
from kernel_attention.experiments.robustness.image_attack import Attacked, ImageAttack, attack_images
from kernel_attention.experiments.robustness.protocols import (
    PROTOCOLS,
    AttackProtocol,
    NormalizedInputs,
    PaperProtocol,
    PixelProtocol,
    find_protocol,
)
from kernel_attention.experiments.robustness.surrogate_gradients import SurrogateClamp
from kernel_attention.experiments.robustness.word_swap import GENERIC_WORD, swap_words

__all__ = [
    "ATTACKS",
    "FGSM",
    "GENERIC_WORD",
    "PGD",
    "PROTOCOLS",
    "SPSA",
    "AttackProtocol",
    "Attacked",
    "AutoAttack",
    "CarliniWagner",
    "ImageAttack",
    "Noise",
    "NormalizedInputs",
    "PaperProtocol",
    "PixelProtocol",
    "SparseL1Descent",
    "Square",
    "SurrogateClamp",
    "attack_images",
    "find_protocol",
    "make_attack",
    "swap_words",
]
