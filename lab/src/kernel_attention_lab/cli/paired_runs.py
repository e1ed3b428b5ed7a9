"""Paired tests of runs on the same test cases, for ``compare``."""

from __future__ import annotations

import numpy as np

from kernel_attention_lab.evidence.statistics import paired_bootstrap, sign_flip_test
from kernel_attention_lab.packing import unpack_bits
from kernel_attention_lab.reporting.records import RunRecord
from kernel_attention_lab.reporting.run_comparison import ComparedRun, RunComparison


def paired_lines(comparison: RunComparison) -> list[str]:
    """A line for every run with test cases in common with the first: the difference, and how sure it is."""
    first, *others = comparison.runs
    lines = []
    for other in others:
        pair = _answers(first, other)
        if pair is None:
            continue
        ours, theirs = pair
        found = paired_bootstrap(theirs, ours)
        seeds, cases = ours.shape
        lines.append(
            f"{other.name} minus {first.name}: {100 * found.difference:+.2f} points, 95 % interval "
            f"{100 * found.low:+.2f} to {100 * found.high:+.2f} over cases and seeds, p = "
            f"{sign_flip_test(theirs, ours):.3g} of the exact sign-flip test over cases ({cases} cases, "
            f"{seeds} seed{'s' if seeds > 1 else ''})"
        )
    return lines


def _answers(first: ComparedRun, other: ComparedRun) -> tuple[np.ndarray, np.ndarray] | None:
    """Right answers of both runs, (seeds, cases) each, of the seeds that both have.

    None where there is no such seed, and where the runs have no answers or were asked other cases.
    """
    same = all(first.run.fact(key) == other.run.fact(key) for key in ("dataset", "protocol"))
    ours, theirs = _bits(first.run), _bits(other.run)
    shared = sorted(set(ours) & set(theirs))
    pairs = [(ours[seed], theirs[seed]) for seed in shared]
    if not same or not pairs or len({len(answers) for pair in pairs for answers in pair}) > 1:
        return None
    return np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])


def _bits(run: RunRecord) -> dict[int, np.ndarray]:
    found = {}
    for record in run.seeds:
        evaluation = record.evaluation or {}
        if "correct_bits" in evaluation:
            found[record.seed] = unpack_bits(evaluation["correct_bits"], evaluation["cases"])
    return found
