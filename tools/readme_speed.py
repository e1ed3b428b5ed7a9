"""What the README says of speed, from the record of ``kernel-attention bench --suite primal``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from performance_tables import measured, number, read
from processor_tables import SECOND

PAGE = Path("README.md")
LAYER = "primal (rank 30, eta 0.1)"
NATIVE = "primal (rank 30, eta 0.1, impl native)"


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the README's region, which stays as it is without a record, and no figures."""
    record, second = read(root, "primal"), read(root, f"primal_{SECOND}")
    if record is None:
        return {}, {}
    return {"speed": ["", said(record) + (also_said(second) if second else ""), ""]}, {}


def said(record: dict[str, Any]) -> str:
    """How many times as fast a training step is as softmax's at every length, and its share of the memory."""
    faster = times_as_fast(record, LAYER)
    parts = []
    for factor, cell in zip(faster, record["cells"], strict=True):
        rows = measured(cell)
        share = rows[LAYER]["memory"]["step"] / rows["sdpa"]["memory"]["step"]
        parts.append(f"{factor} times at {cell['setting']['length']:,} tokens, in {share:.2f} of the memory")
    where = f"two cores of an {record['machine']['processor']}"
    return (
        "A training step of one Primal-Attention layer, its objective included, runs faster than one of "
        f"PyTorch's fused softmax attention: {'; '.join(parts)}. In C++, once "
        "`python -m kernel_attention.native build` ran, it is "
        f"{' and '.join(times_as_fast(record, NATIVE))} times as fast "
        f"([measured](docs/performance.md#primal-attention) on {where})."
    )


def also_said(record: dict[str, Any]) -> str:
    """The same factors on the second machine, in one sentence."""
    own, native = (" and ".join(times_as_fast(record, layer)) for layer in (LAYER, NATIVE))
    where = f"[On an {record['machine']['processor']}](docs/performance.md#on-another-make-of-processor)"
    return f" {where} it is {own} times as fast, and {native} times in C++."


def times_as_fast(record: dict[str, Any], layer: str) -> list[str]:
    """Softmax's time of a training step over the layer's, at every length."""
    return [number(1 / measured(cell)[layer]["time"]["step"]["ratio_median"]) for cell in record["cells"]]
