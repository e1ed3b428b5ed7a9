"""Another process of a run: it trains what the first one says, and ends with it. ``launch`` starts it."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from kernel_attention_lab.plugins import load_plugins
from kernel_attention_lab.runs.run import train
from kernel_attention_lab.tasks.registry import make_recipe


def _leave_with_the_first() -> None:
    """End this process when the first one is gone and has closed the pipe."""
    sys.stdin.buffer.read()
    os._exit(1)


def join_the_first() -> int:
    """Train what the first process says, as one of its processes."""
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_leave_with_the_first, daemon=True).start()
    load_plugins(job["recipe"].get("plugins", []))
    recipe = make_recipe(job.pop("recipe"))
    try:
        train(recipe, Path(job.pop("output")), progress=False, **job)
    except KeyboardInterrupt:  # the first process says so
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(join_the_first())
