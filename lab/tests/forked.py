"""Programs of Python, each in a fork of one process that has imported torch.

``python forked.py`` is that process. It reads a program a line, as JSON, and answers with its exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any


class Forks:
    """A process that has imported these modules and nothing of ours, and forks for every program."""

    def __init__(self, *modules: str) -> None:
        from checkout import SOURCES  # which the other process must not have: programs may bring their own

        environment = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules], env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(
        self, *words: str, cwd: Path | str = ".", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``python *words``, where the words are ``-c CODE ...``, ``-m MODULE ...`` or ``FILE ...``.

        Before them, ``-W error`` and ``-P`` are understood. ``env`` is added to this process's environment.
        """
        with tempfile.TemporaryDirectory() as folder:
            outputs = [str(Path(folder) / name) for name in ("out", "err")]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {})}
            asked = {"words": words, "cwd": str(Path(cwd).resolve()), "env": environment, "outputs": outputs}
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            code = json.loads(self._process.stdout.readline())
            said = [Path(path).read_text(encoding="utf-8") for path in outputs]
        return subprocess.CompletedProcess(list(words), code, *said)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(**json.loads(line))
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)


def _become(words: list[str], cwd: str, env: dict[str, str], outputs: list[str]) -> None:
    """The program, in this forked process, which ends with it."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    code: Any = 0
    try:
        _execute(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _execute(words: list[str]) -> None:
    place = [os.getcwd()]
    while words[0] in ("-W", "-P"):
        if words[0] == "-P":
            place, words = [], words[1:]
        else:
            warnings.simplefilter(words[1])
            words = words[2:]
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], place
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], place
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, program = words, Path(words[0]).resolve()
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    for module in sys.argv[1:]:
        __import__(module)
    serve()
