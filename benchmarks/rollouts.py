"""Steps per second of a roll-out, against the context and the length of the episode.

    OMP_NUM_THREADS=1 python benchmarks/rollouts.py --out results/benchmarks/rollouts.json

Decision transformers of the small recipes' size (three layers of width 128, untrained) act in episodes of
made-up states, so that nothing but the policy is timed. One thread. The contenders remember an episode so:

* primal, recurrent: all layers causal data-independent primal, decoded with their state of constant size;
* primal last, recurrent: the paper's form; its softmax layers keep the keys and values of the whole episode;
* softmax, cached: softmax in every layer, with the same cache;
* softmax, sliding: softmax that reads the last K steps anew at every step, as the released code does;
* primal last, sliding: the paper's form read in the same way.

The recurrent ones have no context to vary: they remember the whole episode. A cell is the median over rounds
in which the contenders take turns. It is the number of steps, of all episodes together, per second of the
thread's CPU time, over a few steps at the end of an episode of that length.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kernel_attention.core.decoding import state_bytes
from kernel_attention.models import DecisionTransformer, Memory, RecurrentMemory, SlidingMemory
from kernel_attention_lab.benchmarking.machine import write_rows

STATE, ACTION = 17, 6  # of HalfCheetah and Walker2d
PRIMAL = {"primal": {"rank": 64, "data_dependent": False}}
ATTENTION: dict[str, Any] = {
    "primal": PRIMAL,
    "primal last": ["softmax", "softmax", PRIMAL],
    "softmax": "softmax",
}
CONTENDERS = {
    "primal, recurrent": "primal",
    "primal last, recurrent": "primal last",
    "softmax, cached": "softmax",
    "softmax, sliding": "softmax",
    "primal last, sliding": "primal last",
}


def model_of(attention: str, context: int, longest: int) -> DecisionTransformer:
    torch.manual_seed(0)
    made = DecisionTransformer(
        STATE, ACTION, ATTENTION[attention], context=max(context, 1), max_timestep=longest + 1
    )
    return made.eval()


def after(memory: Memory, episodes: int, steps: int) -> Memory:
    """The memory after so many steps of made-up episodes."""
    for _ in range(steps):
        take_step(memory, episodes)
    return memory


def take_step(memory: Memory, episodes: int) -> None:
    memory.act(torch.full((episodes,), 3600.0), torch.randn(episodes, STATE))
    memory.observe(torch.rand(episodes, ACTION))


def steps_per_second(memory: Memory, episodes: int, steps: int) -> float:
    """From a copy of the memory, so that a round leaves it as it was."""
    copied = copy.copy(memory)
    start = time.thread_time()
    after(copied, episodes, steps)
    return steps * episodes / (time.thread_time() - start)


def lines(arguments: argparse.Namespace) -> dict[tuple[str, int | None, int], Memory]:
    """The memory of every cell, at the end of an episode without its last steps."""
    found: dict[tuple[str, int | None, int], Memory] = {}
    for length in arguments.lengths:
        begin = max(length - arguments.steps, 0)
        for name, attention in CONTENDERS.items():
            if name.endswith("sliding"):
                for context in arguments.contexts:
                    memory: Memory = SlidingMemory(model_of(attention, context, length), context)
                    # Only the last K steps count, at their own time steps.
                    memory.timestep = max(begin - context, 0)
                    found[name, context, length] = after(memory, arguments.episodes, min(context, begin))
            else:
                recurrent = RecurrentMemory(model_of(attention, 0, length), arguments.episodes)
                found[name, None, length] = after(recurrent, arguments.episodes, begin)
    return found


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    memories = lines(arguments)
    rates: dict[tuple[str, int | None, int], list[float]] = {key: [] for key in memories}
    for number in range(arguments.rounds + 1):
        for key, memory in memories.items():
            rate = steps_per_second(memory, arguments.episodes, arguments.steps)
            if number:  # the first round warms up
                rates[key].append(rate)
    return [
        {
            "contender": name,
            "context": context,
            "length": length,
            "steps_per_second": round(statistics.median(found), 1),
            "state_bytes": state_bytes(memories[name, context, length].state) // arguments.episodes
            if context is None
            else None,
        }
        for (name, context, length), found in rates.items()
    ]


def table(rows: list[dict[str, Any]], lengths: list[int]) -> list[str]:
    """A line for each contender and context, a column for each length, as Markdown."""
    cells: dict[tuple[str, int | None], dict[int, float]] = {}
    for row in rows:
        cells.setdefault((row["contender"], row["context"]), {})[row["length"]] = row["steps_per_second"]
    head = ["policy", "context", *(f"{length} steps" for length in lengths)]
    text = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (name, context), found in cells.items():
        numbers = [f"{found[length]:.0f}" for length in lengths]
        text.append(f"| {' | '.join([name, 'all' if context is None else str(context), *numbers])} |")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second of a roll-out.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 100, 300, 1000])
    parser.add_argument("--contexts", type=int, nargs="+", default=[5, 20, 60])
    parser.add_argument("--episodes", type=int, default=20, help="played at once")
    parser.add_argument("--steps", type=int, default=8, help="timed at the end of an episode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments)
    print("\n".join(table(rows, arguments.lengths)))
    if arguments.out is not None:
        write_rows(arguments.out, rows, episodes=arguments.episodes)


if __name__ == "__main__":
    main()
