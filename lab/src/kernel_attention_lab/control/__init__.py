"""Policies in their environments: roll-outs, normalised scores, pictures of an episode."""

from kernel_attention_lab.control.environments import check_spaces, make_environment
from kernel_attention_lab.control.pictures import film, find_renderer, require_pictures, write_gif
from kernel_attention_lab.control.roll_outs import (
    RollOuts,
    normalized_score,
    random_roll_outs,
    roll_out,
)

__all__ = [
    "RollOuts",
    "check_spaces",
    "film",
    "find_renderer",
    "make_environment",
    "normalized_score",
    "random_roll_outs",
    "require_pictures",
    "roll_out",
    "write_gif",
]
