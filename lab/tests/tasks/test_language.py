"""Language models from the command line: trained, resumed, evaluated, attacked, and made to write."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import yaml
from cli.conftest import cli, here, refused  # noqa: F401
from runs.small_runs import assert_same_outcome, brief, undrawn_pages  # noqa: F401
from tasks.text_data import LANGUAGE, make_text

from kernel_attention import list_attention
from kernel_attention.analysis import diagnose
from kernel_attention.analysis.perplexity import perplexity
from kernel_attention_lab.cli import main
from kernel_attention_lab.data.texts.vocabulary import WordVocabulary
from kernel_attention_lab.robustness import swap_words
from kernel_attention_lab.runs import list_recipes, read_recipe
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks import language, make_recipe
from kernel_attention_lab.tasks.registry import experiment_class


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("data"))


def recipe_file(folder, **changes):
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(LANGUAGE | changes, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    words = ["train", str(recipe_file(folder)), "--data_root", str(data), "--output", str(folder / "run")]
    with undrawn_pages():
        assert main([*words, "--progress", "false"]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def evaluation(run):
    return json.loads((run / "seed-0" / "evaluation.json").read_text())


def test_the_loss_falls_and_the_figures_stand_side_by_side(trained):
    rows = json.loads((trained / "seed-0" / "metrics.json").read_text())
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    assert all(row["tokens_per_second"] > 0 and row["peak_rss_mb"] > 0 for row in rows)
    figures = evaluation(trained)
    for name in ("", "attacked_", "attacked_inputs_", "unigram_", "bigram_"):
        for split in ("", "validation_"):
            assert 1.0 < figures[f"{split}{name}perplexity"] < 1e3
    assert figures["uniform_perplexity"] == 13
    assert figures["validation_perplexity"] < figures["validation_unigram_perplexity"]
    assert "perplexity" in (trained / "report.html").read_text()


def test_the_figures_are_those_of_the_weights(trained, data):
    """Perplexity of the test text, clean and swapped, by the saved model and vocabulary."""
    run = load_run(trained)
    vocabulary = language.read_vocabulary(run.facts)
    text = (data / "fables" / "test.txt").read_text()
    figures = evaluation(trained)
    for name, content in (("", text), ("attacked_", swap_words(text, 0.3, 0))):
        tokens = torch.from_numpy(vocabulary.encode(content))
        found = perplexity(run.model(), tokens, context=7)
        assert figures[f"{name}perplexity"] == pytest.approx(found.perplexity, rel=1e-6)
    assert figures["tokens"] == len(vocabulary.encode(text)) - 1


@pytest.mark.usefixtures("brief")
def test_resumed_from_the_last_checkpoint_the_run_ends_the_same(trained, data, tmp_path, monkeypatch):
    """Bit for bit: Ctrl-C between two checkpoints, and go on; rounds end in the middle of an epoch."""
    stop = language.LanguageTask.training_step

    def training_step(self, batch):
        if self.trainer.step == 17:
            raise KeyboardInterrupt
        return stop(self, batch)

    folder = tmp_path / "run"
    monkeypatch.setattr(language.LanguageTask, "training_step", training_step)
    assert main(["train", str(recipe_file(tmp_path)), "--data_root", str(data), "--output", str(folder),
                 "--progress", "false"]) == 1  # fmt: skip
    monkeypatch.undo()
    assert not (folder / "seed-0" / "evaluation.json").exists()
    assert main(["train", "--resume", str(folder), "--data_root", str(data), "--progress", "false"]) == 0
    assert_same_outcome(folder, trained)


def train_with_signals(steps, arguments, monkeypatch, number=signal.SIGINT):
    """Exit code of a command that gets a signal in these steps of its run, each once."""
    due, original = set(steps), language.LanguageTask.training_step

    def training_step(self, batch):
        if self.trainer.step in due:
            due.discard(self.trainer.step)
            os.kill(os.getpid(), number)
        return original(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(language.LanguageTask, "training_step", training_step)
        return main(arguments)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("during", "saved", "number"), [(4, 5, signal.SIGINT), (9, 10, signal.SIGTERM), (29, 30, signal.SIGINT)]
)
def test_ctrl_c_saves_the_step_and_the_run_goes_on_from_it(
    during, saved, number, trained, data, tmp_path, monkeypatch, capsys
):
    """Bit for bit. Rounds have 10 steps; in a round's last step its evaluation comes before the end."""
    folder = tmp_path / "run"
    begin = ["train", str(recipe_file(tmp_path)), "--data_root", str(data), "--output", str(folder),
             "--progress", "false"]  # fmt: skip
    assert train_with_signals([during], begin, monkeypatch, number) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"interrupted\nsaved: {folder} (seed 0: checkpoint after step {saved})\n")
    state = torch.load(folder / "seed-0/last.ckpt", weights_only=True)
    assert state["global_step"] == saved
    if saved < 10:
        assert not (folder / "seed-0/metrics.json").exists(), "no round is whole yet"
    seen = []
    original = language.LanguageTask.training_step
    with monkeypatch.context() as patched:
        patched.setattr(
            language.LanguageTask,
            "training_step",
            lambda self, batch: (seen.append(self.trainer.step), original(self, batch))[1],
        )
        assert main(["train", "--resume", str(folder), "--progress", "false"]) == 0
    assert seen == list(range(saved, 30)), "no step is done again"
    assert_same_outcome(folder, trained)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("vocabulary", ["byte", "bpe"])
def test_other_vocabularies(data, tmp_path, cli, vocabulary):  # noqa: F811
    if vocabulary == "bpe":
        pytest.importorskip("tokenizers", reason="the extra language is not installed")
    changes = {"vocabulary": vocabulary, "max_vocabulary": 300, "steps": 2, "evaluate_every": 2}
    path = recipe_file(tmp_path, **changes, max_len=60)
    assert (
        cli("train", path, "--data_root", data, "--output", tmp_path / "run", "--progress", "false")[0] == 0
    )
    assert "attacked_inputs_perplexity" not in evaluation(tmp_path / "run")
    code, out, _ = cli("generate", tmp_path / "run", "--prompt", "the fox", "--tokens", 5)
    assert code == 0
    assert out.startswith("the fox")


def test_evaluate_again_on_parts_and_on_files(cli, run, data, tmp_path):  # noqa: F811
    output = tmp_path / "figures.json"

    def figures(*arguments):
        assert cli("evaluate", run, *arguments, "--data_root", data, "--output", output)[0] == 0
        return json.loads(output.read_text())[0]

    saved = evaluation(run)
    assert figures()["perplexity"] == saved["perplexity"]
    valid = figures("--split", "validation")
    assert valid["perplexity"] == saved["validation_perplexity"]
    of_file = figures(data / "fables" / "valid.txt")
    assert of_file["attacked_perplexity"] == saved["validation_attacked_perplexity"]
    paper = figures("--split", "validation", "--stride", 1, "--evaluation_tokens", 20, "--swap_rate", 0)
    assert (paper["stride"], paper["tokens"]) == (1, 19)
    assert "attacked_perplexity" not in paper


def test_analyze_measures_windows_of_the_test_text(cli, run, data, undrawn):  # noqa: F811
    code, out, err = cli("analyze", run, "--data_root", data, "--cases", 5)
    assert (code, err) == (0, "")
    assert "layer 0: softmax" in out
    assert "layer 1: primal" in out
    saved = load_run(run)
    text = (data / "fables" / "test.txt").read_text()
    tokens = language.read_vocabulary(saved.facts).encode(text)
    context = LANGUAGE["context"]
    starts = np.linspace(0, len(tokens) - context, 5).round().astype(int)
    windows = torch.stack([torch.from_numpy(tokens[start : start + context]) for start in starts])
    expected = diagnose(saved.model(), windows)
    assert expected.layers[0].lengths == (context,) * 5
    with np.load(run / "seed-0/diagnostics.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) == set(expected.arrays())
        for name, value in expected.arrays().items():
            np.testing.assert_allclose(arrays[name], value, rtol=1e-4, atol=1e-6)
    page = (run / "report.html").read_text()
    assert "What the attention does" in page
    assert "5 evenly spaced sequences of the test split" in page


def test_generated_text_is_greedy_or_drawn(cli, run):  # noqa: F811
    prompt = "the cat"
    text = cli("generate", run, "--prompt", prompt, "--tokens", 6)[1]
    saved = load_run(run)
    vocabulary = language.read_vocabulary(saved.facts)
    tokens = vocabulary.encode(prompt).tolist()
    model = saved.model()
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert text == vocabulary.decode(tokens) + "\n"
    draw = ("generate", run, "--prompt", prompt, "--tokens", 20, "--temperature", 1, "--seed")
    drawn = [cli(*draw, seed)[1] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate RUN", "generate needs --prompt TEXT"),
        ("generate RUN --prompt ''", "has no token to begin with"),
        ("generate RUN --prompt the --tokens 31", "sequence length 31 exceeds max_len=30"),
        ("generate RUN --prompt the --temperature -1", "temperature=-1.0 must be"),
        ("generate RUN --prompt the --top_k 0", "top_k=0 must be"),
        ("generate RUN --prompt the --tokens many", "--tokens 'many' must be a whole number"),
        ("generate RUN --prompt the --model_seed 3", "seed=3 is not in"),
        ("evaluate RUN --split dev", "unknown split 'dev'"),
        ("evaluate RUN --stride 8", "stride=8 exceeds context=7"),
        ("evaluate RUN missing.txt", "file missing.txt: cannot be read"),
        ("evaluate RUN empty.txt", "file empty.txt: is empty"),
        ("evaluate RUN latin.txt", "file latin.txt: byte 0xe4 at offset 3 (line 1) is not UTF-8"),
        ("evaluate RUN latin.txt --split test", "a file or a split, not both"),
        ("predict RUN latin.txt", "predictions of a file are not available"),
        ("train RECIPE --context 31", "context=31 exceeds max_len=30"),
        ("train RECIPE --stride 8", "stride=8 exceeds context=7"),
        ("train RECIPE --swap_rate 2", "--swap_rate '2' must be a finite number between 0 and 1"),
        ("train RECIPE --vocabulary char", "--vocabulary 'char' must be one of word, byte, bpe"),
        ("train RECIPE --protocol paper", "protocol='paper'"),
        ("train RECIPE --attention tensor", "attention 'tensor' cannot be a layer of a causal model"),
        ("train RECIPE --dataset nothing", "dataset 'nothing': not found"),
        ("train RECIPE --dataset broken", "has no test text"),
    ],
)
def test_bad_input_is_one_line(refused, run, data, here, arguments, message):  # noqa: F811
    (here / "empty.txt").write_text("\n")
    (here / "latin.txt").write_bytes(b"Gel\xe4nde\n")
    (here / "broken").mkdir()
    for name in ("train", "valid"):
        (here / "broken" / f"{name}.txt").write_text("a b\n")
    names = {"RUN": run, "RECIPE": recipe_file(here), "''": ""}
    words = [names.get(word, word) for word in arguments.split()]
    root = () if words[0] in ("generate", "predict") else ("--data_root", data)
    assert message in refused(*words, *root)


def test_another_tokenizer_is_refused(refused, run, data, here):  # noqa: F811
    """A vocabulary that was changed in the run folder, and training data that give another one."""
    shutil.copytree(data / "fables", here / "fables")
    with (here / "fables" / "train.txt").open("a") as file:
        file.write("the unicorn sat here\n")
    assert "tokenizer mismatch" in refused("evaluate", run, "--data_root", here)
    facts = json.loads((run / "data.json").read_text())
    other = WordVocabulary.from_text("other words of another text")
    (run / "data.json").write_text(json.dumps(facts | {"vocabulary_state": other.state()}))
    assert "tokenizer mismatch" in refused("generate", run, "--prompt", "the")
    (run / "data.json").write_text(json.dumps({**facts, "vocabulary_state": {"kind": "word"}}))
    assert "not a saved vocabulary" in refused("generate", run, "--prompt", "the")


def test_the_released_recipe_of_wikitext_has_the_values_of_the_released_command():
    recipe = make_recipe(read_recipe("language/wikitext103_primal_released")[1])
    *first, last = recipe.attention
    assert (
        first == [{"softmax": {"dropout": 0.0}}] * 5
    )  # fairseq's transformer_lm has no dropout in attention
    # 0.1 J^2 beside the sum over the 2,048 tokens of a part.
    weights = {"rank": 30, "eta": 0.1 / 2048, "data_dependent": False, "square_per": "sequence"}
    assert last == {"primal": weights}
    assert recipe.batch_size * recipe.context == 16 * 2048
    assert (recipe.learning_rate, recipe.schedule, recipe.warmup_steps) == (0.001, "inverse_sqrt", 6000)
    assert (recipe.steps, recipe.weight_decay, recipe.gradient_clip) == (150_000, 0.01, 0.0)
    assert (recipe.embed_dim, recipe.num_heads, recipe.num_layers, recipe.context) == (512, 8, 6, 512)


@pytest.mark.parametrize("name", [name for name in list_recipes() if name.startswith("language/")])
def test_shipped_recipes_build(name):
    """With a vocabulary of few words: the layers, widths and options are what is tried."""
    recipe = make_recipe(read_recipe(name)[1])
    model = experiment_class("language").build_model(recipe, {"vocabulary_size": 11})
    tokens = torch.randint(11, (1, 9))
    assert model.loss(tokens, tokens).isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in list_attention() if row.causal])
def test_every_causal_mechanism_trains(cli, data, tmp_path, name):  # noqa: F811
    """Five steps, an evaluation, and a text of its own."""
    path = recipe_file(tmp_path, steps=5, evaluate_every=5)
    run = tmp_path / "run"
    options = ("--attention", name, "--data_root", data, "--output", run, "--progress", "false")
    assert cli("train", path, *options)[0] == 0
    assert evaluation(run)["perplexity"] < 50
    assert cli("generate", run, "--prompt", "the", "--tokens", 5)[0] == 0
