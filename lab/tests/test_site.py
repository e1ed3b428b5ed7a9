"""The site: its navigation, the check of its links, and the workflow that publishes it."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def test_the_site_that_make_docs_writes_can_be_searched_from_disk(monkeypatch):
    config = configuration(monkeypatch)
    assert config.plugins["material/offline"].config.enabled
    assert config.use_directory_urls is False
    assert config.extra["version"]["provider"] == "none"
    assert {entry["scheme"] for entry in config.theme["palette"] if "scheme" in entry} == {"default", "slate"}


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
