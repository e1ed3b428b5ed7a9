"""What a process does for the one that started it."""

from __future__ import annotations

import os
import signal
import threading
import time


def stop_with_parent(parent: int) -> None:
    """Send this process SIGTERM when its parent, by its number, ends; training stops at a checkpoint."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
