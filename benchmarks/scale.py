"""Bytes of a training step on two processes, counted, and on paper the steps of 8, 64 and 512 devices.

    OMP_NUM_THREADS=1 python benchmarks/scale.py --page docs/scale.md

The model of ``benchmarks/scale_model.yaml`` takes a step in the loop of ``kernel-attention train`` with each
strategy. What a process hands to each collective is counted, and with it its operations for a token. The rest
is arithmetic with the assumptions that the page states.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from long_encoder import CLASSES, measure

from kernel_attention.models import SequenceClassifier
from kernel_attention_lab.benchmarking.operations import operation_counter
from kernel_attention_lab.evidence.pages import between_marks
from kernel_attention_lab.evidence.tables import markdown
from kernel_attention_lab.runs.recipe_files import read_recipe
from kernel_attention_lab.tasks.registry import make_recipe

COUNTED_ON = 2  # processes
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "sequence_shards": {"sequence_shards": COUNTED_ON},
}


@dataclass(frozen=True)
class Machine:
    """A device and its links.

    operations: a second, at the peak.
    used: the part of the peak that training reaches.
    near: bytes a second that a device sends to others of its node.
    far: the same to other nodes.
    latency: seconds of a collective of no bytes.
    node: devices of a node.
    """

    operations: float = 989e12
    used: float = 0.4
    near: float = 450e9
    far: float = 50e9
    latency: float = 20e-6
    node: int = 8

    def speed(self, devices: int) -> float:
        """Bytes a second between so many devices: those of the slowest link among them."""
        return self.near if devices <= self.node else self.far


def seconds(calls: list[tuple[str, int]], devices: int, machine: Machine) -> float:
    """Time of the collectives of a step over so many devices, in rings.

    A ring sends (n - 1) / n of the whole tensor to gather its parts or to reduce them, and twice that for an
    all-reduce. The part that a process gives to a gathering was counted on two processes.
    """
    ways = {"all_reduce": 2, "reduce_scatter_tensor": 1, "reduce_scatter_single": 1}
    share, speed = (devices - 1) / devices, machine.speed(devices)
    return sum(machine.latency + ways.get(name, COUNTED_ON) * share * size / speed for name, size in calls)


def efficiency(compute: float, hidden: float, shown: float) -> tuple[float, float]:
    """(expected, worst) part of the time that is spent computing.

    Gradients and weights can travel while the backward pass, two thirds of a step, computes. In the worst
    case nothing does.

    Args:
        compute: seconds of a step on one device.
        hidden: seconds of collectives that can overlap.
        shown: seconds of those that a layer waits for.
    """
    expected = compute / (compute + shown + max(0.0, hidden - 2 / 3 * compute))
    return expected, compute / (compute + shown + hidden)


def operations_of_a_token(keys: dict[str, Any], length: int) -> float:
    """Operations of a training step, a token, of matrix products."""
    recipe = make_recipe(keys | {"devices": 1})
    model = SequenceClassifier(1, CLASSES, length, **recipe.encoder_options())
    with operation_counter() as counter:
        model(torch.randn(1, length, 1)).sum().backward()
    return counter.get_total_flops() / length


def counted_table(counted: dict[str, list[tuple[str, int]]]) -> list[str]:
    """What a process hands over in a step, by strategy and collective."""
    rows = []
    for name, calls in counted.items():
        for collective in sorted({call[0] for call in calls}):
            sizes = [size for kind, size in calls if kind == collective]
            rows.append([name, f"`{collective}`", str(len(sizes)), f"{sum(sizes):,}"])
    return markdown(["strategy", "collective", "calls", "bytes"], rows)


def paper_table(
    counted: dict[str, list[tuple[str, int]]], compute: float, machine: Machine, devices: list[int]
) -> list[str]:
    """Seconds and efficiency of a step by strategy and number of devices."""
    gradients = [call for call in counted["ddp"] if call[1] > 1024]
    rows = []
    for name, calls in counted.items():
        for count in devices:
            if name == "sequence_shards":  # a node shares each sequence, and all devices average gradients
                shown = seconds([call for call in calls if call not in gradients], machine.node, machine)
                hidden = seconds(gradients, count, machine)
            else:
                shown, hidden = 0.0, seconds(calls, count, machine)
            expected, worst = efficiency(compute, hidden, shown)
            times = [f"{1e3 * time:.1f}" for time in (compute, hidden, shown)]
            rows.append([name, str(count), *times, f"{expected:.0%}", f"{worst:.0%}"])
    times = [f"{what}, ms" for what in ("compute", "overlapping", "waited for")]
    return markdown(["strategy", "devices", *times, "expected", "no overlap"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default=str(Path(__file__).parent / "scale_model.yaml"))
    parser.add_argument("--length", type=int, default=64, help="tokens of the sequence that is counted on")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a step on a device, on paper")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--port", type=int, default=29527)
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args()
    _, keys = read_recipe(options.recipe)
    machine = Machine()
    counted = {}
    for number, (name, changes) in enumerate(STRATEGIES.items()):
        row = measure(keys | {"devices": COUNTED_ON} | changes, options.length, options.port + number)
        counted[name] = [(str(kind), int(size)) for kind, size in row["calls"]]
    operations = operations_of_a_token(keys, options.length)
    compute = options.tokens * operations / (machine.operations * machine.used)
    lines = [
        "Counted in two processes:", "", *counted_table(counted), "",
        f"A token costs {operations / 1e6:,.0f} million operations in a training step (products of matrices, "
        f"counted), so a device computes {1e3 * compute:.1f} ms for {options.tokens:,} tokens.", "",
        *paper_table(counted, compute, machine, options.devices),
    ]  # fmt: skip
    print("\n".join(lines))
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        options.page.write_text(between_marks(text, "scale", ["", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
