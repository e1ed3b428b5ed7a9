"""The trainer's state, and the stop between two steps that it goes on from.

The state is written by atomic rename, and read back without executing anything from the file.
"""

import contextlib
import io
import pickle
import signal
import sys
import threading
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch

from kernel_attention.errors import InputError, require_file
from kernel_attention.files import write_atomically

_PARTS = ("figures", "generators", "global_step", "optimizer", "round", "state_dict")


_IS_FOLDER = 0x10  # of a zip archive's attributes of a part


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write the state to a temporary file and rename it.

    Raises:
        OSError: where it cannot be written, for example because the disk is full.
    """

    def write(file: IO[bytes]) -> None:
        watched = _Watched(file)
        try:
            torch.save(state, watched)  # type: ignore[arg-type]  # it needs no more than write
        except RuntimeError as error:
            # PyTorch words a failed write as a failed check of its own file format.
            raise watched.failure or error from None

    write_atomically(path, write)


class _Watched(io.RawIOBase):
    """A file that remembers why it could not be written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise


def read_state(path: Path) -> dict[str, Any]:
    """The state on the CPU, always with ``weights_only=True``.

    Raises:
        InputError: for a file that is damaged or no checkpoint of this version.
    """
    check_checkpoint(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the errors below say what is wrong with the file
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"checkpoint {path}: refused, it is damaged or holds more than tensors and plain values"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"checkpoint {path}: truncated or not a checkpoint ({reason})") from None
    if isinstance(state, dict) and "pytorch-lightning_version" in state:
        raise InputError(f"checkpoint {path}: written by an earlier version; only that version can resume it")
    missing = [part for part in _PARTS if not isinstance(state, dict) or part not in state]
    if missing:
        raise InputError(f"checkpoint {path}: not a trainer's state (it has no {', '.join(missing)})")
    return state


def check_checkpoint(path: Path) -> None:
    """InputError where the file is damaged.

    A checkpoint is a zip archive with a checksum of every part. PyTorch writes the checksums and does not
    read them.
    """
    require_file(path)
    try:
        if not zipfile.is_zipfile(path):
            return  # the reader says what else it is
        with zipfile.ZipFile(path) as archive:
            # PyTorch reads a part that is marked as a folder as zeros.
            folders = [part.filename for part in archive.infolist() if part.external_attr & _IS_FOLDER]
            damaged = folders[0] if folders else archive.testzip()
    except Exception as error:  # a damaged archive can raise anything
        reason = str(error) or type(error).__name__
        raise InputError(f"checkpoint {path}: truncated or not a checkpoint ({reason})") from None
    if damaged is not None:
        raise InputError(f"checkpoint {path}: damaged, its part {damaged} does not have its checksum or kind")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Records the first Ctrl-C or SIGTERM (``is_made``); a second signal raises KeyboardInterrupt at once.

    An interrupted step leaves weights, moments and random numbers that belong to no step, and no run could
    resume from them. Signals reach only the main thread; in another thread nothing is recorded.
    """

    def __init__(self) -> None:
        self.is_made = False

    @contextlib.contextmanager
    def listening(self, wanted: bool = True) -> Iterator[None]:
        """Record signals within the block, where ``wanted``."""
        if not wanted or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True
        if sys.stderr is not None and sys.stderr.isatty():
            print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr)
