"""A lease: the right of one process to work on a point, which ends with the process.

Two things together say that a point is free. The lock of its file is free: the operating system drops it when
its process dies, however it dies. And its holder's heartbeat, a file with the holder's machine and a number
that grows, stands still. On one machine the lock alone decides, at once. Between machines the lock alone does
not: some file systems of clusters keep locks within a machine, some have none. There a holder counts as dead
after its heartbeat has not changed for ``PATIENCE`` seconds of this process's own clock, so that clocks need
not agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from kernel_attention.atomic import write_text_atomically
from kernel_attention_lab.lock import HeldByAnother, locked

BEAT = 5.0  # seconds from one heartbeat to the next
PATIENCE = 60.0  # seconds without one after which a holder on another machine counts as dead


class Lease:
    """The lease that this process holds.

    Args:
        path: of the heartbeat.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = uuid.uuid4().hex
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True)

    def start(self) -> None:
        """Write the first heartbeat, and the others from a thread."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat; its file goes if it is still ours."""
        self._stopped.set()
        self._thread.join()
        if self.is_held():
            with contextlib.suppress(OSError):
                self.path.unlink()

    def is_held(self) -> bool:
        """True where no other process took the lease, as one may after this machine stood still long."""
        found = _read(self.path)
        return found is not None and found.get("token") == self._token

    def _beat(self) -> None:
        self._beats += 1
        holder = {"machine": machine_id(), "pid": os.getpid(), "token": self._token, "beat": self._beats}
        write_text_atomically(self.path, json.dumps(holder))

    def _keep_beating(self) -> None:
        while not self._stopped.wait(BEAT):
            if not self.is_held():
                return
            with contextlib.suppress(OSError):  # a full disk: the training will tell
                self._beat()


class Watch:
    """The heartbeats of other machines, as this process has seen them.

    Args:
        patience: seconds without a change after which a holder counts as dead.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._seen: dict[Path, tuple[str, float]] = {}

    def is_alive(self, path: Path) -> bool:
        """Return whether the holder that wrote this heartbeat lives, where its lock is free."""
        found = _read(path)
        if found is None or found.get("machine") == machine_id():
            return False
        beat = json.dumps(found, sort_keys=True)
        known = self._seen.get(path)
        if known is None or known[0] != beat:
            self._seen[path] = (beat, time.monotonic())
            return True
        return time.monotonic() - known[1] < self.patience


@contextlib.contextmanager
def leased(folder: Path, name: str, watch: Watch) -> Iterator[Lease | None]:
    """Hold the lease of ``name`` in ``folder``; None where another process has it.

    Raises:
        OSError: where the folder cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder, f".{name}.lock"))
        except HeldByAnother:
            yield None
            return
        path = folder / f".{name}.lease"
        if watch.is_alive(path):
            yield None
            return
        lease = Lease(path)
        lease.start()
        try:
            yield lease
        finally:
            lease.stop()


def machine_id() -> str:
    """This machine's name, and on Linux which start of its system this is: containers may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"{uuid.getnode():x}"
    return f"{platform.node()} {boot}"


def _read(path: Path) -> dict[str, object] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
