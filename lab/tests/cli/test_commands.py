"""The commands on a finished run, and on a tiny training."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess

import numpy as np
import pytest
import yaml
from runs.small_runs import (
    CHANNELS,
    SMALL,
    assert_same_outcome,
    launch,
    make_waves,
    train_small,
    write_recipe,
)
from tasks.text_data import make_text
from tasks.token_data import make_images, make_tokens

import kernel_attention as ka
from kernel_attention.fields import field_names
from kernel_attention_lab.arguments import parse
from kernel_attention_lab.options import Train
from kernel_attention_lab.runs import list_recipes
from kernel_attention_lab.tasks import Recipe


def figures(path):
    return json.loads(path.read_text())


def table(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_demo_in_little(cli, here, undrawn):
    """The demo's own data (JapaneseVowels, inside aeon), a few epochs of a smaller model."""
    options = ("--epochs", 4, "--embed-dim", 32, "--feedforward-dim", 32, "--batch-size", 32)
    code, out, err = cli("train", "demo", *options, "--progress", "false", "--output", "run")
    assert (code, err) == (0, "")
    assert "demo · JapaneseVowels · primal" in out
    assert "protocol holdout" in out
    assert "report: run/report.html" in out
    assert figures(here / "run/summary.json")["mean"] > 0.3, "nine speakers: chance is 0.11"
    assert figures(here / "run/summary.json")["recipe"] == "demo"
    assert "<html" in (here / "run/report.html").read_text()
    assert sorted(path.name for path in here.iterdir()) == ["run"], "nothing is written elsewhere"


@pytest.mark.usefixtures("brief")
def test_the_run_folder_has_a_name_of_its_own(cli, here, waves, tmp_path):
    recipe = write_recipe(tmp_path / "mine.yaml", epochs=1)
    assert cli("train", recipe, "--data-root", waves, "--progress", "false", "--attention", "softmax")[0] == 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("mine-softmax-")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["attention"] == "softmax", "a new mechanism replaces the recipe's options too"
    assert config["embed_dim"] == SMALL["embed_dim"], "all else is the recipe's"


@pytest.mark.parametrize(
    "options",
    [
        ["demo", "--seeds", "0", "1", "2"],
        ["demo", "--seeds", "0,1,2"],
        ["demo", "--seeds", "0,", "1,", "2"],
        ["demo", "--seeds=0,1,2"],
        ["demo", "--seeds", "[0, 1, 2]"],
        ["--seeds", "0", "1", "2", "--epochs", "4", "demo"],
        ["--seeds", "0", "1", "2", "demo", "--epochs=4"],
    ],
)
def test_seeds_may_be_typed_in_any_way(options):
    command, parsed, keys = parse(["train", *options])
    assert command == "train"
    assert keys["seeds"] == [0, 1, 2]
    assert parsed.recipe == "demo"


def test_options_take_hyphens_and_underscores():
    typed = parse(["train", "--learning-rate", "1e-2", "demo", "--data-root=a-b", "--embed_dim=16"])
    assert typed.keys == {"learning_rate": 0.01, "embed_dim": 16}
    assert typed.options == Train(recipe="demo", data_root="a-b")


def test_attention_may_be_typed_with_its_options():
    typed = parse(["train", "demo", "--attention", "{primal: {rank: 7, eta: 1e-2}}"])
    assert typed.keys == {"attention": {"primal": {"rank": 7, "eta": 0.01}}}


def test_evaluate_repeats_the_figures_of_training(cli, here, trained, waves):
    code, out, _ = cli("evaluate", trained, "--data-root", waves, "--output", "out.json")
    assert code == 0
    assert "Waves: test split" in out
    for row in figures(here / "out.json"):
        expected = figures(trained / f"seed-{row['seed']}" / "evaluation.json")
        assert {"seed": row["seed"]} | {key: expected[key] for key in row if key != "seed"} == row
    assert [row["seed"] for row in figures(here / "out.json")] == [0, 1]


def test_evaluate_of_a_regression(cli, here, trained_regression, waves):
    assert cli("evaluate", trained_regression, "--data-root", waves, "--output", "out.json")[0] == 0
    (row,) = figures(here / "out.json")
    expected = figures(trained_regression / "seed-0/evaluation.json")
    assert (row["rmse"], row["r2"]) == (expected["rmse"], expected["r2"])


def test_evaluate_of_a_file_is_evaluate_of_its_cases(cli, here, trained, waves):
    path = waves / "Waves/Waves_TEST.ts"
    assert cli("evaluate", trained, path, "--output", "out.csv")[0] == 0
    rows = table(here / "out.csv")
    for seed, row in enumerate(rows):
        expected = figures(trained / f"seed-{seed}" / "evaluation.json")
        assert float(row["accuracy"]) == expected["accuracy"]
        assert json.loads(row["confusion_matrix"]) == expected["confusion_matrix"]


def test_predict_agrees_with_evaluate(cli, here, trained, waves):
    path = waves / "Waves/Waves_TEST.ts"
    labels = [line.rpartition(":")[2] for line in path.read_text().split("@data\n")[1].split()]
    assert cli("predict", trained, path, "--output", "out.json", "--seed", 1)[0] == 0
    rows = figures(here / "out.json")
    right = sum(row["prediction"] == label for row, label in zip(rows, labels, strict=True))
    assert right / len(labels) == figures(trained / "seed-1/evaluation.json")["accuracy"]
    for row in rows:
        chances = {name: row[f"probability_{name}"] for name in "abc"}
        assert sum(chances.values()) == pytest.approx(1)
        assert row["prediction"] == max(chances, key=chances.get)


def test_predict_says_the_same_to_screen_csv_and_json(cli, here, trained, waves):
    path = waves / "Waves/Waves_TEST.ts"
    screen = cli("predict", trained, path)[1]
    assert cli("predict", trained, path, "--output", "out.csv")[0] == 0
    assert cli("predict", trained, path, "--output", "out.json")[0] == 0
    rows = table(here / "out.csv")
    assert list(csv.DictReader(io.StringIO(screen))) == rows
    assert [row["prediction"] for row in rows] == [row["prediction"] for row in figures(here / "out.json")]
    assert rows[0].keys() == {"case", "prediction", "probability_a", "probability_b", "probability_c"}


def test_predict_of_a_regression_gives_values(cli, trained_regression, waves):
    code, out, _ = cli("predict", trained_regression, waves / "Tides/Tides_TEST.ts")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [int(row["case"]) for row in rows] == list(range(15))
    assert all(np.isfinite(float(row["prediction"])) for row in rows)


def test_list_names_everything(cli, waves):
    code, out, _ = cli("list", "--data-root", waves)
    assert code == 0
    names = (
        [mechanism.name for mechanism in ka.list_attention()]
        + list(list_recipes())
        + ["Waves", "JapaneseVowels"]
    )
    assert not [name for name in names if f"│ {name} " not in out]


def test_list_names_the_image_sets_of_the_data_root(cli, tmp_path):
    make_images(tmp_path / "images")
    code, out, err = cli("list", "datasets", "--data-root", tmp_path)
    assert (code, err) == (0, "")
    assert re.search(r"│ cifar10 +│ data root │ .*images/cifar10", out)


def test_list_names_texts_and_sentences_and_what_is_generated(cli, tmp_path):
    (tmp_path / "language").mkdir()
    make_text(tmp_path / "language")
    make_tokens(tmp_path / "sets")
    for path in (tmp_path / "sets").iterdir():
        path.rename(tmp_path / path.name)
    code, out, err = cli("list", "datasets", "--format", "json", "--data-root", tmp_path)
    assert (code, err) == (0, "")
    rows = {(row["task"], row["name"]): row for row in json.loads(out)}
    assert rows["language", "fables"]["path"] == str(tmp_path / "language" / "fables")
    for name in ("sst2", "sst5", "imdb", "lra/text", "lra/retrieval"):
        assert rows["tokens", name]["source"] == "data root"
    assert rows["tokens", "lra/listops"]["source"] == "generated"
    assert rows["sequence_labels", "mqar"]["source"] == "generated"


def test_list_is_json_for_other_programs(cli):
    code, out, err = cli("list", "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert {"attention", "contenders", "datasets", "recipes", "suites"} == found.keys()
    (row,) = (row for row in found["attention"] if row["name"] == "primal")
    assert row["causal"] == "yes"
    assert row["mixes_tokens"]


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "generate", "analyze", "bench", "list"])
def test_help_of_a_command(command, cli):
    code, out, err = cli(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: kernel-attention {command} ")
    assert "required" not in out, "the usage line says what may be left out"
    assert max(map(len, out.splitlines())) <= 200


def test_help_of_train_explains_every_key(cli):
    out = cli("train", "--help")[1]
    names = [name for name in field_names(Recipe) if name != "plugins"]
    assert not [name for name in [*names, "plugin"] if f"--{name} " not in out]


def test_help_and_version(cli):
    code, out, _ = cli("--help")
    assert code == 0
    assert all(command in out for command in ("train", "evaluate", "predict", "analyze", "list"))
    assert cli("--version")[:2] == (0, f"kernel-attention {ka.__version__}\n")


def test_commands_that_train_nothing_import_no_trainer(forks):
    """Lightning, scikit-learn, aeon and matplotlib take seconds each."""
    script = (
        "import sys; from kernel_attention_lab.cli import main\n"
        "commands = ('list attention', 'list recipes', 'train demo --epochs 0')\n"
        "codes = [main(words.split()) for words in commands]\n"
        "heavy = {'lightning_fabric', 'sklearn', 'aeon', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "print(codes, heavy, file=sys.stderr)"
    )
    process = forks.run("-c", script)
    assert process.stderr.splitlines()[-1] == "[0, 0, 2] set()"


def test_a_reader_that_leaves_is_no_error(trained, tmp_path):
    """As ``predict ... | head -1`` does, with more output than a pipe holds."""
    np.save(tmp_path / "x.npy", np.zeros((3000, CHANNELS, 4)))
    process = launch("predict", trained, tmp_path / "x.npy")
    assert process.stdout.readline().startswith("case,prediction")
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=120), err) == (0, "")
    process.stderr.close()


@pytest.mark.usefixtures("brief")
def test_resuming_a_finished_run_changes_nothing(cli, tmp_path):
    root = make_waves(tmp_path / "data")
    run = train_small(tmp_path / "run", root, epochs=1)
    again = tmp_path / "again"
    subprocess.run(["cp", "-r", run, again], check=True)
    assert cli("train", "--resume", again, "--data-root", root, "--progress", "false")[0] == 0
    assert_same_outcome(again, run)
