"""A matrix-free kernel SVD beside scikit-learn's randomised truncated SVD of the same matrix.

    OMP_NUM_THREADS=1 python benchmarks/kernel_svd.py --out FILE.json

n x n kernel of two samples in 16 dimensions, float32, 32 components. Every contender runs in a fresh process,
in turns, and reports the time of its decomposition, the time of making the matrix (none for the matrix-free
form, which evaluates it at every visit inside its own time), its peak memory, all of it and above what the
process held with its imports, and the largest relative error of a singular value against ARPACK in float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from processes import in_processes

from kernel_attention_lab.benchmarking.machine import write_rows

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


def contend(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """One contender in this process."""
    import torch
    from sklearn.decomposition import TruncatedSVD
    from sklearn.utils.extmath import randomized_svd

    from kernel_attention.solvers import kernel_svd
    from kernel_attention_lab.peak_memory import peak_resident

    s = options.components
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


def work(rank: int, world: int, options: argparse.Namespace, name: str, seed: int, results: Any) -> None:
    results.put(contend(options, name, seed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"size": 10_000, "dimensions": 16, "components": 32, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernel", choices=["rbf", "softmax"], default="rbf")
    parser.add_argument("--tol", type=float, default=1e-3, help="of the matrix-free form")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    (exact,) = in_processes(work, 1, options, "reference", 0)
    rounds = [
        {name: in_processes(work, 1, options, name, seed)[0] for name in CONTENDERS}
        for seed in range(options.rounds)
    ]
    rows = []
    for name in CONTENDERS:
        found = [each[name] for each in rounds]
        keys = ("make_s", "svd_s", "total_s", "peak_mb", "own_mb")
        row = {"contender": name} | {key: statistics.median(each[key] for each in found) for key in keys}
        errors = [np.max(np.abs(np.divide(each["values"], exact["values"]) - 1)) for each in found]
        row |= {"relative_error": float(max(errors)), "visits": found[0]["visits"]}
        for against in ("svd_s", "total_s"):
            ratios = [each["matrix_free"]["total_s"] / each[name][against] for each in rounds]
            row[f"matrix_free_over_{against}"] = statistics.median(ratios)
        rows.append(row)
        print(row, flush=True)
    if options.out:
        write_rows(
            options.out, rows, settings={key: value for key, value in vars(options).items() if key != "out"}
        )


if __name__ == "__main__":
    main()
