"""The command ``attack``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_attention.errors import InputError, missing_package
from kernel_attention.experiments.options import Attack

if TYPE_CHECKING:
    from kernel_attention.experiments.robustness.attack_plan import AttackStep


def attack_command(options: Attack) -> int:
    """Attack the models of a run and print their accuracies."""
    from rich.console import Console

    from kernel_attention.experiments.reporting import attack_table, shift_lines
    from kernel_attention.experiments.training.attack import attack_run
    from kernel_attention.experiments.training.saved import load_run
    from kernel_attention.experiments.training.shifts import split_plans

    plans, shifts = split_plans(options.plan)
    steps = _attack_steps(options, plans) if plans or options.attacks or not shifts else []
    run = load_run(options.run)
    transfer = None if options.transfer is None else load_run(options.transfer)
    output = None if options.output is None else Path(options.output)
    try:
        with Console(stderr=True).status("") as status:
            records = attack_run(
                run,
                steps,
                shifts=shifts,
                shift_cases=16 if options.quick else options.cases,
                seed=options.seed,
                transfer=transfer,
                data_root=options.data_root,
                output=output,
                again=options.again,
                batch_size=options.batch_size,
                told=status.update,
            )
    except InputError:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, ModuleNotFoundError) and missing_package(error, "this attack") is not None:
            raise
        failure = " ".join(f"failed: {type(error).__name__}: {error}".split())
        print("interrupted" if isinstance(error, KeyboardInterrupt) else failure, file=sys.stderr)
        print(f"saved: the attacks that are done, in {output or run.folder}/seed-*", file=sys.stderr)
        print("resume: the same command goes on after them", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 160)
    for seed, record in records.items():
        title = f"{run.recipe.dataset}, {run.recipe.attention_name()}, seed {seed}"
        console.print(attack_table(record, title))
        for line in shift_lines(record):
            console.print(line, markup=False, soft_wrap=True)
        for warning in record["warnings"]:
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        path = (output or run.folder) / f"seed-{seed}" / "robustness.json"
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 0


def _attack_steps(options: Attack, plans: list[str]) -> list[AttackStep]:
    from kernel_attention.experiments.robustness import choose_steps, read_eps

    return choose_steps(
        plans=plans,
        attacks=options.attacks,
        protocol=options.protocol,
        eps=[read_eps(text) for text in options.eps],
        cases=options.cases,
        seed=options.attack_seed,
        transfer=options.transfer is not None,
        quick=options.quick,
    )
