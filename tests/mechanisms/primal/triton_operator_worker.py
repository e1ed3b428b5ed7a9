"""The operator over Triton kernels: ``opcheck``, and a compiled training step, in a process of its own.

    TRITON_INTERPRET=1 python triton_operator_worker.py DEVICE

Triton reads TRITON_INTERPRET when it is imported, so the tests cannot set it for themselves.
"""

import sys

import torch
from triton_outcomes import check_compiled

import kernel_attention as ka
from kernel_attention.mechanisms.primal.engines import map_operator as op


def main(device):
    torch.manual_seed(0)
    heads, size, width = 2, 5, 10
    mask = torch.rand(3, 11, device=device) < 0.7
    shapes = (
        (3, 11, width),
        (2 * heads * size, width),
        (2 * heads * size,),
        (3, heads, 2 * size, size),
        (width,),
    )
    x, weight, bias, maps, constant = (torch.randn(shape, device=device) for shape in shapes)
    options = mask, heads, True
    torch.library.opcheck(op._map, (x, weight, bias, maps, constant, *options, True, "triton"))
    y, gram = op._map(x, weight, bias, maps, constant, *options, True, "triton")
    torch.library.opcheck(
        op._map_backward, (x, weight, bias, maps, gram, torch.randn_like(y), *options, "triton"),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    layer = ka.PrimalAttention(width, heads, rank=3, rank_multiplier=2, eta=0.3, impl="triton").to(device)
    check_compiled(layer, x, mask)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
