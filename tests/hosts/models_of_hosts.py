"""Small models of every host, and mechanism options that fit them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.mechanisms import Mechanism, list_attention
from kernel_attention.models import SequenceEncoder

# Different primes, so that a swapped axis cannot pass; the head width is one too.
BATCH, HEADS, LENGTH, HEAD_DIM, LAYERS = 5, 2, 11, 7, 3
EMBED_DIM = HEADS * HEAD_DIM
LENGTHS = (11, 7, 2, 1, 10)

_SMALL: dict[str, Any] = {"rank": 3, "rank_multiplier": 2, "eta": 0.1, "max_len": 13}


def small_options(mechanism: Mechanism) -> dict[str, Any]:
    return {key: value for key, value in _SMALL.items() if key in mechanism.options}


# conv2d needs a token grid, which a sequence does not have.
SEQUENCE_MECHANISMS = [mechanism for mechanism in list_attention() if mechanism.name != "conv2d"]


def real_tokens() -> Tensor:
    """(B, N) bool, True = real token; right padding."""
    return torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]


def torch_encoder(seed: int = 0, *, layers: int = LAYERS, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(seed)
    options = {"batch_first": True, "dropout": 0.0, **options}
    layer = nn.TransformerEncoderLayer(EMBED_DIM, HEADS, 2 * EMBED_DIM, **options)
    nested = options["batch_first"] and not options.get("norm_first") and options.get("bias", True)
    return scatter(nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested), seed)


def own_encoder(seed: int = 0) -> SequenceEncoder:
    torch.manual_seed(seed)
    sizes = {
        "embed_dim": EMBED_DIM,
        "num_heads": HEADS,
        "num_layers": LAYERS,
        "feedforward_dim": 2 * EMBED_DIM,
    }
    return scatter(SequenceEncoder(3, LENGTH, "softmax", **sizes), seed)


def scatter(model: Any, seed: int = 0) -> Any:
    """Every parameter moved off its initial value: zero biases would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def largest_difference(first: Tensor, second: Tensor, real: Tensor | None = None) -> float:
    difference = (first - second).abs()
    if real is not None:
        difference = difference[real]
    return difference.max().item()
