"""RPC-Attention's time over n times symmetric attention's, and its peak memory over symmetric attention's.

    kernel-attention bench --suite gpu --output runs/gpu
    python benchmarks/rpc_ratios.py runs/gpu/benchmark.json

Reads a record of ``kernel-attention bench`` with the contender "symmetric". A ratio of times is the median of
the ratios within each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

HEAD = ("contender", "dtype", "N", "pass", "time / (n symmetric)", "peak / symmetric")


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    found = []
    for cell in record["cells"]:
        measured = {row["contender"]: row for row in cell["rows"] if "time" in row}
        symmetric = measured.get("symmetric")
        for name, row in measured.items():
            if symmetric is None or not name.startswith("rpc"):
                continue
            for kind, figures in row["time"].items():
                found.append(
                    (
                        name,
                        str(cell["setting"]["dtype"]),
                        str(cell["setting"]["length"]),
                        kind,
                        f"{time_ratio(name, figures, symmetric['time'][kind]):.3f}",
                        peak_ratio(row, symmetric, kind),
                    )
                )
    return found


def time_ratio(name: str, own: dict[str, Any], symmetric: dict[str, Any]) -> float:
    steps = int(name.split("iterations ")[1].split(",")[0].rstrip(")"))
    rounds = zip(own["seconds"], symmetric["seconds"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in rounds) / steps


def peak_ratio(row: dict[str, Any], symmetric: dict[str, Any], kind: str) -> str:
    own, theirs = (entry.get("memory", {}).get(kind) for entry in (row, symmetric))
    return f"{own / theirs:.2f}" if own and theirs else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("record", type=Path, help="benchmark.json of `kernel-attention bench`")
    record = json.loads(parser.parse_args().record.read_text())
    for row in (HEAD, ["---"] * len(HEAD), *rows(record)):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
