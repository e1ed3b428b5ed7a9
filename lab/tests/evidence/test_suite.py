"""Suites: every shipped one is complete, and a wrong one is refused with one line."""

from __future__ import annotations

import re
import statistics

import pytest
import yaml

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence.suite import Cell, Suite, list_suites, read_suite
from kernel_attention_lab.runs import list_recipes, read_recipe, recipe_text
from kernel_attention_lab.tasks import PROTOCOLS

SMALL = {
    "title": "Two rows",
    "source": "none",
    "records": "small",
    "columns": {"vowels": "demo", "waves": "uea/japanese_vowels"},
    "rows": {"softmax": {"attention": "softmax"}, "primal": {"attention": {"primal": {"rank": 3}}}},
    "keys": {"epochs": 2},
    "column_keys": {"waves": {"batch_size": 5}},
    "seeds": [0, 4],
    "baselines": {"default": "softmax"},
    "reported": {"primal": {"waves": [98.1, 0.2]}},
}


# The averages that the papers print below their tables, where the figures above have them. Those of the
# thesis's table 4-6 for the standard and the data-dependent variant are not those of its rows.
AVERAGES = {
    "primal_attention_uea_weights": {"independent": 72.9, "dependent": 73.1},
    "primal_attention_lra": {"softmax": 58.8, "primal": 57.5, "primal_last_layer": 60.4},
    "primal_attention_lra_weights": {"independent": 59.6, "dependent": 60.4},
    "primal_dual_uea": (72.07, 72.89, 72.82, 73.22),
    "primal_dual_uea_linear": (72.51, 73.12, 72.68, 72.90),
    "primal_dual_uea_more": {"softmax": 75.73, "batch_norm": 77.10, "batch_norm_scaled_heads": 77.74},
    "primal_dual_uea_sparse": (71.98, 72.81, 72.25, 72.88),
    "primal_dual_regression": (38.60, 38.25, 38.65, 38.40),
    "primal_dual_lra": (58.66, 59.28, 59.18, 59.35, 59.01),
    "multilinear_variants": {
        "last_layer_learnable": 73.0, "last_layer_learnable_diagonal": 71.8,
        "all_layers_data_dependent": 66.5, "all_layers_learnable": 72.4,
        "all_layers_learnable_diagonal": 71.0,
    },
    "multilinear_dual": {"last_layer_dual": 68.0, "all_layers_dual": 67.7},
    "multilinear_equal_budget": (76.3, 75.7, 75.5),
    "multilinear_equal_dimension": (71.0, 70.3, 70.7),
}  # fmt: skip

# Single figures, read from the papers.
REPORTED = [
    ("primal_attention_uea", "s40_eta0.1", "PEMS-SF", 89.6),
    ("primal_attention_uea", "s20_eta0", "FaceDetection", 64.2),
    ("primal_attention_uea", "s30_eta0.2", "Handwriting", 29.6),
    ("primal_attention_uea", "s40_eta0.5", "UWaveGestureLibrary", 85.9),
    ("primal_dual_uea", "batch_norm_scaled_heads", "EthanolConcentration", [34.35, 0.53]),
    ("primal_dual_uea_more", "softmax", "MotorImagery", [58.66, 1.25]),
    ("primal_dual_regression", "batch_norm", "IEEEPPG", [30.69, 0.64]),
    ("primal_dual_retrieval_beta", "batch_norm_scaled_heads_learnt", "Retrieval", [81.31, 0.25]),
    ("primal_attention_lra_weights", "independent", "Image", 40.2),
    ("multilinear_variants", "all_layers_learnable", "PEMS-SF", 90.0),
    ("multilinear_dual", "all_layers_dual", "JapaneseVowels", 97.6),
    ("multilinear_equal_dimension", "primal", "Handwriting", 25.2),
    ("kernel_pca_wikitext", "rpc", "WikiText-103", 35.26),
    ("primal_dual_head_distance", "scaled_heads", "Retrieval", [80.74, 0.32]),
]


@pytest.mark.parametrize("name", AVERAGES)
def test_the_reported_figures_have_the_averages_that_the_papers_print(name):
    """Up to rounding: of the figures, which moves their mean by half a unit at most, and of the average."""
    suite, averages = read_suite(name), AVERAGES[name]
    expected = averages if isinstance(averages, dict) else dict(zip(suite.reported, averages, strict=True))
    digits = 2 if any(round(value, 1) != value for value in expected.values()) else 1
    for row, printed in expected.items():
        figures = [value[0] if isinstance(value, list) else value for value in suite.reported[row].values()]
        assert len(figures) == len(suite.columns)
        assert abs(statistics.fmean(figures) - printed) <= 1.001 * 10**-digits, row


@pytest.mark.parametrize(("name", "row", "column", "figure"), REPORTED)
def test_single_reported_figures(name, row, column, figure):
    assert read_suite(name).reported[row][column] == figure


FIGURE = r"Reported.*: ([\d.]+\d)"


@pytest.mark.parametrize(
    ("name", "row", "pattern"),
    [
        ("primal_dual_uea", "batch_norm_scaled_heads", FIGURE + r" ± ([\d.]+)"),
        ("primal_dual_uea_more", "batch_norm_scaled_heads", FIGURE + r" ± ([\d.]+)"),
        ("primal_dual_regression", "batch_norm_scaled_heads", FIGURE + r" ± ([\d.]+)"),
        ("multilinear_variants", "last_layer_learnable", r"([\d.]+) with --protocol thesis-1"),
        ("multilinear_equal_budget", "multilinear", r"([\d.]+) with --protocol thesis-3"),
        ("multilinear_equal_dimension", "multilinear", r"([\d.]+) with --protocol thesis-3"),
        ("primal_attention_lra", "primal", FIGURE),
        ("primal_attention_d4rl", "primal", FIGURE),
    ],
)
def test_the_comments_of_the_recipes_have_the_figures_of_the_suites(name, row, pattern):
    """The two were read from the paper apart from one another; so were the mechanisms."""
    suite = read_suite(name)
    for column, recipe in suite.columns.items():
        (found,) = re.findall(pattern, recipe_text(recipe))
        figures = [float(figure) for figure in ([found] if isinstance(found, str) else found)]
        reported = suite.reported[row][column]
        assert figures == (reported if isinstance(reported, list) else [reported])
        assert suite.recipe(Cell(row, column, 0))[1].attention == read_recipe(recipe)[1]["attention"]


@pytest.mark.parametrize("name", list_suites())
def test_every_shipped_suite_has_recipes_that_build(name):
    suite = read_suite(name)
    assert suite.name == name
    if "plugins" in suite.keys:  # lab/tests/test_places.py
        return
    for cell in suite.cells(seeds=suite.seeds[:1]):
        recipe_name, recipe = suite.recipe(cell)
        assert recipe_name in list_recipes()
        assert recipe.seeds == [cell.seed]
        if (start := suite.start(cell)) is not None:
            assert start.cell in list(start.suite.cells(seeds=[cell.seed]))
            trained = start.suite.recipe(start.cell)[1]
            assert recipe.start_from == ""
            sizes = (
                "embed_dim",
                "num_heads",
                "num_layers",
                "feedforward_dim",
                "experts",
                "positions",
                "norm_first",
            )
            assert all(getattr(trained, key) == getattr(recipe, key) for key in sizes)


def test_cells_have_the_keys_of_suite_column_and_row():
    suite = Suite(name="small", **SMALL)
    cells = list(suite.cells())
    assert len(cells) == 8
    assert {cell.seed for cell in cells[:4]} == {0}, "the first seed of every cell comes first"
    _, recipe = suite.recipe(Cell("primal", "waves", 4))
    assert (recipe.epochs, recipe.batch_size, recipe.seeds) == (2, 5, [4])
    assert recipe.attention == {"primal": {"rank": 3}}
    assert suite.recipe(Cell("primal", "vowels", 4))[1].batch_size != 5
    assert suite.compared_with() == {"softmax": [], "primal": ["softmax"]}
    assert list(suite.cells(["primal"], ["waves"], [7])) == [Cell("primal", "waves", 7)]


def test_a_row_can_have_several_baselines():
    rows = {name: {"attention": name} for name in ("softmax", "linear", "primal")}
    baselines = {"default": ["softmax", "linear"], "linear": "softmax"}
    suite = Suite(name="small", **SMALL | {"rows": rows, "baselines": baselines})
    expected = {"softmax": ["linear"], "linear": ["softmax"], "primal": ["softmax", "linear"]}
    assert suite.compared_with() == expected


VALUED = SMALL | {
    "values": {"rank": {"vowels": 3, "waves": 5}},
    "rows": {
        "softmax": {"attention": "softmax"},
        "primal": {"attention": ["softmax", {"primal": {"rank": "$rank"}}]},
    },
    "columns": {"vowels": "uea/handwriting", "waves": "uea/japanese_vowels"},
}  # fmt: skip


def test_values_differ_from_column_to_column():
    suite = Suite(name="small", **VALUED)
    ranks = {c: suite.recipe(Cell("primal", c, 0))[1].attention[1]["primal"]["rank"] for c in suite.columns}
    assert ranks == {"vowels": 3, "waves": 5}


@pytest.mark.parametrize(
    ("values", "message"),
    [({"rnk": {"vowels": 3}}, r"'\$rank'.*\$rnk"), ({"rank": {"vowels": 3}}, "has no value for waves")],
)
def test_a_value_that_is_not_there(values, message):
    suite = Suite(name="small", **VALUED | {"values": values})
    with pytest.raises(InputError, match=message):
        suite.recipe(Cell("primal", "waves", 0))


def test_another_protocol_has_folders_of_its_own():
    suite = Suite(name="small", **SMALL, protocol="holdout")
    other = suite.with_protocol("paper")
    assert (other.name, other.records) == ("small-paper", "small-paper")
    assert [each.recipe(Cell("primal", "waves", 0))[1].protocol for each in (suite, other)] == [
        "holdout",
        "paper",
    ]
    assert suite.with_protocol("holdout") is suite.with_protocol(None) is suite
    with pytest.raises(InputError, match=f"'papr'.*{', '.join(PROTOCOLS)}"):
        suite.with_protocol("papr")


def test_plans_of_attacks_by_row_and_seed():
    attack = [
        "table",
        {"paper": ["primal"]},
        {"autoattack": {"rows": ["primal"], "seeds": [4]}, "curves": {"seeds": [0]}, "masking": {}},
    ]
    suite = Suite(name="small", **SMALL | {"attack": attack})
    plans = {
        (row, seed): suite.attack_plans(Cell(row, "waves", seed)) for row in suite.rows for seed in (0, 4, 7)
    }
    assert plans == {
        ("softmax", 0): ["table", "curves", "masking"],
        ("softmax", 4): ["table", "masking"],
        ("softmax", 7): ["table", "masking"],
        ("primal", 0): ["table", "paper", "curves", "masking"],
        ("primal", 4): ["table", "paper", "autoattack", "masking"],
        ("primal", 7): ["table", "paper", "masking"],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {}}, "has no rows"),
        ({"columns": {}}, "has no columns"),
        ({"rows": {"a/b": {}}}, "row 'a/b'"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"baselines": {"primal": "softmx"}}, "softmx"),
        ({"baselines": {"primal": ["softmax", "softmx"]}}, "softmx"),
        ({"baselines": {"primal": 1}}, "baselines"),
        ({"reported": {"primal": {"nowhere": 1.0}}}, "nowhere"),
        ({"column_keys": {"nowhere": {}}}, "nowhere"),
        ({"values": {"beta": {"nowhere": 1}}}, "nowhere"),
        ({"further": {"loss": {"primal": {"nowhere": 1.0}}}}, "nowhere"),
        ({"reported": {"primal": {"waves": [1.0, 2.0, 3.0]}}}, r"\[mean, deviation\]"),
        ({"protocol": "papr"}, "papr"),
        ({"attack": [{"paper": ["sofmax"]}]}, "sofmax"),
        ({"attack": [{"paper": {"rows": ["sofmax"]}}]}, "sofmax"),
        ({"attack": [{"paper": {"rows": [0]}}]}, "row of suite"),
        ({"attack": [{"paper": {"seeds": [2]}}]}, r"attack names seed 2 \(accepted: \[0, 4\]\)"),
        ({"attack": [{"paper": {"seeds": ["primal"]}}]}, "attack names seed 'primal'"),
        ({"attack": [{"paper": {"seed": [0]}}]}, "attack="),
        ({"diagnose": ["distances"]}, "diagnose"),
        ({"attack": ["transfer"]}, "needs the key transfer_from"),
        ({"transfer_from": "sofmax"}, "sofmax"),
        ({"starts": {"prmal": {"suite": "abilities", "row": "softmax", "column": "mqar"}}}, "prmal"),
        ({"starts": {"primal": {"suite": "abilities"}}}, "accepted: suite, row and column"),
        ({"starts": {"primal": {"sweet": "abilities"}}}, "starts"),
        ({"tilte": "x"}, "tilte"),
        ({"title": None}, "title"),
    ],
)
def test_wrong_suites(changes, message, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    with pytest.raises(InputError, match=message) as raised:
        read_suite(str(path))
    assert "\n" not in str(raised.value)


def test_a_family_of_suites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = {key: value for key, value in SMALL.items() if key != "baselines"}
    table = {"short": {"keys": {"epochs": 1}}, "paired": {"baselines": {"default": "softmax"}, "rws": {}}}
    (tmp_path / "family.yaml").write_text(yaml.safe_dump(common | {"suites": table}))
    expected = Suite(name="short", **common | {"keys": {"epochs": 1}})
    assert read_suite("family.yaml/short") == expected
    for name, message in {
        "family.yaml": "suite family.yaml is a family: give one of its suites, such as family.yaml/paired",
        "family.yaml/shrt": "unknown suite of family.yaml 'shrt'; did you mean 'short'",
        "family.yaml/paired": "unknown key of family.yaml/paired 'rws'; did you mean 'rows'",
        "primal_dual": "unknown suite 'primal_dual'; did you mean 'primal_dual_",
    }.items():
        with pytest.raises(InputError) as raised:
            read_suite(name)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [name for name in list_suites() if name.startswith("primal_attention")])
def test_a_suite_of_the_released_settings_has_no_bound_of_j_or_says_that_it_has(name):
    suite = read_suite(name)
    layers = re.findall(r"\{'primal': (\{.*?\})\}", repr(suite.rows))
    assert layers
    with_j = [each for each in layers if re.search(r"'eta': (?!0(?:\.0)?[,}])", each)]
    bounded = [each for each in with_j if "'objective_bound': None" not in each]
    assert not bounded or any("objective_bound" in remark for remark in suite.remarks), bounded


def test_a_suite_without_a_needed_key(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in SMALL.items() if key != "records"}))
    with pytest.raises(InputError, match="has no key records"):
        read_suite(str(path))


def test_unknown_names():
    with pytest.raises(InputError, match="cifar10_robustness"):
        read_suite("cifar10_robustnes")
    suite = Suite(name="small", **SMALL)
    with pytest.raises(InputError, match="row of suite small"):
        list(suite.cells(rows=["nothing"]))
    with pytest.raises(InputError, match="column of suite small"):
        list(suite.cells(columns=["nothing"]))
