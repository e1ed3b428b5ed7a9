"""The site and the docstrings are readable: formulas render offline, references are Markdown."""

import ast
import importlib
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
KATEX = DOCS / "assets" / "katex"

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_DISPLAYED = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<![\\$])\$(?=[^\s$])([^$]*?[^\s$\\])\$(?!\d)")
_MATHEMATICS = re.compile(r"^ {4}.*[Σ∑ᵀ½√‖⟨⊗∈₍←]", re.MULTILINE)
# Their docstrings still have Sphinx roles.
_UNCONVERTED = {"cli.py", "data", "reporting", "solvers", "training"}
_ROLE = re.compile(r":(func|class|meth|mod|attr|data|obj|exc):`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its code."""
    return _CODE.sub("", _FENCED.sub("", page.read_text(encoding="utf-8")))


def formulas() -> list[dict]:
    found = []
    for page in PAGES:
        text = prose(page)
        for display, pattern in ((True, _DISPLAYED), (False, _INLINE)):
            for tex in pattern.findall(text):
                found.append({"page": name_of(page), "display": display, "tex": tex})
            text = pattern.sub("", text)
        assert "$" not in text, f"{name_of(page)}: a dollar sign that opens no formula, or closes none"
    return found


def docstrings() -> list:
    """(where, docstring) of everything in the converted part of the package."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        if _UNCONVERTED & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None:
                    found.append((f"{name_of(path)}: {getattr(node, 'name', 'module')}", text))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_formula_stands_in_a_code_block(page):
    assert _MATHEMATICS.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_of_a_formula_is_markdown(page):
    """A line that begins with an operator is a list or a heading to readers of Markdown that know no TeX."""
    for formula in _DISPLAYED.findall(prose(page)):
        assert re.findall(r"^[-+=#] ?.*", formula, re.MULTILINE) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="KaTeX runs in node")
def test_every_formula_renders():
    """By the KaTeX that the site loads, which refuses what it does not know."""
    script = """
        const katex = require(process.argv[1])
        const refused = []
        for (const { page, tex, display } of JSON.parse(require("fs").readFileSync(0))) {
          try { katex.renderToString(tex, { displayMode: display, throwOnError: true, strict: "error" }) }
          catch (error) { refused.push(`${page}: ${error.message}`) }
        }
        console.log(JSON.stringify(refused))
    """
    found = formulas()
    command = ["node", "-e", script, str(KATEX / "katex.min.js")]
    printed = subprocess.run(
        command, input=json.dumps(found), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert len(found) > 100
    assert json.loads(printed) == []


def test_the_site_loads_its_own_files_only():
    """Scripts, styles, fonts and licences lie in docs/, so that the site works without internet."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site["theme"]["font"] is False
    loaded = [*site["extra_css"], *site["extra_javascript"], *site["extra"]["polyfills"]]
    assert all((DOCS / path).is_file() for path in loaded)
    assert all((DOCS / "assets" / library / "LICENSE").is_file() for library in ("katex", "iframe-worker"))
    styles = (KATEX / "katex.min.css").read_text(encoding="utf-8")
    fonts = re.findall(r"url\((fonts/[^)]+\.woff2)\)", styles)
    assert fonts
    assert all((KATEX / font).is_file() for font in fonts)


def test_docstrings_hold_no_sphinx_roles():
    """Mkdocstrings and a terminal print them raw."""
    assert [where for where, text in docstrings() if _ROLE.search(text)] == []


def test_no_docstring_only_points_elsewhere():
    assert [where for where, text in docstrings() if re.fullmatch(r"See [^.]*\.?", text)] == []


def test_the_picture_of_the_readme_is_drawn_from_the_performance_page(tmp_path, monkeypatch):
    script = ROOT / "benchmarks" / "length_figure.py"
    picture = tmp_path / "picture.svg"
    monkeypatch.setattr("sys.argv", [str(script), "--out", str(picture)])
    names = runpy.run_path(str(script), run_name="__main__")
    table = names["steps"]((DOCS / "performance.md").read_text(encoding="utf-8"))
    for contender in names["LINES"]:
        assert [tokens for tokens, _ in table[contender]] == [256, 1024, 4096]
    assert picture.read_text(encoding="utf-8").count("<svg") == 1


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one; a module need not be importable here."""
    folder, module, parts = ROOT / "src" / "kernel_attention", "kernel_attention", name.split(".")[1:]
    while parts and ((folder / f"{parts[0]}.py").is_file() or (folder / parts[0] / "__init__.py").is_file()):
        folder, module, parts = folder / parts[0], f"{module}.{parts[0]}", parts[1:]
    if not parts:
        return True
    found = importlib.import_module(module)
    for part in parts:
        if not hasattr(found, part):
            return part in getattr(found, "__annotations__", {})
        found = getattr(found, part)
    return True


def test_dotted_names_of_the_package_exist():
    """In pages, docstrings and comments. (The site's build checks the ``:::`` lines of the API pages.)"""
    files = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").rglob("*.yaml")]
    names: dict[str, str] = {}
    for path in files:
        text = re.sub(r"^:::.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name in re.findall(r"\bkernel_attention(?:\.[A-Za-z_]\w*)+", text):
            names[name] = name_of(path)
        for name in re.findall(r"\bka((?:\.[A-Za-z_]\w*)+)", text):
            names[f"kernel_attention{name}"] = name_of(path)
    assert {name: where for name, where in names.items() if not _exists(name)} == {}
