"""A matrix-free kernel SVD beside scikit-learn's randomised truncated SVD of the same matrix.

    OMP_NUM_THREADS=1 python benchmarks/kernel_svd.py --out benchmarks/results/kernel_svd.json

n x n kernel of two samples in 16 dimensions, float32, 32 components. Every contender runs in a fresh process,
in turns, and reports the time of its decomposition, the time of making the matrix (none for the matrix-free
form, which evaluates it at every visit inside its own time), its peak memory, all of it and above what the
process held with its imports, and the largest relative error of a singular value against ARPACK in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CONTENDERS = ("matrix_free", "randomized_svd", "TruncatedSVD")


def samples(options: argparse.Namespace, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Two samples of one mixture of Gaussians, the second moved a little."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((20, options.dimensions))
    pick = rng.integers(20, size=(2, options.size))
    noise = rng.standard_normal((2, options.size, options.dimensions)) * 0.5
    return tuple((centers[pick[i]] + noise[i] + 0.2 * i).astype(dtype) for i in range(2))


def make_matrix(options: argparse.Namespace, dtype: type) -> np.ndarray:
    """The kernel matrix without this library."""
    from sklearn.metrics.pairwise import rbf_kernel

    x, z = samples(options, dtype)
    if options.kernel == "rbf":
        return rbf_kernel(x, z)
    logits = x @ z.T / np.sqrt(options.dimensions, dtype=dtype)
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits


def contend(options: argparse.Namespace) -> dict:
    """One contender in this process."""
    import torch
    from sklearn.decomposition import TruncatedSVD
    from sklearn.utils.extmath import randomized_svd

    from kernel_attention.solvers import kernel_svd
    from kernel_attention_lab.peak_memory import peak_resident

    s, seed, name = options.components, options.seed, options.contender
    if name == "reference":
        from scipy.sparse.linalg import svds

        return {
            "values": sorted(svds(make_matrix(options, np.float64), s, return_singular_vectors=False))[::-1]
        }
    x, z = samples(options, np.float32)
    before = peak_resident() / 2**20
    start = time.perf_counter()
    if name == "matrix_free":
        generator = torch.Generator().manual_seed(seed)
        tensors = torch.from_numpy(x), torch.from_numpy(z)
        found = kernel_svd(
            *tensors, s, kernel=options.kernel, method="matrix_free", tol=options.tol, generator=generator
        )
        made, values, visits = start, found.values.tolist(), found.num_iter
    else:
        matrix, visits = make_matrix(options, np.float32), None
        made = time.perf_counter()
        if name == "randomized_svd":
            values = randomized_svd(matrix, s, random_state=seed)[1].tolist()
        else:
            values = TruncatedSVD(s, random_state=seed).fit(matrix).singular_values_.tolist()
    end = time.perf_counter()
    peak = peak_resident() / 2**20
    return {"make_s": made - start, "svd_s": end - made, "total_s": end - start, "peak_mb": peak,
            "own_mb": peak - before, "values": values, "visits": visits}  # fmt: skip


def run(options: argparse.Namespace, name: str, seed: int) -> dict:
    command = [sys.executable, __file__, "--contender", name, "--seed", str(seed)]
    for key in ("size", "dimensions", "components", "kernel", "tol"):
        command += [f"--{key}", str(getattr(options, key))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--dimensions", type=int, default=16)
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--kernel", choices=["rbf", "softmax"], default="rbf")
    parser.add_argument("--tol", type=float, default=1e-3, help="of the matrix-free form")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contend(options)))
        return
    exact = np.array(run(options, "reference", 0)["values"])
    rounds = [{name: run(options, name, seed) for name in CONTENDERS} for seed in range(options.rounds)]
    summary = {}
    for name in CONTENDERS:
        rows = [r[name] for r in rounds]
        summary[name] = {key: statistics.median(row[key] for row in rows)
                         for key in ("make_s", "svd_s", "total_s", "peak_mb", "own_mb")}  # fmt: skip
        errors = [float(np.max(np.abs(np.array(row["values"]) / exact - 1))) for row in rows]
        summary[name] |= {"relative_error": max(errors), "visits": rows[0]["visits"]}
        ours = [r["matrix_free"]["total_s"] for r in rounds]
        for against in ("svd_s", "total_s"):
            ratios = [own / row[against] for own, row in zip(ours, rows, strict=True)]
            summary[name][f"matrix_free_over_{against}"] = statistics.median(ratios)
        print(name, json.dumps({k: round(v, 6) if v is not None else None for k, v in summary[name].items()}))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
        }
        chosen = {
            k: getattr(options, k) for k in ("size", "dimensions", "components", "kernel", "tol", "rounds")
        }
        result = {"machine": machine, "options": chosen, "exact": exact.tolist(), "summary": summary}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
