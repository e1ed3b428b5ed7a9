"""Primal-Attention's Triton kernels against the formulas, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported, so the tests cannot set it for themselves.

    python triton_worker.py DEVICE

Prints a line of JSON, {case: {quantity: [error of the kernels, error of the formulas]}}, relative to
float64.
"""

import itertools
import json
import os
import sys

import torch
from triton_outcomes import relative_errors

import kernel_attention as ka
from kernel_attention.mechanisms.primal.engines import triton_kernels as primal_triton

LENGTH, BATCH, HEADS, HEAD_DIM = 41, 3, 2, 5
OPTIONS = {
    "default": {},
    "data_independent": {"data_dependent": False},
    "identity": {"feature_map": "identity"},
    "no_bias": {"bias": False},
    "no_objective": {"eta": 0.0},
}
HALF_PRECISION = ("default", "data_independent")  # in the interpreter


def run(layer, x, mask, *, is_causal):
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x, attention_mask=mask, is_causal=is_causal)[mask].double()
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.device)
    ((y * probe).sum() + ka.auxiliary_loss(layer)).backward()
    result = {"y": y, "x": x.grad[mask]} | {name: p.grad for name, p in layer.named_parameters()}
    if layer.objective is not None:
        result["J"] = layer.objective
    return {name: value.detach().double() for name, value in result.items()}


def main(device):
    # Small steps, so that a sequence takes several programs of several blocks, the last of them partial.
    primal_triton._TOKENS = 32
    for kernel in (primal_triton._map_kernel, primal_triton._pull_kernel):
        kernel.configs = [primal_triton.triton.Config({"BN": 16, "BD": 16})]
    precisions = [torch.float32, torch.float16, torch.bfloat16]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        precisions.pop()  # the interpreter's products take the bits of bfloat16 for integers (triton 3.9)
    found = {}
    for name, dtype, masked in itertools.product(OPTIONS, precisions, (False, True)):
        if interpreted and dtype == torch.float16 and name not in HALF_PRECISION:
            continue  # a case takes seconds
        torch.manual_seed(0)
        layer = ka.PrimalAttention(
            HEADS * HEAD_DIM, HEADS, **{"rank": 3, "rank_multiplier": 3, "eta": 0.3} | OPTIONS[name]
        ).to(device)
        x = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, device=device)
        mask = torch.ones(BATCH, LENGTH, dtype=torch.bool, device=device)
        if masked:
            mask[0, 17:], mask[1, ::3], mask[2, 1:] = False, False, False
        is_causal = not layer.data_dependent and not masked
        case = f"{name}-{str(dtype).removeprefix('torch.')}-{'masked' if masked else 'whole'}"
        found[case] = relative_errors(
            layer,
            dtype,
            lambda layer, dtype, x=x, mask=mask, is_causal=is_causal: run(
                layer, x.to(dtype), mask, is_causal=is_causal
            ),
            lambda layer, impl: setattr(layer, "impl", impl),
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
