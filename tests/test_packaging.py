"""What a user installs: the wheel holds recipes and templates, built from the clone or from the sdist."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(source: Path, target: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_sdist_builds_the_wheel_of_the_clone(tmp_path):
    from_clone = contents(build(ROOT, "wheel", tmp_path / "clone"))
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        # Python 3.11.0 to 3.11.3 knows neither the filter nor the argument for it.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(build(unpacked, "wheel", tmp_path / "again")) == from_clone

    recipes = {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert recipes
    assert {f"kernel_attention/{recipe}" for recipe in recipes} <= from_clone
    assert "kernel_attention/py.typed" in from_clone
    templates = ROOT / "src" / "kernel_attention" / "experiments" / "reporting" / "templates"
    assert {str(path.relative_to(ROOT / "src")) for path in templates.iterdir()} <= from_clone
