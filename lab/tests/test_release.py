"""One version and one address, written by tools/release.py; workflows and forms that name what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from checkout import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ADDRESS = "https://github.com/someone/kernel-attention"
FILES = (
    *(
        "src/kernel_attention/version.py",
        "pyproject.toml",
        "lab/pyproject.toml",
        "CITATION.cff",
        "CHANGELOG.md",
        "mkdocs.yml",
    ),
    *(
        "conda.recipe/recipe.yaml",
        "README.md",
        "lab/README.md",
        "docs/getting-started.md",
        "notebooks/layer.ipynb",
    ),
)


@pytest.fixture
def release(tool):
    return tool("release")


@pytest.fixture
def copy(tmp_path):
    """The files of the checkout that name the version or the address."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def contents(folder) -> dict[str, str]:
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}


def test_all_places_have_one_version(release):
    (version,) = set(release.versions(ROOT).values())
    release.check_version(ROOT, f"v{version}")


def test_a_new_version_is_written_everywhere_and_a_wrong_tag_refused(release, copy):
    release.set_version(copy, "1.2.0rc1")
    assert set(release.versions(copy).values()) == {"1.2.0rc1"}
    with pytest.raises(release.ReleaseError, match=r'CHANGELOG.md has no heading "## 1.2.0rc1"'):
        release.check_version(copy, "v1.2.0rc1")
    with pytest.raises(
        release.ReleaseError, match=r"the tag is v1.2.0, CITATION.cff: version: says 1.2.0rc1"
    ):
        release.check_version(copy, "v1.2.0")
    with pytest.raises(release.ReleaseError, match=r"version='1\.2' must look like"):
        release.set_version(copy, "1.2")


def test_the_address_is_in_no_file_until_a_host_says_it(release, copy):
    before = contents(copy)
    assert not [name for name, text in before.items() if "[project.urls]" in text or "repo_url:" in text]
    release.set_address(copy, ADDRESS)
    after = contents(copy)
    for name in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads(after[name])["project"]
        assert project["urls"]["Repository"] == ADDRESS
        assert project["urls"]["Documentation"] == "https://someone.github.io/kernel-attention/"
        assert {**project, "urls": None} == {**tomllib.loads(before[name])["project"], "urls": None}
    assert yaml.safe_load(after["CITATION.cff"])["repository-code"] == ADDRESS
    assert yaml.safe_load(after["conda.recipe/recipe.yaml"])["about"]["repository"] == ADDRESS
    assert f"\nrepo_url: {ADDRESS}\n" in after["mkdocs.yml"]
    assert "git clone URL" not in after["README.md"]
    first = json.loads(after["notebooks/layer.ipynb"])["cells"][0]["source"][0]
    assert first.endswith("/github/someone/kernel-attention/blob/main/notebooks/layer.ipynb)\n")

    release.set_address(copy, ADDRESS + "/")
    assert contents(copy) == after, "twice is once"
    release.set_address(copy, "https://github.com/other/fork")
    assert not [name for name, text in contents(copy).items() if "someone" in text]
    with pytest.raises(release.ReleaseError, match=r"address='github\.com' must look like"):
        release.set_address(copy, "github.com")


def test_the_readme_of_a_released_package_has_absolute_links(release, copy):
    release.set_address(copy, ADDRESS, tag="v9.0.0")
    for name in ("README.md", "lab/README.md"):
        text = contents(copy)[name]
        links = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'src="([^"]+)', text)
        assert len(links) > 2
        assert [link for link in links if not link.startswith(("https://", "#"))] == []
    pictures = re.findall(r'src="([^"]+)', contents(copy)["README.md"])
    assert all(picture.startswith(f"{ADDRESS}/raw/v9.0.0/docs/") for picture in pictures)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_files_and_targets_that_exist(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"], "the least that it needs"
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in commands:
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= set(targets)
        assert all((ROOT / name).exists() for name in re.findall(r"\btools/\w+\.py", command))
    for needed in (need for job in workflow["jobs"].values() for need in [job.get("needs")] if need):
        assert needed in workflow["jobs"]


def test_the_oldest_python_and_torch_that_are_tested_are_those_that_are_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    rows = workflow["jobs"]["library"]["strategy"]["matrix"]["include"]
    (torch,) = (need.partition(">=")[2] for need in project["dependencies"] if need.startswith("torch"))
    oldest = [row for row in rows if row["torch"] == f"{torch}.0"]
    assert [f">={row['python']}" for row in oldest] == [project["requires-python"]]
    assert {row["os"].partition("-")[0] for row in rows} == {"ubuntu", "macos", "windows"}


def test_a_release_is_uploaded_without_a_password_after_it_was_tried():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` so
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["strategy"]["matrix"]["package"] == ["library", "laboratory"]
    assert (publish["needs"], workflow["jobs"]["try"]["needs"]) == ("try", "build")
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")


def test_the_change_log_of_a_release_is_read_at_a_glance():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert re.fullmatch(
        r"Unreleased|\d+\.\d+\.\d+\S* - (\d{4}-\d\d-\d\d|unreleased)", sections[0].partition("\n")[0]
    )
    for section in sections:
        assert len(section.strip().splitlines()) <= 30, section.partition("\n")[0]


README = """
    git clone URL place && cd place
    pip install .   # the layers

```python
import kernel_attention as ka
clf = ka.AttentionClassifier()  # a comment
```

```bash
$ kernel-attention train demo
```

[a trained model](page.md)
"""


def test_a_reader_finds_the_steps_of_a_page_and_of_what_it_links_to(tool, tmp_path, capsys):
    reader = tool("reader")
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    (tmp_path / "page.md").write_text("```python\nka.convert_attention(model)\n```\n", encoding="utf-8")
    steps = reader.steps_of(README)
    assert [step.title for step in steps] == [
        "git clone URL place && cd place",
        "pip install .",
        "python: clf = ka.AttentionClassifier()",
        "kernel-attention train demo",
    ]
    assert reader.missing(steps) == ["conversion"]
    steps = reader.completed(tmp_path / "README.md", steps)
    assert steps[-1].title == "python: ka.convert_attention(model)"
    assert reader.missing(steps) == []
    assert "not in README.md, taken from page.md" in capsys.readouterr().out


def test_the_readme_says_how_to_install_use_classify_convert_and_train(tool):
    reader = tool("reader")
    path = ROOT / "README.md"
    assert reader.missing(reader.completed(path, reader.steps_of(path.read_text(encoding="utf-8")))) == []


@pytest.mark.slow
def test_a_stranger_does_what_the_readme_says(tool):
    """In a new environment outside the checkout, with the packages of this one."""

    command = [sys.executable, str(ROOT / "tools/reader.py"), "--borrow", "--skip", "bench"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
