"""The work of the fused form on a token, counted by hand: counters of operations do not see it.

Legend: d model width, h heads, p = d / h head width.
"""

from __future__ import annotations


def primal_operations(
    embed_dim: int, num_heads: int, *, objective: bool, training: bool, kernels: bool = False
) -> int:
    """Operations of the fused non-causal primal layer per token.

    z = [W_q; W_k] x costs 4 d^2. Up to two heads the output map is folded into the heads' (2d -> d, 4 d^2).
    With more heads, and in the Triton kernels (``kernels``), a head maps 2p -> p and the output map follows:
    4 d p + 2 d^2. The Gram matrices of the objective cost 4 d p. The backward pass computes z again (4 d^2).
    It takes the gradients of maps and z (twice the map's cost), of x and of W (twice 4 d^2), and of the
    objective (4 d p).
    """
    head_dim = embed_dim // num_heads
    project = 4 * embed_dim**2
    mapped, out = (
        (4 * embed_dim**2, 0)
        if num_heads <= 2 and not kernels
        else (4 * embed_dim * head_dim, 2 * embed_dim**2)
    )
    gram = 4 * embed_dim * head_dim if objective else 0
    inference = project + mapped + out
    if not training:
        return inference
    return inference + gram + (3 * project + 2 * mapped + 2 * out + gram)


def primal_numbers(embed_dim: int, *, training: bool) -> int:
    """Numbers a token must move at least: x in, y out; backward x and dy in, dx out. z stays in the cache."""
    return embed_dim * (5 if training else 2)
