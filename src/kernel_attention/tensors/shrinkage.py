"""Proximal operators: the small non-linear steps of sparse and low-rank decompositions."""

from torch import Tensor


def shrink(x: Tensor, threshold: Tensor) -> Tensor:
    """Soft thresholding sgn(x) max(|x| - threshold, 0), the proximal operator of the 1-norm.

    Args:
        x: any shape.
        threshold: at least 0, broadcast against x; a gradient flows to it wherever the result is not zero.

    Returns:
        The shape of x; exactly zero where |x| <= threshold.
    """
    return x - x.clamp(-threshold, threshold)
