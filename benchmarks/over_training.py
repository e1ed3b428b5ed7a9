"""The papers' figures by layer over training, one small record for each seed of a run.

    kernel-attention train images/cifar10_deep --data_root DATA --output RUN --threads 1
    kernel-attention analyze RUN --over_training
    python benchmarks/over_training.py RUN --label softmax --output results/vision/cifar10_deep_course

`make results` makes the table and the figure of docs/diagnostics.md from these records.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kernel_attention.files import write_text_atomically
from kernel_attention_lab.reporting.diagnostic_plots import COURSES
from kernel_attention_lab.run_folder import RunFolder


def course_record(course: dict[str, Any]) -> dict[str, Any]:
    """The epochs of the kept weights, and every figure: a row for each of these epochs, a number a layer."""
    entries = course["epochs"]
    figures = {}
    for key in COURSES:
        rows = [[layer["summary"].get(key) for layer in entry["layers"]] for entry in entries]
        if any(value is not None for value in rows[-1]):
            figures[key] = [[None if v is None else float(f"{v:.6g}") for v in row] for row in rows]
    return {"cases": course["note"], "epochs": [entry["epoch"] for entry in entries], "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--label", required=True, help="name of the records")
    parser.add_argument("--output", type=Path, required=True, help="folder to write them into")
    options = parser.parse_args()
    folder = RunFolder(options.run)
    courses = {seed: folder.diagnostics_over_training(seed) for seed in folder.seeds()}
    if not any(courses.values()):
        raise SystemExit(f"{folder.path}: has no course; run kernel-attention analyze RUN --over_training")
    options.output.mkdir(parents=True, exist_ok=True)
    for seed, course in courses.items():
        if course is not None:
            path = options.output / f"{options.label}-{seed}.json"
            write_text_atomically(path, json.dumps(course_record(course)) + "\n")
            print(f"written: {path}")


if __name__ == "__main__":
    main()
