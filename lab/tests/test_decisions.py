"""The decision table: what it says to take follows from the records, and it says so where there are none."""

from __future__ import annotations

import re
from pathlib import Path

from declared import draw, rows_of
from suite_records import write_suite_record

from kernel_attention_lab.evidence import Cell, read_suite
from kernel_attention_lab.evidence.pages import declarations
from kernel_attention_lab.tasks.sequence_labels import PositionRecipe

ROOT = Path(__file__).parents[2]
PAGE = "docs/mechanisms/index.md"
NOT_YET = "not measured yet; `softmax` until then"


def write(root, suite_name, row, column, seed=0, **figures):
    write_suite_record(root, read_suite(suite_name), row, column, seed, figures={"evaluation": figures})


def decisions(root):
    """The cells of each line by what the data are."""
    return {row[0]: row[1:] for row in rows_of(draw(PAGE, root, "decisions")[0]["decisions"])[1:]}


def test_without_records_nothing_is_decided(tmp_path):
    found = decisions(tmp_path)
    assert len(found) == 8 + 2 + 4 + 3 + 1 + 1
    assert {row[0] for row in found.values()} == {NOT_YET}
    assert all(row[3].startswith("[nothing yet](") for row in found.values())


def test_the_rows_within_a_point_of_the_best_are_taken(tmp_path):
    """On the hardest set: 64 pairs in 512 positions."""
    values = {"softmax": (0.99, 0.97), "sparse": (0.974, 0.97), "linear": (0.5, 0.5)}
    for row, seeds in values.items():
        for seed, value in enumerate(seeds):
            write(tmp_path, "abilities", row, "mqar", seed, accuracy=0.1, accuracy_length_512_items_64=value)
    row = decisions(tmp_path)["many keys, each asked for by name (associative recall)"]
    assert row == [
        "`softmax`, `sparse`", "length 512, items 64", "2 min",
        "[softmax 98.0, sparse 97.2, linear 50.0 %, 2 seeds](../abilities.md#multi-query-associative-recall)",
    ]  # fmt: skip


def test_one_seed_and_one_row(tmp_path):
    write(tmp_path, "equal_time", "softmax", "Image", accuracy=0.3)
    name = "images as pixels, as many steps as the time allows"
    assert decisions(tmp_path)[name] == [
        NOT_YET, "1,024 tokens", "40 min", "[softmax 30.0 %, 1 seed](../equal-time.md#image)"
    ]  # fmt: skip
    write(tmp_path, "equal_time", "linear", "Image", accuracy=0.4)
    assert decisions(tmp_path)[name][0] == "`linear` (by one seed)"


def test_a_smaller_perplexity_is_better(tmp_path):
    for seed in (0, 1):
        write(tmp_path, "kernel_pca_ptb", "symmetric", "PTB", seed, perplexity=130.0)
        write(tmp_path, "kernel_pca_ptb", "rpc_first_layer", "PTB", seed, perplexity=132.0)
    row = decisions(tmp_path)["text, word by word"]
    assert row[0] == "`symmetric`"
    assert row[3:] == ["[symmetric 130.0, rpc_first_layer 132.0, 2 seeds](../reproduction.md)"]


def test_every_task_has_a_line_and_every_link_a_heading(tmp_path):
    (declared,) = (each for each in declarations(ROOT) if each["mark"] == "decisions")
    columns = [(each["suite"], each.get("column")) for each in declared["sources"] if "suite" in each]
    for suite in ("abilities", "equal_time"):
        assert [column for name, column in columns if name == suite] == list(read_suite(suite).columns)
    for _, _, _, said in decisions(tmp_path).values():
        path, _, anchor = re.search(r"\]\((.*)\)", said)[1].partition("#")
        text = (ROOT / "docs/mechanisms" / path).resolve().read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
        assert not anchor or anchor in [re.sub(r"[ -]+", "-", slug) for slug in slugs], said


def test_lengths_are_those_of_the_recipes():
    suite = read_suite("equal_time")
    recipes = {column: suite.recipe(Cell("softmax", column, 0))[1] for column in suite.columns}
    assert recipes["Text"].max_len == 2048
    assert [recipes[column].dataset for column in suite.columns] == [
        "lra/image", "lra/text", "listops_100", "pathfinder16"
    ]  # fmt: skip
    abilities = read_suite("abilities")
    for column in abilities.columns:
        recipe = abilities.recipe(Cell("softmax", column, 0))[1]
        assert isinstance(recipe, PositionRecipe)
        hardest = list(recipe.test_tasks().values())[-1]
        for task in recipe.test_tasks().values():
            assert (task.length, getattr(task, "contamination", 0)) <= (
                hardest.length, getattr(hardest, "contamination", 0)
            )  # fmt: skip
