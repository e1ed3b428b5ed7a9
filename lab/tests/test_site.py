"""The site: its navigation, the check of its links, and the workflow that publishes it."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WORKFLOW = ROOT / ".github" / "workflows" / "site.yml"


def configuration(monkeypatch, **variables: str):
    """mkdocs.yml as mkdocs reads it with these environment variables."""
    from mkdocs.config import load_config

    for name in ("OFFLINE", "VERSION_PROVIDER", "SITE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    return load_config(str(ROOT / "mkdocs.yml"))


def pages_of(navigation) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    entries = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for entry in entries for page in pages_of(entry)]


def test_every_page_is_in_the_navigation_once(monkeypatch):
    listed = pages_of(configuration(monkeypatch).nav)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_site_loads_its_own_files_only(monkeypatch):
    """Scripts, styles, fonts and licences lie in docs/, so that the site works without internet."""
    site = configuration(monkeypatch)
    assert site.theme["font"] is False
    loaded = [*site.extra_css, *map(str, site.extra_javascript), *site.extra["polyfills"]]
    assert all((DOCS / path).is_file() for path in loaded)
    assert all((DOCS / "assets" / library / "LICENSE").is_file() for library in ("katex", "iframe-worker"))
    katex = DOCS / "assets" / "katex"
    styles = (katex / "katex.min.css").read_text(encoding="utf-8")
    fonts = re.findall(r"url\((fonts/[^)]+\.woff2)\)", styles)
    assert fonts
    assert all((katex / font).is_file() for font in fonts)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("getting-started.md", "pip install ."),
        ("mechanisms/index.md#which-one-for-your-data", "## Which one for your data"),
        ("mechanisms/rpc.md#equations", "## Equations"),
        ("performance.md#primal-attention", "| primal (rank 30, eta 0.1) | 4096 |"),
    ],
)
def test_a_reader_finds_it_within_three_clicks(target, said, tool):
    """How to install, which mechanism to use, RPC's equation, the figure behind the home page's factor."""
    words = tool("words")
    assert target in words.TARGETS.values()
    assert (words.clicks(words.pages_now(), target) or 9) <= 3
    assert said in (DOCS / target.partition("#")[0]).read_text(encoding="utf-8")


def test_the_site_that_make_docs_writes_can_be_searched_from_disk(monkeypatch):
    config = configuration(monkeypatch)
    assert config.plugins["material/offline"].config.enabled
    assert config.use_directory_urls is False
    assert config.extra["version"]["provider"] == "none"
    assert {entry["scheme"] for entry in config.theme["palette"] if "scheme" in entry} == {"default", "slate"}


def test_the_published_site_has_versions():
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow[True] == {  # YAML reads the key `on` so
        "push": {"branches": ["main"], "tags": ["v*"]},
        "pull_request": None,
        "workflow_dispatch": None,
    }
    steps = workflow["jobs"]["site"]["steps"]
    (install,) = (step["run"] for step in steps if "pip install" in step.get("run", ""))
    extras = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(re.findall(r'"([^"]+)"', install)) == sorted(extras["optional-dependencies"]["docs"])
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in steps[3:5]:
        assert step["run"].removeprefix("python ") in make, "what the workflow checks, `make docs` checks"
    publish = steps[-1]
    assert publish["if"] == "github.event_name != 'pull_request'"
    assert "mike deploy" in publish["run"]


def test_versions_and_the_search_from_disk_exclude_one_another(monkeypatch):
    """Material's offline plugin says so; the workflow sets these variables."""
    steps = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["site"]["steps"]
    config = configuration(monkeypatch, **{**steps[-1]["env"], "SITE_URL": "https://example.org/ka/"})
    assert not config.plugins["material/offline"].config.enabled
    assert config.extra["version"] == {"provider": "mike", "default": "latest"}
    assert config.site_url == "https://example.org/ka/"


@pytest.fixture
def broken_links():
    return runpy.run_path(str(ROOT / "tools" / "links.py"))["broken_links"]


GOOD = {
    "index.html": """<h1 id="top">x</h1> <a href="deep/page.html#part">x</a> <a href="#top">x</a>
        <a href="deep">x</a> <a href="https://example.org">x</a> <img src="data:image/png;base64,">""",
    "deep/page.html": """<a name="part"></a> <a href="../index.html">x</a> <a href="/index.html#top">x</a>
        <a href=".">x</a> <script src="../a%20b.js"></script>""",
    "deep/index.html": "",
    "a b.js": "",
}


@pytest.mark.parametrize(
    ("tag", "complaint"),
    [
        ("", None),
        ('<a href="missing.html">x</a>', "index.html: missing.html: no such file"),
        ('<a href="deep/page.html#missing">x</a>', "index.html: deep/page.html#missing: no such anchor"),
        ('<a href="#missing">x</a>', "index.html: #missing: no such anchor"),
        ('<img src="missing.png">', "index.html: missing.png: no such file"),
        ('<script src="https://a.org/b"></script>', "index.html: https://a.org/b: loaded from elsewhere"),
        ('<link href="//a.org/b.css">', "index.html: //a.org/b.css: loaded from elsewhere"),
    ],
)
def test_the_checker_names_the_link_that_is_broken(broken_links, tmp_path, tag, complaint):
    for name, text in GOOD.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + (tag if name == "index.html" else ""), encoding="utf-8")
    assert broken_links(tmp_path) == ([complaint] if complaint else [])


def test_a_site_that_was_not_built_is_no_good_site(broken_links, tmp_path):
    assert broken_links(tmp_path) == [f"{tmp_path}: no pages"]
