"""The figures of a run for the tools people watch runs with. The run folder stays the truth.

A logger is told each row of ``metrics.csv`` when it is written, and the figures of ``evaluation.json``. It
decides nothing, so a run with loggers has the same weights as one without.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import InputError
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.runs.files import write_json

if TYPE_CHECKING:
    from lightning_fabric.loggers.logger import Logger

_KEPT = (
    "loggers.json"  # under which names the services know a seed's run, so that a resumed one goes on there
)
_NEEDS: dict[str, list[tuple[str, ...]]] = {
    "tensorboard": [("tensorboard", "tensorboardX")],  # one of them
    "mlflow": [("mlflow",), ("pytorch_lightning",)],
    "wandb": [("wandb",), ("pytorch_lightning",)],
}


def require_loggers(names: Sequence[str]) -> None:
    """InputError for a logger whose package is not installed."""
    for name in names:
        for packages in _NEEDS[name]:
            if not any(importlib.util.find_spec(package) for package in packages):
                raise InputError(
                    f"loggers={name}: needs {packages[0]}, which is not installed: pip install {packages[0]}"
                )


class RunLoggers:
    """The loggers of one seed.

    Args:
        names: of ``_NEEDS``.
        folder: the seed's folder.
        project: what runs are grouped by: the name of the recipe.
        keys: the recipe's keys.
    """

    def __init__(self, names: Sequence[str], folder: Path, project: str, keys: dict[str, Any]) -> None:
        path = folder / _KEPT
        known = read_json(path) if path.is_file() else {}
        title = f"{folder.parent.name}/{folder.name}"
        self.loggers = {name: _MAKERS[name](folder, project, title, known.get(name)) for name in names}
        found = {name: logger.version for name, logger in self.loggers.items() if name != "tensorboard"}
        if found and found != known:
            write_json(path, found)
        self._step: int | None = None
        for logger in self.loggers.values():
            logger.log_hyperparams(keys)

    def tell_row(self, row: dict[str, Any], step: int) -> None:
        """Tell a row of ``metrics.csv``, written after this number of steps."""
        self._step = step
        self._tell(row)

    def tell_result(self, result: dict[str, Any]) -> None:
        """Tell the content of ``evaluation.json``, as ``result/...``."""
        self._tell({f"result/{name}": value for name, value in result.items()})

    def close(self, *, is_done: bool) -> None:
        """End the seed's run in every service."""
        for logger in self.loggers.values():
            logger.finalize("success" if is_done else "failed")

    def _tell(self, figures: dict[str, Any]) -> None:
        """The numbers among the figures."""
        numbers = {
            name: float(value)
            for name, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for logger in self.loggers.values():
            logger.log_metrics(numbers, self._step)
            logger.save()


def _tensorboard(folder: Path, project: str, title: str, known: str | None) -> Logger:
    from lightning_fabric.loggers.tensorboard import TensorBoardLogger

    # Its files are named after the second at which they began. A run resumed at once must not write over one.
    parts = len(list((folder / "tensorboard").glob("events.*")))
    return TensorBoardLogger(folder, name="", version="tensorboard", filename_suffix=f".{parts}")


def _mlflow(folder: Path, project: str, title: str, known: str | None) -> Logger:
    from pytorch_lightning.loggers import MLFlowLogger

    logger = MLFlowLogger(project, title, os.environ.get("MLFLOW_TRACKING_URI"), run_id=known)
    logger.experiment  # noqa: B018 - begins the run, which gives it its id
    return logger


def _wandb(folder: Path, project: str, title: str, known: str | None) -> Logger:
    from pytorch_lightning.loggers import WandbLogger

    logger = WandbLogger(title, folder, project=project.replace("/", "-"), id=known, resume="allow")
    logger.experiment  # noqa: B018 - as above
    return logger


_MAKERS: dict[str, Callable[[Path, str, str, str | None], Logger]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
