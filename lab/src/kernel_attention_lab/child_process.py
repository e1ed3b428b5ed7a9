"""Processes that end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def process_pool(workers: int, begin: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """A pool whose processes start anew, call ``begin``, and end with this one, even where it is killed.

    A process forked from one with threads may wait for ever for a lock of one of these threads.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(os.getpid(), begin))


def _begin(parent: int, begin: Callable[[], None] | None) -> None:
    stop_with_parent(parent)
    if begin is not None:
        begin()


def stop_with_parent(parent: int) -> None:
    """Send this process SIGTERM when its parent, by its number, ends; training stops at a checkpoint."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
