"""The Triton kernels of causal linear attention against the formulas, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported, so the tests cannot set it for themselves.

    python triton_worker.py DEVICE

Prints a line of JSON, {case: {quantity: [error of the kernels, error of the formulas]}}, relative to
float64.
"""

import json
import os
import sys

import torch
from triton_outcomes import outputs_and_gradients, padding, relative_errors

import kernel_attention as ka
from kernel_attention.mechanisms.linear import triton_kernels as linear_triton

BATCH, HEADS = 2, 2
# Options, head width, precision, padding.
CASES = [
    ({}, 5, "float32", False),
    ({"feature_map": "relu"}, 24, "float32", True),
    ({"feature_map": {"taylor": {"order": 2}}}, 4, "float32", False),  # 21 features
    ({"feature_map": "cosine"}, 5, "float32", True),
    ({}, 5, "float16", True),
    ({"feature_map": "cosine"}, 24, "float16", False),
]
ON_GPU = [
    *(({}, width, dtype, False) for width in (32, 64, 128) for dtype in ("float32", "float16", "bfloat16")),
    ({"feature_map": "cosine"}, 64, "bfloat16", True),
]


def errors(options, width, precision, masked, device, length):
    torch.manual_seed(0)
    layer = ka.create_attention("linear", HEADS * width, HEADS, **options).to(device)
    x = torch.randn(BATCH, length, HEADS * width, device=device)
    mask = padding(BATCH, length, device) if masked else None
    twice = options.get("feature_map") == "relu"
    return relative_errors(
        layer,
        getattr(torch, precision),
        lambda layer, dtype: outputs_and_gradients(layer, x.to(dtype), mask, is_causal=True, twice=twice),
        lambda layer, impl: setattr(layer.kernel, "impl", impl),
    )


def main(device):
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Several chunks of several blocks, and more chunks than are summed at a time; the last are partial.
        linear_triton._CHUNK, linear_triton._SCANNED, linear_triton._ENTRIES = 32, 2, 64
        for kernel in (linear_triton._states_kernel, linear_triton._apply_kernel):
            kernel.configs[0].kwargs.update(BT=16)
    found = {}
    kernels = (linear_triton._states_kernel, linear_triton._apply_kernel)
    tuned = list(kernels[0].configs)
    for options, width, precision, masked in [*CASES, *(ON_GPU if device == "cuda" else ())]:
        for kernel in kernels:  # what is compiled and timed for every case would take minutes
            is_last = device == "cuda" and options.get("feature_map") == "cosine" and width == 64
            kernel.configs = tuned if is_last else tuned[:1]
        case = f"{options}, width {width}, masked {masked}-{precision}-"
        length = 3000 if device == "cuda" else 70
        found[case] = errors(options, width, precision, masked, device, length)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
