"""What the README says of accuracy on short tasks, from the records of three suites."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from generated import table
from result_tables import figure

from kernel_attention_lab.reproduction import Places, read_suite
from kernel_attention_lab.reproduction.findings import measurements

PAGE = Path("README.md")


class Task(NamedTuple):
    """A column of a suite, with the words that name it and the rows that are shown."""

    words: str
    suite: str
    column: str
    rows: tuple[str, ...]


TASKS = (
    Task("JapaneseVowels, accuracy, %", "every_mechanism", "JapaneseVowels", ("softmax", "primal")),
    Task("SST-2 from scratch, accuracy, %", "kernel_pca_sst2", "SST-2", ("softmax", "symmetric", "rpc")),
    Task("SST-2 by fine-tuning, accuracy, %", "kernel_pca_sst2_finetune", "SST-2", ("symmetric", "rpc")),
    Task(
        "Penn Treebank, test perplexity (smaller is better)",
        "kernel_pca_ptb",
        "PTB",
        ("symmetric", "rpc_first_layer"),
    ),
)


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the README's region, and no figures."""
    places = Places(root / "runs", root / "results")
    lines = [line for task in TASKS if (line := task_line(task, places))]
    if not lines:
        return {"accuracy": ["", "No model of a short task has a record yet.", ""]}, {}
    return {"accuracy": ["", *table(["task", "mean ± deviation (seeds)"], lines), ""]}, {}


def task_line(task: Task, places: Places) -> list[str] | None:
    """The figures of a task's rows, as far as there are records; None where there is none."""
    suite = read_suite(task.suite)
    found = measurements(suite, places)
    parts = [
        f"`{row}` {figure(found[row][task.column], suite.metric)}"
        for row in task.rows
        if task.column in found.get(row, {})
    ]
    return [task.words, ", ".join(parts)] if parts else None
