"""RPC-Attention's Triton kernels in a process of their own: Triton reads TRITON_INTERPRET at its import.

    python triton_worker.py kernels DEVICE CASES   # {case: {quantity: [error of kernels, of formulas]}}
    python triton_worker.py operator DEVICE CASES  # "equal": what compilers are told of the operator is true

Errors are relative to float64. A quantity counts as at least a tenth of the largest one: a gradient that is
zero in exact arithmetic would make any error infinite.
"""

import copy
import json
import sys

import torch

import kernel_attention as ka
from kernel_attention.mechanisms.kernel_pca import gpu as op
from kernel_attention.mechanisms.kernel_pca import triton_kernels as pursuit_triton
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings

BATCH, HEADS = 2, 2
# With m near 0.3 the threshold lambda h / (4 m) clips some entries of the keys and not others. The gradient
# jumps where an entry crosses it. So that takes few tokens and float32; the rest is compared where nothing is
# clipped.
SOME, NONE = {"lam": 0.2, "iterations": 2}, {"lam": 1e4, "iterations": 2}
SEPARATE = {"symmetric": False}
# Options, head width, precision, padding, causal.
CASES = [
    # The first three are the quick ones. Together they have every two of queries of their own, padding and
    # causal form.
    (SOME | SEPARATE | {"iterations": 3}, 5, "float32", True, False),
    (SOME | {"iterations": 1}, 24, "float32", True, True),
    (NONE | SEPARATE, 5, "float16", False, True),
    (SOME, 5, "float32", False, False),
    ({"lam": 0.3, "convention": "paper", "iterations": 2}, 5, "float32", False, True),
    (NONE, 5, "float16", True, True),
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


# Queries of their own, padding, causal, steps.
OPERATOR_CASES = ((0, 0, False, 1), (1, 1, False, 3), (0, 1, True, 3), (1, 0, True, 2))


def padding(batch, length, device):
    """A mask with the second half of the first sequence padded, and every third token of the second."""
    mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    mask[0, length // 2 :], mask[1, ::3] = False, False
    return mask


def run(layer, x, mask, *, is_causal, twice):
    """The outputs and the gradients at real tokens; ``twice``: the gradients of squared gradients."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x, attention_mask=mask, is_causal=is_causal)
    y = (y if mask is None else y[mask]).double()
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.device)
    if twice:  # the gradient of a gradient: the kernels give way to the formulas
        (first,) = torch.autograd.grad((y * probe).sum(), x, create_graph=True)
        y, probe = first.square().double(), torch.ones_like(first)
    (y * probe).sum().backward()
    grad = x.grad if mask is None else x.grad[mask]
    with torch.no_grad():
        again = layer(x, attention_mask=mask, is_causal=is_causal)
    found = {"y": y, "x": grad, "inference": again if mask is None else again[mask]}
    found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {name: value.detach().double() for name, value in found.items()}


def errors(options, width, precision, masked, is_causal, device, length):
    torch.manual_seed(0)
    layer = ka.create_attention("rpc", HEADS * width, HEADS, **options).to(device)
    x = torch.randn(BATCH, length, HEADS * width, device=device)
    mask = padding(BATCH, length, device) if masked else None

    def outcome(impl, dtype):
        copied = copy.deepcopy(layer).to(dtype).train()
        copied.impl = impl
        return run(copied, x.to(dtype), mask, is_causal=is_causal, twice="convention" in options)

    exact = outcome("reference", torch.float64)
    found = [outcome(impl, getattr(torch, precision)) for impl in ("triton", "reference")]
    sizes = {name: value.norm().item() for name, value in exact.items()}
    smallest = max(sizes.values()) / 10
    return {
        name: [(each[name] - value).norm().item() / max(sizes[name], smallest) for each in found]
        for name, value in exact.items()
    }


def kernels(device, cases):
    is_gpu = device == "cuda"
    if not is_gpu:
        # Small and uneven blocks: several of them, the last partial, either side longer.
        pursuit_triton._step_kernel.configs[0].kwargs.update(BM=16, BN=32)
        pursuit_triton._pull_kernel.configs[0].kwargs.update(BM=32, BN=16)
    found = {}
    for options, width, precision, *rest in [*CASES, *ON_GPU][:cases]:
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


def operator(device, _):
    for separate, masked, is_causal, iterations in OPERATOR_CASES:
        torch.manual_seed(0)
        batch, length, size = 3, 11, 5
        mask = padding(batch, length, device) if masked else None
        q, k, v, grad = (torch.randn(batch, HEADS, length, size, device=device) for _ in range(4))
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
            "rpc", HEADS * size, HEADS, iterations=iterations, symmetric=not separate, impl="triton"
        ).to(device)
        torch.compiler.reset()  # layers of one class share a limit of compilations
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        steps = []
        for call in (layer, compiled):
            layer.zero_grad(set_to_none=True)
            x = grad.transpose(1, 2).flatten(2).detach().requires_grad_()
            y = call(x, attention_mask=mask, is_causal=is_causal)
            y = y if mask is None else y[mask]
            y.sin().sum().backward()
            steps.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*steps)
    print(json.dumps("equal"))


if __name__ == "__main__":
    {"kernels": kernels, "operator": operator}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
