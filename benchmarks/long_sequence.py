"""Training steps of a primal layer on one very long sequence: one process, and sharded over several.

    OMP_NUM_THREADS=1 python benchmarks/long_sequence.py --out benchmarks/results/long_sequence.json

Forward, objective and backward of one layer (d 64, 2 heads, rank 30, eta 0.1, batch 1, float32). Every row
runs in processes of its own, one thread each: seconds of a step, the largest resident memory of a process,
and the bytes that a process hands to collectives in a step. Sharded rows share the machine's cores, so their
seconds say what the cores give, not what as many machines would.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from long_rows import print_row, require_equal
from traffic import counted_collectives

import kernel_attention as ka
from kernel_attention_lab.peak_memory import peak_resident

_BLOCKS = 16  # of tokens, each with its own seed


def part(rank: int, world: int, options: argparse.Namespace) -> torch.Tensor:
    """This rank's tokens of one and the same sequence, (1, N / world, d)."""
    blocks = range(_BLOCKS * rank // world, _BLOCKS * (rank + 1) // world)
    x = torch.empty(1, len(blocks), options.length // _BLOCKS, options.embed_dim)
    for index, block in enumerate(blocks):
        x[0, index].normal_(generator=torch.Generator().manual_seed(block))
    return x.flatten(1, 2)


def train(rank: int, world: int, meeting_point: str, options: argparse.Namespace, results) -> None:
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
    objective = layer.objective.item()
    results.put((min(seconds), before, peak_resident() / 1e9, bytes_of_a_step, objective))
    if world > 1:
        dist.destroy_process_group()


def measure(world: int, options: argparse.Namespace) -> dict:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, str(Path(folder) / "meeting_point"), options, results)
        processes = [spawn.Process(target=train, args=(rank, *arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a process of {world} failed")
    rows = [results.get() for _ in range(world)]
    seconds, before, peak, sent, objectives = zip(*rows, strict=True)
    if len(set(objectives)) > 1:
        raise SystemExit(f"the ranks' objectives differ: {objectives}")
    return {
        "ranks": world,
        "length": options.length,
        "seconds": max(seconds),
        "peak_gigabytes": max(peak),
        "gigabytes_before_the_step": max(before),
        "bytes_to_collectives": max(sent),
        "objective": objectives[0],
    }


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
    rows = []
    for world in options.ranks:
        rows.append(row := measure(world, options))
        print_row(row, "rank", "ranks")
        require_equal("objectives", row["objective"], rows[0]["objective"])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {"platform": platform.platform(), "torch": torch.__version__, "threads": 1}
        options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
