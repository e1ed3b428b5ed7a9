"""The command that converts trained models: ``convert``."""

from __future__ import annotations

import sys
from pathlib import Path

from kernel_attention.errors import InputError
from kernel_attention_lab.cli.progress import progress
from kernel_attention_lab.options import Convert

_SETTINGS = (
    "attention", "layers", "tolerance", "texts", "batch_size", "max_length", "steps", "learning_rate",
    "end_to_end", "time_limit", "seed",
)  # fmt: skip


def convert_command(options: Convert) -> int:
    """Convert a trained model, and print the report."""
    for name in ("data", "output"):
        if getattr(options, name) is None:
            raise InputError(f"convert needs --{name} (see: kernel-attention convert --help)")
    assert options.data is not None
    assert options.output is not None
    from kernel_attention_lab.runs.convert import CHECKPOINT, convert_model

    output = Path(options.output)
    settings = {name: getattr(options, name) for name in _SETTINGS}
    try:
        with progress(seconds=0) as on_progress:
            report = convert_model(
                options.model,
                Path(options.data),
                output,
                on_progress=lambda at: on_progress(
                    f"{at.stage}: {at.done} of {at.total}, {at.seconds:.0f} s"
                ),
                **settings,
            )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        if (output / CHECKPOINT).exists():
            print(f"saved: the layers that are trained, in {output / CHECKPOINT}", file=sys.stderr)
            print("resume: the same command goes on after them", file=sys.stderr)
        return 1
    print(report)
    print(f"written: {output}")
    return 0
