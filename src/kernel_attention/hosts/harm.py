"""The harm that a replacement does to a trained model, before anything is trained.

The new layer takes the old one's projections over. Where its outputs are then of another size, or point
elsewhere, every later layer reads what it has never seen. Softmax attention and the new layer read the same
random inputs, and their outputs are compared. Trained inputs differ from random ones, but the mechanisms that
destroy a trained encoder (all-MiniLM-L6-v2) are those above the threshold, and no others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.hosts.projections import carry
from kernel_attention.hosts.reading import HostDescription
from kernel_attention.mechanisms import create_attention

HARM = 4 / 3
"""Larger errors destroy a trained model: MiniLM's layers then have 1.4 to 169, and otherwise at most 1.2."""

_CASES, _LENGTH = 2, 32


def is_trained(model: nn.Module) -> bool:
    """True where the weights of a normalisation are not all alike, as they are in a new model."""
    norms = (part for part in model.modules() if "Norm" in type(part).__name__)
    weights = (getattr(part, "weight", None) for part in norms)
    return any(
        isinstance(weight, Tensor)
        and weight.dim() == 1
        and not weight.is_meta
        and bool((weight != weight[0]).any())
        for weight in weights
    )


@torch.no_grad()
def random_error(layer: AttentionLayer, host: HostDescription, is_interface: bool) -> float:
    """The share of the variance of softmax attention's outputs that a layer misses; 1 = the best constant.

    Args:
        layer: with the host's weights.
        host: its description.
        is_interface: whether the layer is given queries, keys and values.

    Returns:
        The share, on random inputs. 0 where the layer cannot read them.
    """
    device, dtype = host.like.device, host.like.dtype
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    was_training = layer.training
    layer.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if is_interface:
                q, k, v = (draw(_CASES, host.num_heads, _LENGTH, layer.head_dim) for _ in range(3))
                y = layer.attend_heads(q, k, v)
                wanted = nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                softmax = create_attention(
                    "softmax", host.embed_dim, host.num_heads, bias=host.bias, device=device, dtype=dtype
                )
                carry(softmax, host.sources)
                x = draw(_CASES, _LENGTH, host.embed_dim)
                y, wanted = layer(x), softmax.eval()(x)
    except InputError:  # such as a grid of other sizes
        return 0.0
    finally:
        layer.train(was_training)
    y, wanted = (z.double().flatten(0, -2) for z in (y, wanted))
    return float((y - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())
