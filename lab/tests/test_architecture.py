"""The page of the architecture names the rooms that exist, in the order of the import contract."""

from __future__ import annotations

import re
import tomllib

import pytest
from checkout import PACKAGES, ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]


def contract(name: str) -> dict:
    """The import contract whose name begins so."""
    return next(each for each in CONTRACTS if each["name"].startswith(name))


def modules_of(package: str, room: str = "") -> set[str]:
    """The modules and packages of a folder of a package, private ones apart."""
    folder = PACKAGES[package] / room
    found = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    return {name for name in found if not name.startswith("_")}


def rooms_of(layers: list[str]) -> list[str]:
    """The modules of a contract's layers, in their order."""
    return [room.strip() for layer in layers for room in layer.split("|")]


def test_the_rooms_of_the_page_are_those_of_the_contract_and_of_the_package():
    headings = re.findall(r"^## `(\w+)`: \S", PAGE, re.MULTILINE)
    assert headings == re.findall(r"^## `?(\w+)", PAGE, re.MULTILINE), "a heading that names no room"
    assert headings == ["kernel_attention_lab", *rooms_of(contract("Arrows")["layers"])]
    assert set(headings[1:]) == modules_of("kernel_attention")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_is_read_at_a_glance(package):
    """At most 16 modules; one solver, one file."""
    root = PACKAGES[package]
    folders = [path.parent for path in root.rglob("__init__.py")]
    sizes = {str(folder.relative_to(root)): len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert len(sizes) > 10
    assert {name: size for name, size in sizes.items() if size > 16 and name != "solvers"} == {}


def test_no_file_of_either_package_is_left_out_of_the_contract_against_circles():
    assert set(contract("No circle")["ancestors"]) == set(PACKAGES)


def test_the_order_within_the_laboratory_is_the_contracts():
    assert set(rooms_of(contract("The laboratory")["layers"])) == modules_of("kernel_attention_lab")
    order = rooms_of(contract("The laboratory")["layers"])
    section = PAGE.partition("## `kernel_attention_lab`")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", section.partition("Inside,")[2])
    assert [order.index(name) for name in named] == sorted(order.index(name) for name in named)
    assert len(named) > 4


def test_what_a_family_is_built_on_is_in_its_docstring_and_in_the_picture():
    picture = (ROOT / "docs" / "figures" / "architecture.svg").read_text(encoding="utf-8")
    families = modules_of("kernel_attention", "mechanisms")
    assert all(re.search(rf"\b{family}\b", picture) for family in families)
    for entry in contract("Families")["ignore_imports"]:
        above, below = re.findall(r"mechanisms\.(\w+)", entry)
        assert {above, below} <= families
        package = ROOT / "src" / "kernel_attention" / "mechanisms" / above / "__init__.py"
        stated = package.read_text(encoding="utf-8").split('"""')[1]
        assert below.replace("_", " ") in stated, (
            f"{above} is built on {below}, which its docstring does not say"
        )
