"""A small, sound data set written as text, which each test damages in its own way."""

import os
import zipfile
from pathlib import Path

import pytest

HEADER = """# a comment
@problemName Toy
@timeStamps false
@missing false
@univariate false
@dimensions 2
@equalLength true
@seriesLength 3
@classLabel true Left Right
@data
"""
FIRST_LINE = HEADER.count("\n") + 1  # of the cases, counted from 1 as editors do
CASES = ["1,2,3:4,5,6:Left", "1,2,4:4,5,7:Right", "2,2,4:4,6,7:left", "0,-1e1,.5:1,2,3:right"]


def ts_text(cases=CASES, **changes):
    """The text of a file; `missing="true"` and the like replace a header value, None removes its line."""
    header = []
    for line in HEADER.splitlines():
        tag = line.split()[0].removeprefix("@").lower()
        if tag in changes and changes[tag] is None:
            continue
        header.append(f"@{tag} {changes[tag]}" if tag in changes else line)
    header[-1:-1] = [f"@{tag} {value}" for tag, value in changes.items() if tag == "targetlabel"]
    return "\n".join([*header, *cases]) + "\n"


class Toy:
    """Folder `root` with a set `Toy`; `write` replaces the text of one split."""

    cases = CASES
    first_line = FIRST_LINE
    text = staticmethod(ts_text)

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "Toy"
        self.folder.mkdir()
        self.write("TRAIN")
        self.write("TEST")

    def write(self, split, cases=CASES, **changes):
        path = self.folder / f"Toy_{split}.ts"
        path.write_text(ts_text(cases, **changes))
        return path

    def zip(self, prefix=""):
        path = self.root / "Toy.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for split in ("TRAIN", "TEST"):
                file = self.folder / f"Toy_{split}.ts"
                archive.write(file, f"{prefix}{file.name}")
                file.unlink()
        self.folder.rmdir()
        return path


@pytest.fixture(autouse=True)
def no_outside_folders(tmp_path_factory, monkeypatch):
    """No data root and an empty cache, unless a test asks for them."""
    empty = tmp_path_factory.mktemp("home")
    monkeypatch.delenv("KERNEL_ATTENTION_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty))
    # A download that a test causes by mistake must fail at once instead of waiting for a network.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    return empty


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)


_OUTSIDE = os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="session")
def outside_data():
    """The folder of real sets that are not bundled, where the machine has one."""
    root = Path(_OUTSIDE)
    if not (root / "uea").is_dir():
        pytest.skip(f"no folder uea in {root} (set KERNEL_ATTENTION_DATA to the folder of real data)")
    return root


@pytest.fixture
def run_python(forks):
    """Run code in a process that has imported torch alone, and return what it printed."""

    def run(code):
        done = forks.run("-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
