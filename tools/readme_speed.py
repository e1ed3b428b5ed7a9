"""What the README says of speed, from the record of ``kernel-attention bench --suite primal``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from performance_tables import measured, number, read

PAGE = Path("README.md")
LAYER = "primal (rank 30, eta 0.1)"
NATIVE = "primal (rank 30, eta 0.1, impl native)"


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the README's region, which stays as it is without a record, and no figures."""
    record = read(root, "primal")
    return ({"speed": ["", said(record), ""]} if record else {}), {}


def said(record: dict[str, Any]) -> str:
    """How many times as fast a training step is as softmax's at every length, and its share of the memory."""
    parts, native = [], []
    for cell in record["cells"]:
        rows = measured(cell)
        own, softmax = rows[LAYER], rows["sdpa"]
        share = own["memory"]["step"] / softmax["memory"]["step"]
        faster = number(1 / own["time"]["step"]["ratio_median"])
        parts.append(f"{faster} times at {cell['setting']['length']:,} tokens, in {share:.2f} of the memory")
        native.append(number(1 / rows[NATIVE]["time"]["step"]["ratio_median"]))
    where = f"two cores of an {record['machine']['processor']}"
    return (
        "A training step of one Primal-Attention layer, its objective included, runs faster than one of "
        f"PyTorch's fused softmax attention: {'; '.join(parts)}. In kernels that your C++ compiler makes "
        f'(`impl="native"`) it is {" and ".join(native)} times as fast '
        f"([measured](docs/performance.md#primal-attention) on {where})."
    )
