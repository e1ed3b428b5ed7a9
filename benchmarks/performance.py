"""Measure every table of docs/performance.md again: ``make performance``.

    python benchmarks/performance.py                # everything, one after the other; 90 minutes
    python benchmarks/performance.py primal rpc     # some of it
    python benchmarks/performance.py primal rpc --machine epyc    # beside the records of another machine
    make results                                    # write the tables

Every measurement runs in a process of its own and leaves one record in results/benchmarks, with the
processor, the load and the revision of the code. Nothing else should run on the machine. A record of
uncommitted code is refused: its revision would name other code.
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
from kernel_attention_lab.provenance import code_revision

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "benchmarks"
SUITES = (
    "all", "short", "primal", "multilinear", "support-vector", "primal-dual", "rpc", "series", "lra",
    "language", "vision", "timm", "rpc-vision", "roofline", "million", "causal",
)  # fmt: skip
PLUGINS = dict.fromkeys(("vision", "timm"), "timm_beside_cpu_torch")
OPTIONS = {"primal-dual": ["--length", "4096"]}
SCRIPTS = {  # those of one thread, which measure its CPU time
    "decoding": ["decoding.py"],
    "decoding-small": [
        "decoding.py", "--embed-dim", "64", "--num-heads", "2", "--lengths", "1024", "8192", "65536",
        "--prefix-rounds", "1",
    ],
    "rollouts": ["rollouts.py"],
    "around": ["around_attention.py"],
    "primal-forms": ["primal_forms.py"],
    "precisions": ["precisions.py"],
    "compiled-forms": ["compiled_forms.py", "--length", "256", "1024", "4096", "--rounds", "9"],
    "native-forms": [
        "compiled_forms.py", "--layers", "primal, objective", "primal", "--eager", "--forms", "reference",
        "fused", "native", "--embed_dim", "64", "128", "256", "--num_heads", "4", "--length", "64", "256",
        "1024", "4096", "--rounds", "9", "--threads", "2",
    ],
    "compiled-forms-wide": [
        "compiled_forms.py", "--layers", "primal, objective", "--embed_dim", "128", "256",
        "--num_heads", "4", "--length", "1024", "4096", "--rounds", "9",
    ],
}  # fmt: skip


def measure_suite(name: str, folder: Path, record_path: Path) -> None:
    """A plan of ``kernel-attention bench``; its record without the orders of the rounds."""
    command = [sys.executable, "-m", "kernel_attention_lab", "bench", "--suite", name]
    command += ["--output", str(folder)]
    command += OPTIONS.get(name, [])
    if name in PLUGINS:
        command += ["--plugin", PLUGINS[name]]
    found = os.pathsep.join([str(ROOT / "tests" / "hosts"), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": found})
    record = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
    for cell in record["cells"]:
        del cell["orders"]
    write_text_atomically(record_path, json.dumps(record, indent=1) + "\n")


def measure_script(name: str, record_path: Path) -> None:
    """One of the scripts beside this one, which writes its own record."""
    script, *options = SCRIPTS[name]
    command = [sys.executable, str(Path(__file__).with_name(script)), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(record_path)], check=True, env=environment)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [*SUITES, *SCRIPTS]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME",
                        help=f"one of {', '.join(names)}; default: all")  # fmt: skip
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "performance", help="folder of the runs")
    parser.add_argument("--machine", default="", help="a second machine's name, which its records end in")
    options = parser.parse_args()
    if code_revision().get("revision", "").endswith("+"):
        raise SystemExit(
            "the checkout has uncommitted changes; commit them, so that the records name the code"
        )
    for name in options.names or names:
        started = time.monotonic()
        record_path = RECORDS / f"{'_'.join(filter(None, (name, options.machine)))}.json"
        if name in SUITES:
            measure_suite(name, options.runs / name, record_path)
        else:
            measure_script(name, record_path)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
