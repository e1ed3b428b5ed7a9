"""The command line, a file for each group of commands; their options are in the module ``options`` beside it.

Each command imports what it needs when it is called. So ``--help`` does not wait for torch, and a missing
extra ``train`` is reported in one line.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError
from kernel_attention_lab.arguments import parse
from kernel_attention_lab.cli.comparisons import bench_command, reproduce_command, sweep_command
from kernel_attention_lab.cli.conversion import convert_command
from kernel_attention_lab.cli.lists import list_command
from kernel_attention_lab.cli.runs import (
    analyze_command,
    attack_command,
    compare_command,
    evaluate_command,
    explain_command,
    export_command,
    generate_command,
    play_command,
    predict_command,
    record_command,
)
from kernel_attention_lab.cli.training import init_command, train_command
from kernel_attention_lab.extras import install_hint
from kernel_attention_lab.notes import notes_on_stderr
from kernel_attention_lab.plugins import load_plugins, require_plugins

__all__ = ["main"]


_WITH_KEYS: dict[str, Callable[[Any, dict[str, Any]], int]] = {"train": train_command, "sweep": sweep_command}
_COMMANDS: dict[str, Callable[[Any], int]] = {
    "init": init_command,
    "evaluate": evaluate_command,
    "predict": predict_command,
    "explain": explain_command,
    "generate": generate_command,
    "play": play_command,
    "analyze": analyze_command,
    "attack": attack_command,
    "bench": bench_command,
    "record": record_command,
    "reproduce": reproduce_command,
    "export": export_command,
    "convert": convert_command,
    "compare": compare_command,
    "list": list_command,
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0 done, 2 bad input, 1 a run that failed."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a screen of few characters costs no result
    try:
        command, options, keys = parse(sys.argv[1:] if argv is None else argv)
        with _safe_children(), notes_on_stderr():
            load_plugins(options.plugin)
            _require_plugins_of_run(getattr(options, "run", None) or getattr(options, "resume", None))
            with_keys = _WITH_KEYS.get(command)
            code = _COMMANDS[command](options) if with_keys is None else with_keys(options, keys)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        missing = install_hint(error, "kernel-attention")
        if missing is None:
            raise
        return _refuse(missing)
    except InputError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe; the rest of the buffer must go elsewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None:  # not an answer of the system
            raise
        return _refuse_place(error)
    return code


def _require_plugins_of_run(folder: Any) -> None:
    """InputError for a plugin that a run needs, before torch is imported, which takes seconds."""
    if not isinstance(folder, str) or not (path := Path(folder) / "config.yaml").is_file():
        return
    from kernel_attention_lab.plain_yaml import read_yaml

    keys = read_yaml(path)
    names = keys.get("plugins") if isinstance(keys, dict) else None
    if isinstance(names, list):
        require_plugins(map(str, names))


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _refuse_place(error: OSError) -> int:
    """Say what the system answered of a file, or of the working folder. Another answer is no bad input."""
    if error.filename is not None:
        name = error.filename
        return _refuse(f"{os.fsdecode(name) if isinstance(name, bytes) else name}: {error.strerror}")
    try:
        os.getcwd()
    except OSError as gone:
        return _refuse(f"the working folder cannot be used ({gone.strerror})")
    print(f"failed: {error.strerror}", file=sys.stderr)  # such as a full disk
    return 1


@contextmanager
def _safe_children() -> Iterator[None]:
    """Inside the block Python's processes search no working folder, as the installed command does not.

    A process that multiprocessing starts, or ``python -m``, would import the modules of the folder first.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)
        else:
            os.environ["PYTHONSAFEPATH"] = before
