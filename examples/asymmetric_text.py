"""Which word follows which: an asymmetric kernel of text, in which symmetric methods lose the direction.

    OMP_NUM_THREADS=1 python examples/asymmetric_text.py IMDB_FOLDER --figure docs/figures/asymmetric-text.png

IMDB_FOLDER holds train.jsonl.gz and test.jsonl.gz, one review per line as {"text": ...} (Maas et al. 2011).
Two minutes on one core.

The kernel of two words is the association of "a b" in the training reviews,

    k(a, b) = max(0, log p(ab) / (p(a.) p(.b))),

a graph with directed edges. Its KSVD gives every word an e-score (what follows it) and an r-score (what comes
before it), and k^(a, b) = sum_l e_l(a) r_l(b) / sigma_l. Kernel PCA decomposes (K + K^T) / 2, with twice as
many components, so that both keep the same number of scores for a word.

Tested on pairs of adjacent words of the test reviews that no training review has in either order:

* direction: which of "a b" and "b a" was written (chance is 1/2);
* next word: whether b is among the 50 words of largest k^(a, .) that were never seen beside a.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from kernel_attention.solvers import KernelSVD

Pairs = np.ndarray  # (k, 2) indices of words


def reviews(path: Path) -> list[list[str]]:
    """The sentences of all reviews, as lists of words."""
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"].replace("<br />", " . ").lower()
            found += [re.findall(r"[a-z']+", sentence) for sentence in re.split(r"[.!?;:()\",]", text)]
    return found


def successions(sentences: list[list[str]], index: dict[str, int]) -> np.ndarray:
    """How often word a comes right before word b, (n, n)."""
    counts = np.zeros((len(index), len(index)))
    for words in sentences:
        known = [index.get(word, -1) for word in words]
        for a, b in pairwise(known):
            if a >= 0 and b >= 0:
                counts[a, b] += 1
    return counts


def association(counts: np.ndarray) -> np.ndarray:
    """max(0, log p(ab) / (p(a.) p(.b)))."""
    expected = np.outer(counts.sum(1), counts.sum(0)) / counts.sum()
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(counts / expected), 0.0)


def new_pairs(train: np.ndarray, test: np.ndarray) -> Pairs:
    """Pairs written in the test reviews in one order only, and in no training review in either."""
    return np.argwhere((test > 0) & (test.T == 0) & (train + train.T == 0))


def direction(scores: np.ndarray, pairs: Pairs) -> float:
    """Share of pairs whose written order has the larger score; a tie is half a success."""
    forward, backward = scores[pairs[:, 0], pairs[:, 1]], scores[pairs[:, 1], pairs[:, 0]]
    tie = np.abs(forward - backward) <= 1e-9 * np.abs(scores).max()
    return float(np.where(tie, 0.5, forward > backward).mean())


def next_word(scores: np.ndarray, pairs: Pairs, train: np.ndarray, among: int = 50) -> float:
    """Share of pairs whose second word is among the best of those never seen beside the first."""
    candidates = np.where(train + train.T > 0, -np.inf, scores)
    threshold = -np.partition(-candidates, among - 1, axis=1)[:, among - 1]
    return float((candidates[pairs[:, 0], pairs[:, 1]] >= threshold[pairs[:, 0]]).mean())


def measure(train: np.ndarray, pairs: Pairs, ranks: list[int]) -> dict[str, list[dict[str, float]]]:
    """Both tests at every rank."""
    kernel = association(train)
    symmetric = (kernel + kernel.T) / 2
    start = time.perf_counter()
    ksvd = KernelSVD(max(ranks), kernel="precomputed", svd_method="truncated", tol=1e-5, random_state=0).fit(
        kernel
    )
    seconds = time.perf_counter() - start
    print(f"KSVD of {kernel.shape}: {seconds:.1f} s, {ksvd.n_iter_} passes, J {ksvd.objective_:.1e}")
    values, vectors = np.linalg.eigh(symmetric)
    order = np.argsort(-np.abs(values))  # (K + K^T) / 2 is not positive: the largest of either sign
    found: dict[str, list[dict[str, float]]] = {"KSVD": [], "kernel PCA of (K + Kᵀ)/2": []}
    for s in ranks:
        e, r, sigma = ksvd.left_scores_[:, :s], ksvd.right_scores_[:, :s], ksvd.singular_values_[:s]
        kept = order[: 2 * s]
        projected = (vectors[:, kept] * values[kept]) @ vectors[:, kept].T
        models = {"KSVD": (e / sigma) @ r.T, "kernel PCA of (K + Kᵀ)/2": projected}
        for name, scores in models.items():
            row = {"direction": direction(scores, pairs), "next_word": next_word(scores, pairs, train)}
            found[name].append(row)
            print(f"s {s:4d}  {name:26s} direction {row['direction']:.3f}  next word {row['next_word']:.3f}")
    # Without a kernel: b is the second word if it ends pairs more often than it begins them.
    ends = np.outer(np.ones(len(train)), train.sum(0) / train.sum(1))
    frequent = np.outer(np.ones(len(train)), train.sum(0))
    row = {"direction": direction(ends, pairs), "next_word": next_word(frequent, pairs, train)}
    print(f"frequencies: direction {row['direction']:.3f}  next word {row['next_word']:.3f}")
    found["frequencies alone"] = [row] * len(ranks)
    return found


def draw(found: dict[str, list[dict[str, float]]], ranks: list[int], path: Path) -> None:
    """Both tests over s."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    titles = {"direction": "which word came first", "next_word": "next word among the best 50"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for (name, rows), style in zip(found.items(), ("o-", "s-", "--"), strict=True):
            axis.plot(ranks, [100 * row[key] for row in rows], style, label=name, markersize=4)
        axis.set(
            xscale="log",
            xlabel="components s of KSVD (2s of kernel PCA)",
            ylabel="unseen pairs, %",
            title=title,
        )
        axis.set_xticks(ranks, [str(s) for s in ranks])
        axis.minorticks_off()
    axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--words", type=int, default=3000, help="most frequent words, the points")
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 10, 20, 50, 100, 200])
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    train, test = (reviews(options.folder / f"{split}.jsonl.gz") for split in ("train", "test"))
    frequent = Counter(word for sentence in train for word in sentence).most_common(options.words)
    index = {word: i for i, (word, _) in enumerate(frequent)}
    counts = successions(train, index)
    pairs = new_pairs(counts, successions(test, index))
    print(
        f"{len(index)} words, {np.count_nonzero(counts)} pairs in training, {len(pairs)} new ones in the test"
    )
    found = measure(counts, pairs, options.ranks)
    if options.figure:
        draw(found, options.ranks, options.figure)


if __name__ == "__main__":
    main()
