"""Measure every table of docs/performance.md again: ``make performance``.

    python benchmarks/performance.py                # everything, one after the other; 90 minutes
    python benchmarks/performance.py primal rpc     # some of it
    python benchmarks/performance.py primal rpc --machine epyc    # beside the records of another machine
    make results                                    # write the tables

Every suite runs in a process of its own and leaves one record in results/benchmarks, with the processor, the
load and the revision of the code. Nothing else should run on the machine. A record of uncommitted code is
refused: its revision would name other code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from kernel_attention.atomic import write_text_atomically
from kernel_attention_lab.benchmarking.comparisons import ROW_SUITES
from kernel_attention_lab.provenance import code_revision

ROOT = Path(__file__).parents[1]
SUITES = (
    "all", "short", "primal", "multilinear", "support-vector", "primal-dual", "rpc", "series", "lra",
    "language", "vision", "timm", "rpc-vision", "roofline", "million", "causal", *ROW_SUITES,
)  # fmt: skip
_TIMM = ["--plugin", "timm_beside_cpu_torch"]
OPTIONS = {"primal-dual": ["--length", "4096"], "vision": _TIMM, "timm": _TIMM}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*SUITES, []], metavar="NAME",
                        help=f"one of {', '.join(SUITES)}; default: all")  # fmt: skip
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "performance", help="folder of the runs")
    parser.add_argument("--machine", default="", help="a second machine's name, which its records end in")
    options = parser.parse_args()
    if code_revision().get("revision", "").endswith("+"):
        raise SystemExit(
            "the checkout has uncommitted changes; commit them, so that the records name the code"
        )
    for name in options.names or SUITES:
        started, folder = time.monotonic(), options.runs / name
        command = [sys.executable, "-m", "kernel_attention_lab", "bench", "--suite", name]
        command += ["--output", str(folder), *OPTIONS.get(name, [])]
        places = [str(ROOT / "tests" / "hosts"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
        environment |= {"OMP_NUM_THREADS": "1"} if name in ROW_SUITES else {}
        subprocess.run(command, check=True, env=environment)
        record = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
        for cell in record.get("cells", ()):
            del cell["orders"]
        path = ROOT / "results" / "benchmarks" / f"{'_'.join(filter(None, (name, options.machine)))}.json"
        write_text_atomically(path, json.dumps(record, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
