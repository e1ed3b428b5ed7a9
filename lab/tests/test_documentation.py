"""The site and the docstrings are readable: formulas render offline, references are Markdown."""

import ast
import functools
import importlib
import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from checkout import PACKAGES, ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
KATEX = DOCS / "assets" / "katex"

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_DISPLAYED = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<![\\$])\$(?=[^\s$])([^$]*?[^\s$\\])\$(?!\d)")
_MATHEMATICS = re.compile(r"^ {4}.*[Σ∑ᵀ½√‖⟨⊗∈₍←]", re.MULTILINE)
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


@functools.cache
def docstrings() -> list:
    """(where, docstring) of everything in the package."""
    found = []
    for path in sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None:
                    found.append((f"{name_of(path)}: {getattr(node, 'name', 'module')}", text))
    return found


def test_no_formula_stands_in_a_code_block_and_no_line_of_one_is_markdown():
    """A line that begins with an operator is a list or a heading to readers of Markdown that know no TeX."""
    for page in PAGES:
        assert _MATHEMATICS.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))) == [], name_of(page)
        for formula in _DISPLAYED.findall(prose(page)):
            assert re.findall(r"^[-+=#] ?.*", formula, re.MULTILINE) == [], name_of(page)


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


@pytest.mark.parametrize(
    "pattern", [_ROLE, re.compile(r"^(See\b|\w+; see\b)"), re.compile(r"^(What|Whether)\b")]
)
def test_docstrings_say_what_a_thing_is_or_does(pattern):
    """No Sphinx roles, which mkdocstrings and a terminal print raw; no reference alone; no riddle."""
    assert [where for where, text in docstrings() if pattern.search(text)] == []


def directives() -> list[tuple[str, str, dict]]:
    """(page, object, options) of every entry of the API pages."""
    found = []
    for page in sorted((DOCS / "api").glob("*.md")):
        for path, options in re.findall(
            r"^::: ([\w.]+)\n((?: {4}.*\n)*)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            found.append((name_of(page), path, (yaml.safe_load(options) or {}).get("options", {})))
    return found


def object_at(path: str) -> object:
    """What ``import`` and dots lead to; a function before the module it shares its name with."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError):
        return importlib.import_module(path)


def test_every_entry_of_the_api_exists_and_is_public():
    for page, path, options in directives():
        found = object_at(path)
        assert not any(part.startswith("_") for part in path.split(".")), path
        for name in options.get("members", []):
            assert hasattr(found, name), f"{page}: {path} has no {name}"
        if inspect.ismodule(found) and "members" not in options:
            assert hasattr(found, "__all__"), f"{page}: {path} without __all__ shows its internal helpers"


@pytest.mark.parametrize(
    "room",
    [
        *(
            f"kernel_attention.{room}"
            for room in ("analysis", "features", "functional", "hosts", "models", "solvers")
        ),
        *(
            f"kernel_attention_lab.{room}"
            for room in ("tasks", "runs", "data", "benchmarking", "reporting", "evidence")
        ),
        *(f"kernel_attention_lab.{room}" for room in ("robustness", "sweeping", "control")),
    ],
)
def test_the_api_pages_have_what_a_room_exports(room):
    """The entry of a package shows its ``__all__``, but for names that are its modules' names too."""
    package = importlib.import_module(room)
    entries = {path for _, path, _ in directives()}
    assert package.__name__ in entries
    folder = Path(package.__file__).parent if hasattr(package, "__path__") else None
    for name in package.__all__:
        if folder is not None and (folder / f"{name}.py").exists():
            assert f"{package.__name__}.{name}.{name}" in entries


def test_the_api_pages_have_every_name_of_the_top():
    import kernel_attention as ka

    entries = {path for _, path, _ in directives()}
    shown = {path.rpartition(".")[2] for path in entries} | {
        name for _, path, options in directives() for name in options.get("members", [])
    }
    for path in entries:
        found = object_at(path)
        if inspect.ismodule(found):
            shown |= set(getattr(found, "__all__", ()))
    assert set(ka.__all__) - shown - {"__version__"} == set()


def test_the_committed_tables_and_names_are_those_that_make_tables_writes(forks):
    """In a process of its own: here other tests may have registered mechanisms."""
    result = forks.run(str(ROOT / "tools" / "tables.py"), "--check")
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one; a module need not be importable here."""
    module, *parts = name.split(".")
    folder = PACKAGES[module]
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
    files = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "lab" / "recipes").rglob("*.yaml")]
    files += [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    names: dict[str, str] = {}
    for path in files:
        text = re.sub(r"^:::.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name in re.findall(r"\bkernel_attention(?:_lab)?(?:\.[A-Za-z_]\w*)+", text):
            names[name] = name_of(path)
        for name in re.findall(r"\bka((?:\.[A-Za-z_]\w*)+)", text):
            names[f"kernel_attention{name}"] = name_of(path)
    assert {name: where for name, where in names.items() if not _exists(name)} == {}
