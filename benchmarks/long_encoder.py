"""Training steps of a whole encoder on one very long sequence, cut over processes as its recipe says.

    OMP_NUM_THREADS=1 python benchmarks/long_encoder.py benchmarks/million_tokens.yaml --out FILE.json

The recipe's model, optimizer and processes train in the loop of ``kernel-attention train``, two epochs of one
batch of noise: every process reads the sequence (4 bytes a token) and keeps its part of it. Printed are
seconds of a step, the largest resident memory of a process, before the first step and in all, the bytes that
a process hands to collectives in a step, and the loss, which must be that of one process (``--alone``) up to
rounding. Processes share the machine's cores: their seconds do not say what as many machines would take.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import Sent, count_gradients, counted_collectives, in_processes, print_row
from torch.utils.data import DataLoader

from kernel_attention.models import SequenceClassifier
from kernel_attention.series import Batch
from kernel_attention.series.task import SequenceTask
from kernel_attention.training.course import Observer
from kernel_attention.training.loop import Training, fit
from kernel_attention.training.processes import ProcessPlace, joined
from kernel_attention_lab.benchmarking.machine import write_rows
from kernel_attention_lab.data.step_sampler import StepSampler
from kernel_attention_lab.peak_memory import peak_resident
from kernel_attention_lab.runs.recipe_files import read_recipe
from kernel_attention_lab.tasks.registry import make_recipe

CLASSES = 2


class OneBatch(StepSampler[int]):
    """The cases of one batch, every round."""

    per_epoch = 1

    def batches(self, epoch: int) -> list[list[int]]:
        """All cases."""
        return [list(range(self.batch_size))]


class Noise:
    """Sequences (N, 1) of noise, with masks and classes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, cases: list[int]) -> Batch:
        x = torch.randn(len(cases), self.length, 1, generator=torch.Generator().manual_seed(0))
        mask = torch.ones(len(cases), self.length, dtype=torch.bool)
        return Batch(x, mask, torch.tensor(cases) % CLASSES)


class Measured(Observer):
    """Seconds, memory, bytes to collectives, and loss of every round."""

    def __init__(self, sent: list[Sent]) -> None:
        self.rounds: list[dict[str, Any]] = []
        self.sent = sent
        self.before = peak_resident() or 0

    def on_train_start(self, training: Training) -> None:
        """Count the gradients too."""
        count_gradients(training.module._forward_module)

    def on_step_start(self, training: Training) -> None:
        """Start the clock when all processes are here."""
        training.processes.told(None)
        self.sent.clear()
        self.started = time.perf_counter()

    def on_step_end(self, training: Training, batches: list[Any]) -> None:
        """Stop it."""
        seconds = time.perf_counter() - self.started
        calls = [tuple(call) for call in self.sent]
        self.rounds.append({"seconds": seconds, "calls": calls})

    def on_round_end(self, training: Training) -> None:
        """Read the loss."""
        self.rounds[-1]["loss"] = training.figures()["train_loss"]


def train(rank: int, world: int, keys: dict[str, Any], length: int, port: int, results: Any) -> None:
    """Train as one of the recipe's processes."""
    torch.set_num_threads(1)
    recipe = make_recipe(keys)
    place = ProcessPlace(rank, recipe.processes, rank, recipe.processes)
    store = None
    if place.world > 1:
        store = dist.TCPStore("127.0.0.1", port, place.world, is_master=rank == 0, wait_for_workers=False)
    torch.manual_seed(0)
    device = torch.device("cpu")
    with joined(place, device, recipe.sequence_shards, store) as processes, counted_collectives() as sent:
        model = SequenceClassifier(1, CLASSES, length, **recipe.encoder_options())
        measured = Measured(sent)
        loader = DataLoader(Noise(length), batch_size=None, sampler=OneBatch(recipe.effective_batch, 1))
        options: dict[str, Any] = {"observers": [measured], "processes": processes, "progress": False}
        fit(SequenceTask(model, recipe.train_settings()), loader, None, **options)
        results.put((measured.rounds, measured.before, peak_resident() or 0))


def measure(keys: dict[str, Any], length: int, port: int) -> dict[str, Any]:
    """The figures of a recipe; memory and bytes of the process that has most."""
    world = make_recipe(keys).processes
    rounds, before, peak = zip(*in_processes(train, world, keys, length, port), strict=True)
    losses = {round(each[-1]["loss"], 6) for each in rounds}
    if len(losses) > 1:
        raise SystemExit(f"the processes' losses differ: {losses}")
    return {
        "processes": world,
        "length": length,
        "seconds": max(min(row["seconds"] for row in each) for each in rounds),
        "gigabytes_before_the_step": max(before) / 1e9,
        "peak_gigabytes": max(peak) / 1e9,
        "calls": rounds[0][-1]["calls"],
        "bytes_to_collectives": max(sum(call[1] for call in each[-1]["calls"]) for each in rounds),
        "loss": losses.pop(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--length", type=int, default=2**20)
    parser.add_argument("--alone", action="store_true", help="one process too, and the same loss")
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    _, keys = read_recipe(options.recipe)
    wanted = [keys | {"devices": 1, "sequence_shards": 1}] if options.alone else []
    rows: list[dict[str, Any]] = []
    for number, each in enumerate([*wanted, keys]):
        rows.append(row := measure(each, options.length, options.port + number))
        del row["calls"]
        print_row(row, rows[0], "loss")
    if options.out is not None:
        write_rows(options.out, rows, threads=1)


if __name__ == "__main__":
    main()
