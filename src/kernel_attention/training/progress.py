"""The progress bar of a training."""

from __future__ import annotations

from types import TracebackType
from typing import Any

_SHOWN = ("train_loss", "val_loss", "val_accuracy", "val_rmse", "val_mean_iou")


class ProgressBar:
    """The steps of the round, and the figures of the round before.

    Args:
        shown: whether there is one.
    """

    def __init__(self, shown: bool) -> None:
        self._bar: Any = None
        self._row: Any = None
        self._figures = ""
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
            )  # fmt: skip

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start_round(self, number: int, rounds: int, steps: int, done: int) -> None:
        """Begin a round of so many steps, some of which may be done."""
        if self._bar is None:
            return
        said = f"round {number + 1}/{rounds}"
        if self._row is None:
            self._row = self._bar.add_task(said, total=steps, completed=done, figures="")
        else:
            self._bar.reset(self._row, description=said, total=steps, completed=done, figures=self._figures)

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.advance(self._row)

    def show(self, row: dict[str, Any]) -> None:
        """The figures to be shown from now on."""
        self._figures = "  ".join(f"{name} {row[name]:.4g}" for name in _SHOWN if name in row)
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, figures=self._figures)
