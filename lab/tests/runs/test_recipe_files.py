"""Files of recipes: one recipe, or a family as a table; what is read, printed and refused."""

from __future__ import annotations

import pytest

from kernel_attention.errors import InputError
from kernel_attention_lab.arguments import parse
from kernel_attention_lab.runs import list_recipes, read_recipe, recipe_text
from kernel_attention_lab.tasks import make_recipe

FAMILY = """\
# Small models.
#
#   kernel-attention train family.yaml/NAME
dataset: Waves
attention: {primal: {rank: 3, eta: 0.1}}  # the paper's
# Width and layers are ours.
embed_dim: 8
num_heads: 2
recipes:
  # Not about one of them.
  wide:
    # Reported: 98.1.
    embed_dim: 16
  # The next has more layers.
  deep:
    # It needs an hour.
    attention:
    - softmax
    # NAME begins with softmax.
    - primal: {rank: 4}
    - softmax
    num_layers: 3
  words: {task: language, dataset: ptb}
threads: 1
"""


@pytest.fixture
def family(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "family.yaml").write_text(FAMILY)
    return "family.yaml"


def test_a_key_of_an_entry_replaces_the_familys(family):
    common = {"dataset": "Waves", "embed_dim": 8, "num_heads": 2, "threads": 1}
    primal = {"primal": {"rank": 3, "eta": 0.1}}
    assert read_recipe(f"{family}/wide") == ("wide", common | {"attention": primal, "embed_dim": 16})
    layers = ["softmax", {"primal": {"rank": 4}}, "softmax"]  # without the family's eta
    assert read_recipe(f"{family}/deep") == ("deep", common | {"attention": layers, "num_layers": 3})


def test_what_is_read_can_be_changed(family):
    for name in (f"{family}/wide", "uea/japanese_vowels"):
        before = read_recipe(name)[1]
        read_recipe(name)[1]["attention"]["primal"]["rank"] = 10**6
        assert read_recipe(name)[1] == before


def test_the_text_of_a_recipe_has_its_comments_and_all_keys(family):
    assert (
        recipe_text(f"{family}/deep")
        == """\
# Small models.
#
#   kernel-attention train family.yaml/deep
# Width and layers are ours.
# Not about one of them.
#
# It needs an hour.
# deep begins with softmax.
dataset: Waves
attention: [softmax, {primal: {rank: 4}}, softmax]
embed_dim: 8
num_heads: 2
num_layers: 3
threads: 1
"""
    )
    assert "# Reported: 98.1.\n" in recipe_text(f"{family}/wide")
    assert "next" not in recipe_text(f"{family}/wide")


def test_the_text_of_a_recipe_with_a_file_of_its_own_is_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("threads: 1  # few\ndataset: Waves\n")
    assert recipe_text(str(path)) == path.read_text()


def test_the_text_of_a_shipped_recipe_is_that_recipe(tmp_path):
    for name in list_recipes():
        text = recipe_text(name)
        assert text.startswith("# "), name
        (tmp_path / "copy.yaml").write_text(text)
        short, keys = read_recipe(str(tmp_path / "copy.yaml"))
        assert short == "copy"
        assert make_recipe(keys) == make_recipe(read_recipe(name)[1]), name


def test_the_options_are_those_of_the_entrys_task(family):
    assert parse(["train", f"{family}/words", "--context", "9"]).keys == {"context": 9}
    assert parse(["train", "--threads", "1", f"{family}/wide", "--views", "raw"]).keys["views"] == ["raw"]
    with pytest.raises(InputError, match="no option --context"):
        parse(["train", f"{family}/wide", "--context", "9"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "family.yaml",
            "recipe family.yaml is a family: give one of its recipes, such as family.yaml/wide "
            "(accepted: wide, deep, words)",
        ),
        (
            "uea",
            "recipe uea is a family: give one of its recipes, such as uea/ethanol_concentration (accepted",
        ),
        (
            "family.yaml/wid",
            "unknown recipe of family.yaml 'wid'; did you mean 'wide' or 'words'? (accepted: deep, wide",
        ),
        ("family.yaml/", "is a family: give one of its recipes"),
        ("uea/handwritng", "unknown recipe 'uea/handwritng'; did you mean 'uea/handwriting'"),
        ("single.yaml/wide", "single.yaml holds one recipe (accepted: single.yaml)"),
        ("nothing.yaml/wide", "unknown recipe 'nothing.yaml/wide'"),
        ("suites/recall", "unknown recipe 'suites/recall'"),
        ("family.yaml/wide/more", "unknown recipe 'family.yaml/wide/more'"),
    ],
)
def test_a_name_that_is_no_recipe(name, message, family, tmp_path):
    (tmp_path / "single.yaml").write_text("dataset: Waves\n")
    for reads in (read_recipe, recipe_text):
        with pytest.raises(InputError) as error:
            reads(name)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipes: [a]\n", "bad.yaml: recipes must be a mapping from names to keys, found ['a']"),
        ("recipes:\n", "bad.yaml: recipes must be a mapping from names to keys, found None"),
        ("recipes: {}\n", "bad.yaml: recipes must be a mapping from names to keys, found {}"),
        ("recipes: {a: {}, b: softmax}\n", "bad.yaml: recipe b must have lines of the form key: value"),
        ("recipes:\n  a:\n", "bad.yaml: recipe a must have lines of the form key: value, found None"),
        ("recipes: {3: {}}\n", "bad.yaml: recipe 3 must be letters, digits and . _ + -"),
        ("recipes: {x/y: {}}\n", "bad.yaml: recipe 'x/y' must be letters, digits and . _ + -"),
        ("recipes: {a: {}, a: {}}\n", "'a' is given twice"),
        ("epoch: 3\nrecipes: {a: {}}\n", "unknown key of bad.yaml/a 'epoch'; did you mean 'epochs'"),
        ("recipes: {a: {epoch: 3}}\n", "unknown key of bad.yaml/a 'epoch'; did you mean 'epochs'"),
        ("context: 3\nrecipes: {a: {}}\n", "unknown key of bad.yaml/a 'context'"),
        ("recipes: {a: {task: images, recipes: {}}}\n", "unknown key of bad.yaml/a 'recipes'"),
        ("recipes: {a: {task: imges}}\n", "unknown task 'imges'; did you mean 'images'"),
    ],
)  # fmt: skip
def test_a_wrong_family_is_refused_in_one_line(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        read_recipe("bad.yaml/a")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
