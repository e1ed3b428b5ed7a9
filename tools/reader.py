"""Do what the README says, as a stranger would: in a new environment, outside the checkout, step by step.

    python tools/reader.py                 # downloads what pip asks for
    python tools/reader.py --borrow        # takes the other packages of this Python, and no network
    python tools/reader.py --skip bench    # leaves out lines with this word

The lines of `git` and `pip` install; the blocks of Python and the lines of `kernel-attention` then run
in an empty folder, in their order. Where the README has no conversion, the first page that it links to and
that has one is read. Printed are the wall seconds of every step; the exit code is 1 where one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_STEP = re.compile(
    r"^```python\n(?P<python>.*?)^```"
    r"|^ {4}(?P<line>(?:git|pip|uv|cd|kernel-attention) [^\n]*)$"
    r"|^```(?:bash|sh|shell|console)\n(?P<shell>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
# What a reader must be able to do: a name, and the words by which its step is known.
NEEDED = {
    "install": "pip install",
    "example": "ka.",
    "classifier": "AttentionClassifier",
    "conversion": "convert_attention(",
    "recipe": "kernel-attention train",
}


@dataclass(frozen=True)
class Step:
    """One thing that the reader does: ``kind`` is "python" or "line"."""

    kind: str
    text: str

    @property
    def title(self) -> str:
        """A line by which a person knows the step."""
        if self.kind == "line":
            return self.text
        calls = [line for line in self.text.splitlines() if "ka." in line and "import" not in line]
        return f"python: {(calls or self.text.splitlines())[0].partition('#')[0].strip()}"


def steps_of(page: str) -> list[Step]:
    """The steps of a page in Markdown, in their order; comments of lines are left out."""
    found = []
    for match in _STEP.finditer(page):
        if match["python"]:
            found.append(Step("python", match["python"]))
            continue
        lines = (match["line"] or match["shell"]).splitlines()
        lines = [re.split(r"\s+#", line)[0].strip().removeprefix("$ ") for line in lines]
        found += [Step("line", line) for line in lines if line]
    return found


def missing(steps: list[Step]) -> list[str]:
    """The names in ``NEEDED`` that no step is known by."""
    return [name for name, words in NEEDED.items() if not any(words in step.text for step in steps)]


def completed(readme: Path, steps: list[Step]) -> list[Step]:
    """The steps and, for each name that is missing, the first step of a linked page that is known by it."""
    steps = list(steps)
    for name in missing(steps):
        for link in re.findall(r"\]\((?!\w+:)([^)#\s]+\.md)", readme.read_text(encoding="utf-8")):
            page = (readme.parent / link).read_text(encoding="utf-8")
            step = next((step for step in steps_of(page) if NEEDED[name] in step.text), None)
            if step is not None:
                print(f"{name}: not in {readme.name}, taken from {link}")
                steps.append(step)
                break
    return steps


class Reader:
    """A person with an empty folder and a new environment."""

    def __init__(self, folder: Path, borrow: bool) -> None:
        self.clone, self.desk = folder / "kernel-attention", folder / "desk"
        self.desk.mkdir(parents=True)
        environment = folder / "environment"
        options = ["--without-pip"] if borrow else []
        subprocess.run([sys.executable, "-m", "venv", *options, str(environment)], check=True)
        self.scripts = environment / ("Scripts" if os.name == "nt" else "bin")
        self.variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        self.variables["PATH"] = os.pathsep.join([str(self.scripts), os.environ["PATH"]])
        self.variables["VIRTUAL_ENV"] = str(environment)
        if (
            borrow
        ):  # a path in a .pth file brings the packages of that folder, and not what its own .pth files add
            scheme = {"base": str(environment), "platbase": str(environment)}
            site = Path(sysconfig.get_path("purelib", "venv", scheme))
            (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
            self.variables["PIP_NO_BUILD_ISOLATION"] = "0"  # pip's way to say: without isolation
            self.variables["PIP_NO_INDEX"] = "1"

    def does(self, step: Step, timeout: float) -> tuple[str | None, float]:
        """What went wrong, None where nothing did, and the seconds."""
        begin = time.perf_counter()
        try:
            if step.kind == "python":
                self._run([str(self.scripts / "python"), "-c", step.text], self.desk, timeout)
            else:
                for command in step.text.split("&&"):
                    self._line(shlex.split(command), timeout)
        except subprocess.CalledProcessError as error:
            return (error.stderr or error.stdout or "").strip()[-1500:], time.perf_counter() - begin
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:.0f} s", time.perf_counter() - begin
        return None, time.perf_counter() - begin

    def _line(self, words: list[str], timeout: float) -> None:
        if words[:2] == ["git", "clone"]:  # from this checkout, wherever it is published
            self._run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], self.desk, timeout)
        elif words[0] != "cd":
            installs = words[0] in ("pip", "uv")
            if installs and not self.clone.exists():
                self._line(["git", "clone"], timeout)
            self._run(words, self.clone if installs else self.desk, timeout)

    def _run(self, command: list[str], folder: Path, timeout: float) -> None:
        options = {"capture_output": True, "text": True, "check": True, "timeout": timeout}
        if command[0] == "pip":
            command = [str(self.scripts / "python"), "-m", *command]
        found = self.scripts / command[0]
        subprocess.run(
            [str(found) if found.exists() else command[0], *command[1:]],
            cwd=folder, env=self.variables, stdin=subprocess.DEVNULL, **options,
        )  # fmt: skip


def main() -> int:
    """Read, do, and print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--borrow", action="store_true", help="take the other packages of this Python")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="WORD", help="leave out lines with WORD"
    )
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of one step (1800)")
    arguments = parser.parse_args()
    steps = completed(arguments.readme, steps_of(arguments.readme.read_text(encoding="utf-8")))
    steps = [step for step in steps if not any(word in step.text for word in arguments.skip)]
    if absent := missing(steps):
        print(f"nothing says how to do this: {', '.join(absent)}")
    # Whoever reads installs first, wherever the lines stand.
    steps.sort(key=lambda step: not step.text.startswith(("git", "pip", "uv", "cd")))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="reader-") as folder:
        reader = Reader(Path(folder).resolve(), arguments.borrow)
        for step in steps:
            wrong, seconds = reader.does(step, arguments.timeout)
            print(f"{seconds:7.1f} s  {'' if wrong is None else 'FAILED  '}{step.title}", flush=True)
            if wrong is not None:
                failed += 1
                print(wrong, flush=True)
    return int(bool(failed or absent))


if __name__ == "__main__":
    sys.exit(main())
