"""Training steps of a primal layer on one very long sequence: one process, and sharded over several.

    OMP_NUM_THREADS=1 python benchmarks/long_sequence.py

Forward, objective and backward of one layer (d 64, 2 heads, rank 30, eta 0.1, batch 1, float32). Every row
runs in processes of its own, one thread each: seconds of a step, the largest resident memory of a process,
and the bytes that a process hands to collectives in a step. Sharded rows share the machine's cores, so their
seconds say what the cores give, not what as many machines would.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import counted_collectives, in_processes, print_row

import kernel_attention as ka
from kernel_attention_lab.benchmarking.machine import write_rows
from kernel_attention_lab.peak_memory import peak_resident

_BLOCKS = 16  # of tokens, each with its own seed


def part(rank: int, world: int, options: argparse.Namespace) -> torch.Tensor:
    """This rank's tokens of one and the same sequence, (1, N / world, d)."""
    blocks = range(_BLOCKS * rank // world, _BLOCKS * (rank + 1) // world)
    x = torch.empty(1, len(blocks), options.length // _BLOCKS, options.embed_dim)
    for index, block in enumerate(blocks):
        x[0, index].normal_(generator=torch.Generator().manual_seed(block))
    return x.flatten(1, 2)


def train(rank: int, world: int, meeting_point: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = ka.PrimalAttention(options.embed_dim, options.num_heads, rank=options.rank, eta=0.1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world)
        ka.shard_sequence(layer)
    x = part(rank, world, options).requires_grad_()
    before, seconds = peak_resident() / 1e9, []
    with counted_collectives() as sent:
        for _ in range(options.steps):
            layer.zero_grad(set_to_none=True)
            x.grad = None
            if world > 1:
                dist.barrier()
            start = time.perf_counter()
            (layer(x).square().mean() + ka.auxiliary_loss(layer)).backward()
            seconds.append(time.perf_counter() - start)
    bytes_of_a_step = sum(call.bytes for call in sent) // options.steps
    results.put((min(seconds), before, peak_resident() / 1e9, bytes_of_a_step, layer.objective.item()))
    if world > 1:
        dist.destroy_process_group()


def measure(world: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = in_processes(train, world, str(Path(folder) / "meeting_point"), options)
    *most, objectives = zip(*found, strict=True)
    if len(set(objectives)) > 1:
        raise SystemExit(f"the ranks' objectives differ: {objectives}")
    keys = ("seconds", "gigabytes_before_the_step", "peak_gigabytes", "bytes_to_collectives")
    row = dict(zip(keys, map(max, most), strict=True))
    return {"processes": world, "length": options.length, **row, "objective": objectives[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2**20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=2, help="the fastest is printed")
    parser.add_argument("--embed-dim", type=int, default=64)
    parser.add_argument("--num-heads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for world in options.ranks:
        rows.append(measure(world, options))
        print_row(rows[-1], rows[0], "objective")
    if options.out is not None:
        write_rows(options.out, rows, threads=1)


if __name__ == "__main__":
    main()
