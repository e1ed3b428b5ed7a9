"""RPC's operator over Triton kernels: ``opcheck``, and a compiled training step, in a process of its own.

    TRITON_INTERPRET=1 python triton_operator_worker.py DEVICE

Triton reads TRITON_INTERPRET when it is imported, so the tests cannot set it for themselves.
"""

import sys

import torch
from triton_outcomes import check_compiled, padding

import kernel_attention as ka
from kernel_attention.mechanisms.kernel_pca.engines import gpu as op
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings

BATCH, HEADS, LENGTH, SIZE = 3, 2, 11, 5
# Queries of their own, padding, causal, steps.
CASES = ((0, 0, False, 1), (1, 1, False, 3), (0, 1, True, 3), (1, 0, True, 2))


def main(device):
    for separate, masked, is_causal, iterations in CASES:
        torch.manual_seed(0)
        mask = padding(BATCH, LENGTH, device) if masked else None
        q, k, v, grad = (torch.randn(BATCH, HEADS, LENGTH, SIZE, device=device) for _ in range(4))
        settings = PursuitSettings(iterations, 0.3, "paper", mask, is_causal)
        leaves = [x.requires_grad_() for x in (q, k, v, settings.threshold(k).detach())]
        leaves[0] = leaves[0] if separate else None
        inputs = *leaves, mask, iterations, is_causal
        torch.library.opcheck(op._pursuit, inputs)
        kept = [x.detach() for x in op._pursuit(*inputs)]
        torch.library.opcheck(
            op._pursuit_backward, (grad.transpose(1, 2), *leaves, mask, *kept, is_causal),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
        layer = ka.create_attention(
            "rpc", HEADS * SIZE, HEADS, iterations=iterations, symmetric=not separate, impl="triton"
        ).to(device)
        check_compiled(layer, grad.transpose(1, 2).flatten(2), mask, is_causal=is_causal)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
