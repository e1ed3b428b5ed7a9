"""What a user installs: the wheel holds recipes and templates, built from the clone or from the sdist."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from importlib.metadata import packages_distributions
from pathlib import Path
from runpy import run_path

import pytest
import yaml
from checkout import PACKAGES, ROOT

_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LARGEST_WHEEL = 700_000  # bytes


def build(source: Path, target: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Message:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    return message_from_string(zipfile.ZipFile(wheel).read(name).decode())


def test_the_sdist_builds_the_wheel_of_the_clone(tmp_path):
    wheel = build(ROOT, "wheel", tmp_path / "clone")
    from_clone = contents(wheel)
    largest = max(zipfile.ZipFile(wheel).infolist(), key=lambda member: member.file_size)
    assert largest.file_size < 1e5, f"a wheel is code, recipes and templates; {largest.filename} is none"
    assert wheel.stat().st_size < LARGEST_WHEEL
    said = metadata(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert said["Version"] == run_path(str(ROOT / "src/kernel_attention/version.py"))["__version__"]
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert said["Requires-Python"] == ">=3.11"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert set(said.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert said["Author"]
    assert said["Keywords"]
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        # Python 3.11.0 to 3.11.3 knows neither the filter nor the argument for it.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(build(unpacked, "wheel", tmp_path / "again")) == from_clone

    assert "kernel_attention/py.typed" in from_clone
    assert not [name for name in from_clone if "kernel_attention_lab" in name]


def test_the_wheel_of_the_laboratory_has_recipes_and_templates(tmp_path):
    wheel = build(ROOT / "lab", "wheel", tmp_path)
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said, found = metadata(wheel), contents(wheel)
    assert wheel.stat().st_size < LARGEST_WHEEL
    version = run_path(str(ROOT / "src/kernel_attention/version.py"))["__version__"]
    assert said["Version"] == project["version"] == version
    assert any(entry.endswith(f"=={version}") for entry in said.get_all("Requires-Dist"))
    recipes = {str(path.relative_to(ROOT / "lab")) for path in (ROOT / "lab" / "recipes").rglob("*.yaml")}
    assert recipes
    assert {f"kernel_attention_lab/{recipe}" for recipe in recipes} <= found
    templates = PACKAGES["kernel_attention_lab"] / "reporting" / "templates"
    assert {str(path.relative_to(ROOT / "lab" / "src")) for path in templates.iterdir()} <= found


def imported_packages(folder: Path) -> set[str]:
    """The top-level names of other people's packages in the source, those imported inside functions too."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - set(PACKAGES)


def projects() -> dict[str, dict]:
    """The section ``project`` of both packages."""
    files = {"kernel_attention": ROOT / "pyproject.toml", "kernel_attention_lab": ROOT / "lab/pyproject.toml"}
    return {name: tomllib.loads(path.read_text(encoding="utf-8"))["project"] for name, path in files.items()}


# Triton comes with the CUDA builds of torch; PyTorch Lightning has the loggers of two services.
# OpenCV comes with the library of the corruptions; which of its builds, the machine decides.
BROUGHT = {"triton", "pytorch-lightning", "pytorch_lightning", "opencv-python", "opencv-python-headless"}
# Fabric and PyTorch's exporter import the first two, `replace_attention` knows the others' modules by name.
NOT_IMPORTED = {"tensorboardx", "onnx", "timm", "torchvision"}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_declared_is_what_the_source_imports(package):
    def names(lists: list[list[str]]) -> set[str]:
        """The distributions, and the extras asked of them: gymnasium[mujoco] brings mujoco."""
        return {
            name.lower()
            for entries in lists
            for entry in entries
            for name in re.findall(r"[\w-]+", re.split(r"[<>=!~;]", entry)[0])
        }

    project = projects()[package]
    extras = {
        name: entries
        for name, entries in project["optional-dependencies"].items()
        if name not in {"test", "docs", "bench", "all"}
    }
    declared = names([project["dependencies"], *extras.values()])
    if package == "kernel_attention_lab":
        library = projects()["kernel_attention"]
        below = names([library["dependencies"], library["optional-dependencies"]["estimators"]])
        below |= names([library["optional-dependencies"]["export"]])
    else:
        below = set()
    distributions = packages_distributions()
    imported = set()
    for found in imported_packages(PACKAGES[package]):
        # Several distributions may share a package, as mujoco and mujoco-core do: a declared one counts.
        owners = [name.lower() for name in distributions.get(found, [found])]
        imported.add(next((name for name in owners if name in declared | below), owners[0]))
    ours = {"kernel-attention", "estimators", "export", "parquet"}
    assert declared - NOT_IMPORTED - ours <= imported
    assert imported - BROUGHT <= declared | below


# What conda-forge calls otherwise, and the extras whose packages it lacks or users do not need.
CONDA_NAMES = {
    "torch": "pytorch",
    "lightning-fabric": "pytorch-lightning",  # which brings it
    "matplotlib": "matplotlib-base",
    "tensorboardX": "tensorboardx",
}
NOT_FOR_CONDA = {"robustness", "bench", "docs", "test", "all"}


def conda_spec(requirement: str) -> str:
    """``gymnasium[mujoco]>=1.1; marker`` -> ``gymnasium >=1.1``."""
    name, limits = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?([^;]*)(?:;.*)?", requirement).groups()
    return f"{CONDA_NAMES.get(name, name)} {limits.strip()}".strip()


def test_the_conda_recipe_and_the_citation_say_what_the_project_says():
    recipe = yaml.safe_load((ROOT / "conda.recipe" / "recipe.yaml").read_text(encoding="utf-8"))
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, python = pyproject["project"], f"python {pyproject['project']['requires-python']}"
    laboratory = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scripts = laboratory["scripts"]
    version = run_path(str(ROOT / "src/kernel_attention/version.py"))["__version__"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (recipe["context"]["version"], citation["version"]) == (version, version)
    assert recipe["package"]["name"] == project["name"]
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (
        project["description"],
        project["license"],
    )
    assert recipe["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in scripts.items()]
    needs = recipe["requirements"]
    assert needs["host"] == [python, "pip", *map(conda_spec, pyproject["build-system"]["requires"])]
    assert needs["run"] == [python, *map(conda_spec, project["dependencies"])]
    optional = {
        conda_spec(requirement)
        for each in (project, laboratory)
        for extra, requirements in each["optional-dependencies"].items()
        if extra not in NOT_FOR_CONDA
        for requirement in requirements
    } | {conda_spec(requirement) for requirement in laboratory["dependencies"]}
    optional = {spec for spec in optional if not spec.startswith("kernel-attention")}
    assert set(needs["run_constraints"]) == {spec for spec in optional if " " in spec}


def test_the_folders_and_files_that_make_names_exist():
    """Pytest runs nothing at all where one of its arguments is missing."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/])(?:lab/)?(?:tests|tools|benchmarks)(?:/[\w-]+)+(?:\.py)?", text))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_sdist_has_what_git_has():
    """Folders and files of the top; what is left out is the machinery of the clone."""
    sdist = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"][
        "targets"
    ]["sdist"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no clone")
    top = {name.partition("/")[0] for name in tracked.stdout.splitlines()}
    brought = {"README.md", "LICENSE", "pyproject.toml", ".gitignore"}  # by hatchling
    assert top - {name.strip("/") for name in sdist["include"]} - brought == {
        ".ci",
        ".gitattributes",
        ".pre-commit-config.yaml",
    }


@pytest.mark.slow
def test_both_wheels_are_installed_outside_the_checkout_and_the_quick_start_runs(tmp_path):
    site = tmp_path / "site"
    for name, source in (("library", ROOT), ("laboratory", ROOT / "lab")):
        wheel = build(source, "wheel", tmp_path / name)
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(wheel),
        ]
        subprocess.run(install, check=True, capture_output=True, text=True)
    # -S: no .pth file is read, so that the editable packages of this environment are not there.
    others = str(Path(pytest.__file__).parents[1])

    paths = f"import sys; sys.path[:] = [{str(site)!r}, *sys.path, {others!r}]; "
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-S", "-c", paths + program, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for package in PACKAGES:
        assert str(site) in run(f"import {package}; print({package}.__file__)")
    quick = _PYTHON.search((ROOT / "README.md").read_text(encoding="utf-8"))[1]
    run(f"exec({quick!r})")
    command = "from kernel_attention_lab.cli import main; sys.argv[0] = 'kernel-attention'; sys.exit(main())"
    assert "primal" in run(command, "list")
    assert "accuracy" in run(command, "train", "demo", "--epochs", "4", "--output", "run")
    assert (tmp_path / "run" / "report.html").is_file()
