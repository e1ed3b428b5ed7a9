"""The README's picture: milliseconds of a training step against the number of tokens.

    python benchmarks/length_figure.py --out docs/figures/time-against-length.svg

Nothing is measured here. The figures are read from a table of docs/performance.md, that under "Multilinear
attention", whose rows all come from one run.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SECTION = "## Multilinear attention"
LINES = {
    "sdpa": "softmax (PyTorch's fused attention)",
    "primal (rank 30, eta 0.1)": "primal, with its objective",
    "multilinear (eta 0.1)": "multilinear, with its objective",
}


def steps(page: str) -> dict[str, list[tuple[int, float]]]:
    """(tokens, milliseconds of a training step) of every contender in the section's table."""
    section = page.split(SECTION + "\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, list[tuple[int, float]]] = {}
    row = r"^\| ([^|]+) \| (\d+) \| [\d.]+ \| ([\d.]+) \|"
    for contender, tokens, step in re.findall(row, section, re.MULTILINE):
        found.setdefault(contender, []).append((int(tokens), float(step)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out

    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kernel-attention"  # the same file from the same figures
    import matplotlib.pyplot as plt

    table = steps(PAGE.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for (contender, label), marker in zip(LINES.items(), "os^", strict=True):
        tokens, milliseconds = zip(*table[contender], strict=True)
        axes.plot(tokens, milliseconds, marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [tokens for tokens, _ in table["sdpa"]]
    axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    axes.set_xlabel("tokens in a sequence")
    axes.set_ylabel("ms of a training step")
    axes.set_title("One layer: width 64, 2 heads, 4 sequences, two CPU cores", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
