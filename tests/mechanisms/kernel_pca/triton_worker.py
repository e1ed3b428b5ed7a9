"""RPC-Attention's Triton kernels against the formulas, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported, so the tests cannot set it for themselves.

    python triton_worker.py DEVICE

Prints a line of JSON, {case: {quantity: [error of the kernels, error of the formulas]}}, relative to
float64.
"""

import json
import sys

import torch
from triton_outcomes import outputs_and_gradients, padding, relative_errors

import kernel_attention as ka
from kernel_attention.mechanisms.kernel_pca.engines import triton_kernels as pursuit_triton

BATCH, HEADS = 2, 2
# With m near 0.3 the threshold lambda h / (4 m) clips some entries of the keys and not others. The gradient
# jumps where an entry crosses it. So that takes few tokens and float32; the rest is compared where nothing is
# clipped.
SOME, NONE = {"lam": 0.2, "iterations": 3}, {"lam": 1e4, "iterations": 3}
SEPARATE = {"symmetric": False}
# Options, head width, precision, padding, causal.
CASES = [
    *((SOME | form, 5, "float32", masked, is_causal)  # every two of the three together
      for form, masked, is_causal in
      (({}, False, False), ({}, True, True), (SEPARATE, False, True), (SEPARATE, True, False))),
    (SOME | {"iterations": 1}, 5, "float32", True, False),
    ({"lam": 0.3, "convention": "paper", "iterations": 2}, 5, "float32", False, True),
    (SOME | {"iterations": 4}, 24, "float32", False, False),
    (NONE, 5, "float16", True, True),
    (NONE | SEPARATE, 5, "float16", False, False),
]  # fmt: skip
CONFIGS = {
    kernel: list(kernel.configs) for kernel in (pursuit_triton._step_kernel, pursuit_triton._pull_kernel)
}
ON_GPU = [
    *((SOME | form, 5, "float32", masked, is_causal)
      for form, masked, is_causal in
      (({}, False, True), ({}, True, False), (SEPARATE, False, False), (SEPARATE, True, True))),
    *((NONE, width, "float32", False, False) for width in (32, 64, 128)),
    *((NONE | form, width, dtype, masked, is_causal)
      for form, masked, is_causal in (({}, False, False), (SEPARATE, True, True))
      for width in (64, 128) for dtype in ("float16", "bfloat16")),
    (NONE | {"iterations": 2}, 64, "bfloat16", True, True),
]  # fmt: skip


def run(layer, x, mask, *, is_causal, twice):
    result = outputs_and_gradients(layer, x, mask, is_causal=is_causal, twice=twice)
    with torch.no_grad():
        again = layer(x, attention_mask=mask, is_causal=is_causal)
    return result | {"inference": (again if mask is None else again[mask]).double()}


def errors(options, width, precision, masked, is_causal, device, length):
    torch.manual_seed(0)
    layer = ka.create_attention("rpc", HEADS * width, HEADS, **options).to(device)
    x = torch.randn(BATCH, length, HEADS * width, device=device)
    mask = padding(BATCH, length, device) if masked else None
    twice = "convention" in options
    return relative_errors(
        layer,
        getattr(torch, precision),
        lambda layer, dtype: run(layer, x.to(dtype), mask, is_causal=is_causal, twice=twice),
        lambda layer, impl: setattr(layer, "impl", impl),
    )


def main(device):
    is_gpu = device == "cuda"
    if not is_gpu:
        # Small and uneven blocks: several of them, the last partial, either side longer.
        pursuit_triton._step_kernel.configs[0].kwargs.update(BM=16, BN=32)
        pursuit_triton._pull_kernel.configs[0].kwargs.update(BM=32, BN=16)
    found = {}
    for options, width, precision, *rest in [*CASES, *(ON_GPU if is_gpu else ())]:
        if is_gpu:  # what is compiled and timed for every case would take minutes
            for kernel, configs in CONFIGS.items():
                fits = pursuit_triton._fitting
                dtype = getattr(torch, precision)
                values = {"values": torch.empty(0, dtype=dtype)}
                kernel.configs = fits(configs, values, PRECISION="ieee", PP=width)[:1]
        masked, is_causal = rest
        length = (130 if options["lam"] < 1 else 261) if is_gpu else 34
        case = ", ".join(f"{name}={value}" for name, value in options.items())
        case += f", width {width}, masked {masked}, causal {is_causal}-{precision}-"
        found[case] = errors(options, width, precision, *rest, device, length)
    if is_gpu:
        for kernel, configs in CONFIGS.items():
            kernel.configs = configs
        found["tuned-bfloat16-"] = errors(NONE, 64, "bfloat16", False, False, device, 517)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
