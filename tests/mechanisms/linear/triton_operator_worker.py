"""Linear attention's operator over Triton kernels: ``opcheck``, and a compiled training step.

    TRITON_INTERPRET=1 python triton_operator_worker.py DEVICE

It is a process of its own: Triton reads TRITON_INTERPRET when it is imported, so the tests cannot set it for
themselves.
"""

import sys

import torch
from triton_outcomes import check_compiled, padding

import kernel_attention as ka
from kernel_attention.mechanisms.linear import triton_operators as op

BATCH, HEADS, LENGTH, SIZE = 3, 2, 11, 5


def main(device):
    for with_totals in (False, True):
        torch.manual_seed(0)
        phi_q, phi_k = (torch.rand(BATCH, HEADS, LENGTH, SIZE + 2, device=device) for _ in range(2))
        v = torch.randn(BATCH, HEADS, LENGTH, SIZE, device=device)
        inputs = *(x.requires_grad_() for x in (phi_q, phi_k, v)), with_totals
        torch.library.opcheck(op._sums, inputs)
        out, totals = (x.detach() for x in op._sums(*inputs))
        for needed in ((True, True, True), (True, False, True), (False, True, False)):
            torch.library.opcheck(
                op._sums_backward,
                (torch.randn_like(out), totals if with_totals else None, phi_q, phi_k, v, list(needed)),
                test_utils=("test_schema", "test_faketensor"),
            )
    for masked, feature_map in ((False, "elu"), (True, "cosine")):
        layer = ka.create_attention("linear", HEADS * SIZE, HEADS, feature_map=feature_map, impl="triton").to(
            device
        )
        mask = padding(BATCH, LENGTH, device) if masked else None
        check_compiled(layer, torch.randn(BATCH, LENGTH, HEADS * SIZE, device=device), mask, is_causal=True)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
