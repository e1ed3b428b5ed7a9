"""Attacks on the inputs of a model, corrupted inputs, and inputs of no known class."""

from kernel_attention_lab.robustness.attack_plan import (
    ATTACKS,
    PLANS,
    AttackStep,
    choose_steps,
    eps_text,
    make_attack,
    read_eps,
    table_step,
)
from kernel_attention_lab.robustness.black_box_attacks import SPSA, AutoAttack, Clean, Noise, Square
from kernel_attention_lab.robustness.calibration import (
    Reliability,
    calibration_figures,
    reliability,
    risk_coverage,
)
from kernel_attention_lab.robustness.corruption_error import (
    ALEXNET_ERRORS,
    corruption_accuracies,
    corruption_errors,
    mean_corruption_error,
)
from kernel_attention_lab.robustness.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    corrupt_image,
    corrupt_images,
    corrupted_images,
)
from kernel_attention_lab.robustness.gradient_attacks import (
    FGSM,
    PGD,
    CarliniWagner,
    SparseL1Descent,
    SurrogateClamp,
)
from kernel_attention_lab.robustness.image_attack import (
    Attacked,
    ImageAttack,
    attack_images,
    attacked_cases,
)
from kernel_attention_lab.robustness.masking import attack_title, masking_warnings
from kernel_attention_lab.robustness.measured_attack import measure_attack
from kernel_attention_lab.robustness.out_of_distribution import (
    detection_figures,
    levels_of,
    out_of_distribution_scores,
    precision_recall_area,
    score_levels,
)
from kernel_attention_lab.robustness.protocols import (
    PROTOCOLS,
    AttackProtocol,
    NormalizedInputs,
    PaperProtocol,
    PixelProtocol,
    find_protocol,
)
from kernel_attention_lab.robustness.uncertainty import (
    LabelledInputs,
    UncertainCases,
    answers_of,
    measure_uncertainty,
    sampled_probabilities,
    uncertainty_figures,
)
from kernel_attention_lab.robustness.word_swap import GENERIC_WORD, swap_words

__all__ = [
    "ALEXNET_ERRORS",
    "ATTACKS",
    "CORRUPTIONS",
    "FGSM",
    "GENERIC_WORD",
    "PGD",
    "PLANS",
    "PROTOCOLS",
    "SEVERITIES",
    "SPSA",
    "AttackProtocol",
    "AttackStep",
    "Attacked",
    "AutoAttack",
    "CarliniWagner",
    "Clean",
    "ImageAttack",
    "LabelledInputs",
    "Noise",
    "NormalizedInputs",
    "PaperProtocol",
    "PixelProtocol",
    "Reliability",
    "SparseL1Descent",
    "Square",
    "SurrogateClamp",
    "UncertainCases",
    "answers_of",
    "attack_images",
    "attack_title",
    "attacked_cases",
    "calibration_figures",
    "choose_steps",
    "corrupt_image",
    "corrupt_images",
    "corrupted_images",
    "corruption_accuracies",
    "corruption_errors",
    "detection_figures",
    "eps_text",
    "find_protocol",
    "levels_of",
    "make_attack",
    "masking_warnings",
    "mean_corruption_error",
    "measure_attack",
    "measure_uncertainty",
    "out_of_distribution_scores",
    "precision_recall_area",
    "read_eps",
    "reliability",
    "risk_coverage",
    "sampled_probabilities",
    "score_levels",
    "swap_words",
    "table_step",
    "uncertainty_figures",
]
