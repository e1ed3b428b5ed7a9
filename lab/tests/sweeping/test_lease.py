"""A lease ends with its process: at once on this machine, by its heartbeat on another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_attention_lab.sweeping import lease as leases
from kernel_attention_lab.sweeping.lease import Watch, leased, machine_id

SRC = os.pathsep.join(str(Path(__file__).parents[3] / place) for place in ("src", "lab/src"))
HOLDER = """
import sys, time
from pathlib import Path
from kernel_attention_lab.sweeping.lease import Watch, leased
with leased(Path(sys.argv[1]), "000", Watch()) as lease:
    print(lease is not None, flush=True)
    time.sleep(600)
"""


def is_free(folder: Path, watch: Watch) -> bool:
    with leased(folder, "000", watch) as lease:
        return lease is not None


def write_beat(folder: Path, beat: int, machine: str = "another") -> None:
    holder = {"machine": machine, "pid": 1, "token": "x", "beat": beat}
    (folder / ".000.lease").write_text(json.dumps(holder))


def test_a_lease_is_held_by_one_and_leaves_nothing(tmp_path):
    watch = Watch()
    with leased(tmp_path, "000", watch) as lease:
        assert lease.is_held()
        assert not is_free(tmp_path, watch)
        with leased(tmp_path, "001", watch) as other:
            assert other is not None
    assert is_free(tmp_path, watch)
    assert list(tmp_path.iterdir()) == []


def test_the_lease_of_a_killed_process_is_free_at_once(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "True\n"
        watch = Watch(patience=1e9)
        assert not is_free(tmp_path, watch)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / ".000.lease").exists()
    assert is_free(tmp_path, watch)


def test_another_machine_is_alive_while_its_heartbeat_changes(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    watch = Watch(patience=60.0)
    for now in (0.0, 50.0, 100.0, 150.0):
        write_beat(tmp_path, int(now))
        assert not is_free(tmp_path, watch)
    now = 209.0
    assert not is_free(tmp_path, watch)
    now = 211.0
    assert is_free(tmp_path, watch)


@pytest.mark.parametrize("text", ["", "{", "[]", "no json"])
def test_a_heartbeat_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / ".000.lease").write_text(text)
    assert is_free(tmp_path, Watch())


def test_a_holder_whose_lease_was_taken_knows_it(tmp_path):
    with leased(tmp_path, "000", Watch()) as lease:
        write_beat(tmp_path, 7)
        assert not lease.is_held()
    assert json.loads((tmp_path / ".000.lease").read_text())["beat"] == 7, "the other's file stays"


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT", 0.01)
    with leased(tmp_path, "000", Watch()) as lease:
        first = json.loads(lease.path.read_text())
        assert (first["machine"], first["pid"]) == (machine_id(), os.getpid())
        while json.loads(lease.path.read_text())["beat"] < first["beat"] + 3:
            assert lease.is_held()
