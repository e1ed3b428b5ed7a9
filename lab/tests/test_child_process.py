"""A pool's processes end with the one that started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from runs.small_runs import SRC

POOL = """
import os, time
from kernel_attention_lab.child_process import process_pool

def number(_):
    time.sleep(0.5)  # so that each process has one
    return os.getpid()

if __name__ == "__main__":
    with process_pool(2) as pool:
        print(*set(pool.map(number, range(4))), flush=True)
        time.sleep(600)
"""


@pytest.mark.skipif(os.name == "nt", reason="reads the table of processes in /proc")
def test_the_processes_of_a_killed_one_end(tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    parent = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        children = [int(number) for number in parent.stdout.readline().split()]
        assert children
        assert all(is_running(child) for child in children)
    finally:
        parent.kill()
        parent.communicate()
    until = time.monotonic() + 60
    while any(is_running(child) for child in children):
        assert time.monotonic() < until, "they outlive the process that started them"
        time.sleep(0.1)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
