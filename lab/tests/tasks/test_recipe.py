"""Recipes as files and as records: what is read, and what is refused in which words."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import yaml
from runs.small_runs import SMALL

from kernel_attention.errors import InputError
from kernel_attention_lab.plain_yaml import read_yaml
from kernel_attention_lab.runs import read_recipe
from kernel_attention_lab.runs.files import write_yaml
from kernel_attention_lab.tasks import Recipe


def test_a_recipe_survives_its_file(tmp_path):
    recipe = Recipe(**SMALL, learning_rate=1e-5, weight_decay=1e-12, seeds=[0, 2**32 - 1])
    write_yaml(tmp_path / "recipe.yaml", dataclasses.asdict(recipe))
    assert Recipe(**read_recipe(str(tmp_path / "recipe.yaml"))[1]) == recipe


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.1e-2", ".1e-2", "1.e-3", "+1e-3", "1.0e-03"])
def test_numbers_with_exponents_are_numbers(text, tmp_path):
    """YAML 1.1 takes most of these for words, which is no researcher's expectation."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"learning_rate: {text}\nattention: {{primal: {{eta: {text}}}}}\n")
    assert read_yaml(path) == {"learning_rate": 0.001, "attention": {"primal": {"eta": 0.001}}}


def test_words_that_look_like_numbers_stay_words(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("dataset: 1e3x\nattention: e3\n")
    assert read_yaml(path) == {"dataset": "1e3x", "attention": "e3"}


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("epochs", "abc", "a whole number"),
        ("epochs", 2.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("epochs", None, "a whole number"),
        ("epochs", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("dropout", "high", "a finite number"),
        ("learning_rate", float("nan"), "a finite number"),
        ("learning_rate", float("inf"), "a finite number"),
        ("learning_rate", 0, "above 0"),
        ("gradient_clip", -1, "at least 0"),
        ("norm_first", 1, "true or false"),
        ("dataset", 3, "a name"),
        ("protocol", "holdot", "one of holdout, paper"),
        ("optimizer", ["adam"], "one of radam, adam, adamw"),
        ("precision", 32, "one of auto, 32-true, bf16-mixed, 16-mixed"),
        ("seeds", 3, "whole numbers"),
        ("seeds", [0, 1.5], "whole numbers"),
        ("seeds", [], "one or more different whole numbers"),
        ("seeds", [1, 1], "one or more different whole numbers"),
        ("seeds", [-1], "between 0 and"),
        ("seeds", [2**32], "between 0 and"),
        ("validation_fraction", 1, "above 0 and below 1"),
        ("evaluate_every", 0, "at least 1"),
        ("threads", -1, "between 0 and 4096"),
        ("attention", "primel", "did you mean 'primal'"),
        ("attention", ["primal"], "num_layers=2"),
        ("attention", {"primal": {}, "softmax": {}}, "must be a name"),
        ("attention", None, "must be a name"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(key, value, accepted):
    with pytest.raises(InputError) as error:
        Recipe(**SMALL | {key: value})
    message = str(error.value)
    assert accepted in message
    assert "\n" not in message
    assert key in message or key == "attention"


def test_numbers_of_other_libraries_become_plain():
    recipe = Recipe(**SMALL | {"epochs": np.int64(4), "dropout": 0, "seeds": (np.int32(1), 2)})
    assert (type(recipe.epochs), type(recipe.dropout)) == (int, float)
    assert recipe.seeds == [1, 2]
    assert yaml.safe_load(yaml.safe_dump(dataclasses.asdict(recipe)))["seeds"] == [1, 2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected lines of the form key: value, found NoneType"),
        ("just words", "found str"),
        ("- a\n- b\n", "found list"),
        ("dataset: [", "not valid YAML"),
        ("dataset: a\n\tepochs: 3\n", "not valid YAML"),
        ("dataset: a\nepochs: 3\nepochs: 4\n", "'epochs' is given twice"),
        ("attention: {primal: {rank: 3, rank: 4}}\n", "'rank' is given twice"),
        ("dataset: a\nepoch: 3\n", "'epoch'; did you mean 'epochs'"),
        ("3: a\n", "unknown key"),
        ("[a]: 3\n", "not valid YAML"),
        ("dataset: !!python/object/apply:os.system ['touch executed']\n", "not valid YAML"),
        ("dataset: \x00\n", "not valid YAML"),
        pytest.param("[" * 1000, "not valid YAML", id="deep"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_one_line(text, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        read_recipe("bad.yaml")
    assert complaint in str(error.value)
    assert "bad.yaml" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00dataset")
    with pytest.raises(InputError, match="not valid YAML"):
        read_recipe(str(path))
