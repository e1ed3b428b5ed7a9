"""Own series without code: init, train, evaluate and predict on files of every layout."""

from __future__ import annotations

import csv
import json
import re
import shutil

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from runs.small_runs import SMALL, make_waves, undrawn_pages, write_recipe

from kernel_attention.errors import InputError
from kernel_attention_lab.data import load_time_series
from kernel_attention_lab.runs import run, train
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks import make_recipe

LONG = ("--case_column", "id", "--time_column", "t", "--target_column", "label")
LAYOUTS = {"long.csv": LONG, "npz": (), "ts": ()}


def write(folder, name, layout, split, class_names):
    """A split of unequal lengths in a layout; the file."""
    path = folder / f"{name}.{layout.rpartition('.')[2]}"
    labels = [class_names[target] for target in split.targets] if class_names else split.targets.tolist()
    cases = list(zip(split.sequences, labels, strict=True))
    if layout == "npz":
        lengths = [len(sequence) for sequence in split.sequences]
        np.savez(path, X=np.concatenate(split.sequences), lengths=lengths, y=labels)
        return path
    rows = [
        [f"case {i}", t, *map(float, step), label]
        for i, (case, label) in enumerate(cases)
        for t, step in enumerate(case)
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "t", "a", "b", "c", "label"], *rows])
    return path


@pytest.fixture(scope="module", params=["classes", "values"])
def waves_run(request, tmp_path_factory):
    """A small set, and what a run on its ``.ts`` files predicts; every layout must give the same."""
    from kernel_attention_lab.cli import main

    is_regression = request.param == "values"
    folder = tmp_path_factory.mktemp(request.param)
    root = make_waves(folder, regression=is_regression)
    data = load_time_series("Waves", root)
    recipe = write_recipe(folder / "recipe.yaml", epochs=1)
    run = folder / "run"
    words = ["train", str(recipe), "--data-root", str(root), "--output", str(run), "--progress", "false"]
    with undrawn_pages():
        assert main(words) == 0
    output = folder / "predicted.json"
    assert main(["predict", str(run), str(root / "Waves" / "Waves_TEST.ts"), "--output", str(output)]) == 0
    return data, json.loads(output.read_text()), json.loads((run / "seed-0" / "evaluation.json").read_text())


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_model(waves_run, layout, cli, here):
    data, predicted, evaluated = waves_run
    if layout == "ts":
        root = make_waves(here, regression=not data.class_names)
        files = [root / "Waves" / f"Waves_{part}.ts" for part in ("TRAIN", "TEST")]
    else:
        files = [
            write(here, name, layout, split, data.class_names)
            for name, split in (("train", data.train), ("test", data.test))
        ]
    keys = {**SMALL, "epochs": 1, "dataset": str(files[0].relative_to(here)), "test_file": str(files[1])}
    (here / "recipe.yaml").write_text(yaml.safe_dump(keys))
    code, _, err = cli("train", "recipe.yaml", "--output", "run", "--progress", "false", *LAYOUTS[layout])
    assert (code, err) == (0, "")
    assert cli("predict", "run", files[1], "--output", "predicted.json")[0] == 0
    found = json.loads((here / "predicted.json").read_text())
    names = (f"case {i}" if layout == "long.csv" else i for i in range(len(predicted)))
    assert [row["case"] for row in found] == list(names)
    for row, expected in zip(found, predicted, strict=True):
        assert row == expected | {"case": row["case"]}
    assert cli("evaluate", "run", files[1], "--output", "figures.json")[0] == 0
    figure = "accuracy" if data.class_names else "rmse"
    assert json.loads((here / "figures.json").read_text())[0][figure] == evaluated[figure]


@pytest.mark.usefixtures("brief")
def test_init_writes_a_recipe_that_trains(cli, here):
    data = load_time_series("Waves", make_waves(here))
    file = write(here, "own", "long.csv", data.train, data.class_names)
    code, out, err = cli("init", file.name, *LONG, "--output", "own.yaml")
    assert (code, out) == (0, "written: own.yaml\n")
    assert err.startswith("note: own.csv: 5 of its 24 cases, drawn with seed 0, are the test split")
    text = (here / "own.yaml").read_text()
    assert "own.csv: 19 cases to train and 5 to test, 3 channels, 5 to 11 steps, 3 classes" in text
    assert "# cases to train of each class: a " in text
    assert yaml.safe_load(text)["channel_columns"] == ["a", "b", "c"]
    quick = ("--epochs", 1, "--embed_dim", 8, "--accelerator", "cpu")
    assert cli("train", "own.yaml", *quick, "--output", "run", "--progress", "false")[0] == 0
    # A file to predict needs no labels.
    unlabelled = write(here, "new", "long.csv", data.test, [])
    unlabelled.write_text("\n".join(line.rpartition(",")[0] for line in unlabelled.read_text().splitlines()))
    code, out, _ = cli("predict", "run", "new.csv")
    assert code == 0
    assert out.splitlines()[0] == "case,prediction,probability_a,probability_b,probability_c"
    assert len(out.splitlines()) == 1 + len(data.test)


@pytest.mark.usefixtures("brief")
def test_a_table_with_gaps_is_refused_with_the_option_that_takes_it(cli, refused, here):
    rows = [
        f"{case},{t},{'' if case == t == 1 else case * t}," + "ab"[case % 2]
        for case in range(9)
        for t in range(5)
    ]
    (here / "own.csv").write_text("\n".join(["id,t,x,label", *rows]))
    assert "(--missing interpolate of init and train)" in refused("init", "own.csv", *LONG)
    assert cli("init", "own.csv", *LONG, "--missing", "interpolate")[0] == 0
    assert "missing: interpolate" in (here / "recipe.yaml").read_text()


def test_init_without_a_file_writes_a_recipe_to_fill_in(cli, refused, here):
    code, out, _ = cli("init")
    assert (code, out.splitlines()[1]) == (0, "fill in: dataset of recipe.yaml, for which series.csv stands")
    recipe = yaml.safe_load((here / "recipe.yaml").read_text())
    assert recipe["dataset"] == "series.csv"
    assert "output recipe.yaml exists" in refused("init")
    assert "dataset 'series.csv': there is no file series.csv" in refused("train", "recipe.yaml")
    assert "--case_column says something of a file" in refused(
        "init", "--case_column", "id", "--output", "own.yaml"
    )
    assert "the name must end in .yaml" in refused("init", "--output", "recipe")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (),
            "own.csv: has no labels to learn: no column 'target' (it has: id, t, a, b, c, label); target_col",
        ),
        ((*LONG[:-1], "lable"), "no column 'lable'; did you mean 'label'? (it has: id, t, a, b, c, label)"),
        (LONG[4:], "column 'id' has no number at its end"),
        (
            LONG[4:],
            "give layout: long, case_column and time_column (--layout long --case_column NAME --time_",
        ),
        (("--layout", "long", *LONG[4:]), "needs case_column"),
        (("--case_column", "id", "--time_column", "when", *LONG[4:]), "unknown column of own.csv 'when'"),
        (
            (*LONG, "--channel_columns", "a", "label"),
            "own.csv, line 2: 'a' in column 'label' is not a number",
        ),
        ((*LONG, "--channel_columns", "a", "d"), "unknown column of own.csv 'd'"),
        ((*LONG, "--target_type", "value"), "the target 'a' of case 0 is not a finite number"),
        ((*LONG, "--test_file", "gone.csv"), "there is no file gone.csv"),
        ((*LONG, "--test_fraction", "2"), "--test_fraction '2' must be a finite number above 0 and below 1"),
    ],
)
def test_bad_files_leave_no_run(options, message, cli, refused, here, tmp_path):
    data = load_time_series("Waves", make_waves(tmp_path))
    write(here, "own", "long.csv", data.train, data.class_names)
    recipe = write_recipe(tmp_path / "recipe.yaml", dataset="own.csv")
    assert message in refused("train", recipe, "--output", "run", *options)


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Tables of four channels, long and wide, and a run of each: (folder, {layout: rows of predictions})."""
    folder = tmp_path_factory.mktemp("named")
    generator = np.random.default_rng(1)
    cases = generator.standard_normal((24, 4, 6)) + np.arange(4)[:, None]
    labels = ["u" if case[0].mean() > 0 else "v" for case in cases]
    predicted = {}
    for layout, keys in NAMED.items():
        write_table(folder / f"{layout}.csv", layout, cases, labels, CHANNELS)
        recipe = make_recipe({**SMALL, "epochs": 1, "dataset": str(folder / f"{layout}.csv"), **keys})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "write_report", lambda _: None)  # its pictures take most of the time
            train(recipe, folder / f"{layout}-run", progress=False)
        predicted[layout] = load_run(folder / f"{layout}-run").predict(folder / f"{layout}.csv")
    return folder, cases, labels, predicted


CHANNELS = ["flow", "heat", "level", "pH"]
NAMED = {"long": {"case_column": "id", "time_column": "t"}, "wide": {"case_column": "id"}}


def write_table(path, layout, cases, labels, order, others=()):
    """A table of channels in this order, under the names in ``others`` where they are there."""
    others = dict(others)
    order = [(CHANNELS.index(name), others.get(name, name)) for name in order]
    steps = range(cases.shape[2])
    if layout == "long":
        names = [*(name for _, name in order), "target", "t", "id"]
        rows = [
            [*(case[place, t] for place, _ in order), label, t, i]
            for i, (case, label) in enumerate(zip(cases, labels, strict=True))
            for t in steps
        ]
    else:
        names = ["target", "id", *(f"{name}_{t}" for t in steps for _, name in order)]
        rows = [
            [label, i, *(case[place, t] for t in steps for place, _ in order)]
            for i, (case, label) in enumerate(zip(cases, labels, strict=True))
        ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("layout", NAMED)
@settings(max_examples=6)
@given(order=st.permutations(CHANNELS))
def test_the_columns_of_a_table_are_found_by_their_names(layout, order, named):
    folder, cases, labels, predicted = named
    write_table(folder / "new.csv", layout, cases, labels, order)
    saved = load_run(folder / f"{layout}-run")
    assert saved.predict(folder / "new.csv") == predicted[layout]
    ((_, figures),) = saved.evaluate(str(folder / "new.csv"))
    right = [row["prediction"] == label for row, label in zip(predicted[layout], labels, strict=True)]
    assert figures["accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("mark", ["", "NA", "?"])
@pytest.mark.parametrize("layout", NAMED)
def test_a_file_to_predict_may_leave_its_target_empty(layout, mark, named):
    folder, cases, labels, predicted = named
    write_table(folder / "new.csv", layout, cases, [mark] * len(labels), CHANNELS)
    saved = load_run(folder / f"{layout}-run")
    assert saved.predict(folder / "new.csv") == predicted[layout]
    with pytest.raises(InputError, match="line 2: column 'target' is empty"):
        next(saved.evaluate(str(folder / "new.csv")))


@pytest.mark.parametrize("layout", NAMED)
@settings(max_examples=6)
@given(st.permutations(CHANNELS), st.sampled_from(CHANNELS), st.sampled_from(["Flow", "x", ""]))
def test_renamed_columns_are_refused(layout, named, order, lost, new):
    folder, cases, labels, _ = named
    order = [name for name in order if new or name != lost]
    write_table(folder / "new.csv", layout, cases, labels, order, {lost: new})
    unexpected = f", unexpected: '{new}'" if new else ""
    saved = load_run(folder / f"{layout}-run")
    missing = re.escape(f"the channels are not those of the run (missing: '{lost}'{unexpected})")
    with pytest.raises(InputError, match=missing):
        saved.predict(folder / "new.csv")
    with pytest.raises(InputError, match="accepted: 'flow', 'heat', 'level', 'pH', in any order"):
        next(saved.evaluate(str(folder / "new.csv")))


@pytest.mark.usefixtures("brief")
def test_runs_and_files_without_names_are_read_by_places_with_a_note(cli, refused, named, here):
    folder, cases, labels, predicted = named
    np.savez(here / "nameless.npz", X=cases, y=labels)
    code, out, err = cli("predict", folder / "wide-run", "nameless.npz")
    assert (code, len(out.splitlines())) == (0, 1 + len(cases))
    read_as = "it is read as 'flow', 'heat', 'level', 'pH', in this order"
    assert err == f"note: nameless.npz has no names of channels; {read_as}\n"
    # A run of an earlier version.
    shutil.copytree(folder / "wide-run", here / "old")
    facts = json.loads((here / "old/data.json").read_text())
    (here / "old/data.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "channel_names"}))
    code, out, err = cli("predict", "old", folder / "wide.csv", "--output", "p.json")
    assert (code, json.loads((here / "p.json").read_text())) == (0, predicted["wide"])
    assert err.startswith("note: the run keeps no names of channels; ")
    # A damaged one.
    (here / "old/data.json").write_text(json.dumps(facts | {"channel_names": ["flow"]}))
    assert "channel_names are not the names of 4 channels" in refused("predict", "old", folder / "wide.csv")


@pytest.mark.usefixtures("brief")
def test_a_run_does_not_go_on_with_other_columns(refused, named, here):
    folder, cases, labels, _ = named
    write_table(folder / "wide.csv", "wide", cases, labels, CHANNELS[::-1])
    try:
        said = refused("analyze", folder / "wide-run")
    finally:
        write_table(folder / "wide.csv", "wide", cases, labels, CHANNELS)
    assert "channel_names is ['pH', 'level', 'heat', 'flow'], in the data of the run it was ['flow'" in said


FAMILY = """\
# Small models of waves.
dataset: Waves
attention: {primal: {rank: 3, eta: 0.1}}
embed_dim: 8
num_heads: 2
num_layers: 1
feedforward_dim: 8
epochs: 1
accelerator: cpu
recipes:
  primal: {}
  softmax:
    # The baseline.
    attention: softmax
"""


@pytest.mark.usefixtures("brief")
def test_a_recipe_of_a_family_trains_and_so_does_its_copy(cli, refused, here):
    make_waves(here)
    (here / "family.yaml").write_text(FAMILY)
    asked = refused("train", "family.yaml", "--data_root", here)
    assert asked.endswith("such as family.yaml/primal (accepted: primal, softmax)")
    assert "did you mean 'softmax'" in refused("train", "family.yaml/sofmax", "--data_root", here)
    options = ("--data_root", here, "--progress", "false")
    assert cli("train", "family.yaml/softmax", *options)[0] == 0
    (run,) = (here / "runs").iterdir()
    assert run.name.startswith("softmax-softmax-")
    assert cli("init", "--recipe", "family.yaml/softmax")[:2] == (0, "written: recipe.yaml\n")
    assert (here / "recipe.yaml").read_text().startswith("# Small models of waves.\n#\n# The baseline.\n")
    assert cli("train", "recipe.yaml", *options, "--output", "copy")[0] == 0
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run, here / "copy")]
    assert configs[0] == configs[1]
    weights = [(folder / "seed-0/best.safetensors").read_bytes() for folder in (run, here / "copy")]
    assert weights[0] == weights[1]
