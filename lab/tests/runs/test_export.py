"""Trained runs as folders of transformers: the same logits, the same numbers for a text, and pipelines."""

import json

import numpy as np
import pytest
import torch
from cli.conftest import cli, here, refused  # noqa: F401
from PIL import Image
from runs.small_runs import train_small, trained_run
from tasks.image_sets import make_colours, write_image_recipe
from tasks.text_data import LANGUAGE, make_text
from tasks.token_data import TOKENS, make_tokens

from kernel_attention_lab.cli import main
from kernel_attention_lab.data.texts.vocabulary import build_vocabulary
from kernel_attention_lab.runs.export import make_tokenizer
from kernel_attention_lab.runs.saved import load_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.usefixtures("brief")

ONE_LAYER = {"attention": "linear", "num_layers": 1, "epochs": 1}  # the time of an export is in the layers
TEXT = (
    "The cat sat here\n the dog\tran,  it's fine! <unk> caf\u00e9 \U0001f600 \x1c\u00a0word\n\n"
    "na\u00efve <br /> end\n"
)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("kind", ["word", "byte", "bpe"])
def test_a_tokenizer_gives_every_text_the_numbers_of_the_vocabulary(tmp_path, kind):
    vocabulary = build_vocabulary(kind, TEXT * 3, max_size=None if kind != "bpe" else 300)
    make_tokenizer(vocabulary, 40).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "", "unseen words stand here", "\n", " lead and trail "):
        assert tokenizer(text)["input_ids"] == vocabulary.encode(text).tolist()
    assert tokenizer(["a", "the cat sat"], padding=True)["attention_mask"][0][-1] == 0
    assert tokenizer.pad_token_id == vocabulary.size, "the number of no token"
    numbers = vocabulary.encode(TEXT)
    assert tokenizer.decode(numbers).removeprefix(" ") == vocabulary.decode(numbers)


def test_a_language_model_is_exported_and_continues_a_text(tmp_path, cli):  # noqa: F811
    run = trained_run(tmp_path / "run", LANGUAGE, make_text(tmp_path))
    assert cli("export", run, "--to", "hugging-face", tmp_path / "out") == (
        0,
        f"written: {tmp_path / 'out'}\n",
        "",
    )
    writer = transformers.pipeline("text-generation", str(tmp_path / "out"))
    assert type(writer.model).__name__ == "KernelAttentionForCausalLM"
    tokens = torch.arange(7)[None]
    assert torch.equal(writer.model(tokens).logits, load_run(run).model()(tokens))
    (found,) = writer("the cat", max_new_tokens=4, do_sample=False)
    _, ours, _ = cli("generate", run, "--prompt", "the cat", "--tokens", 4)
    assert found["generated_text"] == ours.removesuffix("\n")


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"is_causal": True, "attention": "softmax", "experts": 3}, marks=pytest.mark.slow)],
    ids=["primal", "causal experts"],
)
def test_a_classifier_of_sentences_is_exported_and_predicts_as_we_do(changes, tmp_path, cli):  # noqa: F811
    run = trained_run(
        tmp_path / "run", TOKENS | {"dataset": "sst2"} | changes, make_tokens(tmp_path / "data")
    )
    assert cli("export", run, tmp_path / "out")[0] == 0
    texts = ["the film is fine", "a dull, DULL plot <br/> it's"]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    judge = transformers.pipeline("text-classification", str(tmp_path / "out"))
    rows = load_run(run).predict(tmp_path / "lines.txt")
    for found, row in zip(judge(texts), rows, strict=True):
        assert found["label"] == row["prediction"]
        assert found["score"] == pytest.approx(row[f"probability_{found['label']}"], rel=1e-6)
    together = judge(texts, batch_size=2)  # padded, which changes the sums' order and nothing else
    assert [row["label"] for row in together] == [row["prediction"] for row in rows]


def test_a_model_of_images_is_exported_and_predicts_as_we_do(tmp_path, cli):  # noqa: F811
    root = make_colours(tmp_path / "data")
    recipe = write_image_recipe(tmp_path / "colours.yaml", image_size=8, epochs=1)
    arguments = ["--output", str(tmp_path / "run"), "--data-root", str(root), "--progress", "false"]
    assert main(["train", str(recipe), *arguments]) == 0
    assert cli("export", tmp_path / "run", tmp_path / "out")[0] == 0
    image = root / "colours" / "test" / "red" / "0.png"
    judge = transformers.pipeline("image-classification", str(tmp_path / "out"))
    (row,) = load_run(tmp_path / "run").predict(image)
    for found in judge(Image.open(image)):
        assert found["score"] == pytest.approx(row[f"probability_{found['label']}"], rel=1e-5)


@pytest.mark.parametrize("dataset", ["Waves", pytest.param("Tides", marks=pytest.mark.slow)])
def test_a_model_of_time_series_is_exported(waves, tmp_path, cli, dataset):  # noqa: F811
    from kernel_attention.hosts.hugging_face import KernelAttentionForTimeSeriesClassification

    run = train_small(tmp_path / "run", waves, dataset=dataset)
    assert cli("export", run, tmp_path / "out")[0] == 0
    loaded = KernelAttentionForTimeSeriesClassification.from_pretrained(tmp_path / "out")
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 11, 3))).float()
    assert torch.equal(loaded(values).logits, load_run(run).model()(values))
    names = ["LABEL_0"] if dataset == "Tides" else list("abc")
    assert list(loaded.config.id2label.values()) == names


def test_a_program_of_time_series_runs_without_the_package(waves, tmp_path, cli, forks):  # noqa: F811
    run = train_small(tmp_path / "run", waves, **ONE_LAYER)
    code, said, _ = cli("export", run, "--to", "torch", tmp_path / "out" / "model.pt2")
    assert (code, said) == (
        0,
        f"written: {tmp_path / 'out' / 'model.pt2'} (sequences of 2 to 11; pad shorter ones)\n",
    )
    script = (
        "import json, sys, torch\n"
        "sys.modules['kernel_attention'] = None\n"
        "facts = {'facts.json': ''}\n"
        f"program = torch.export.load({str(tmp_path / 'out' / 'model.pt2')!r}, extra_files=facts)\n"
        "x = torch.arange(15.0).reshape(1, 5, 3)\n"
        "logits = program.module()(x=x, attention_mask=torch.ones(1, 5, dtype=torch.bool))\n"
        "print(json.dumps([json.loads(facts['facts.json']), logits.tolist()]))"
    )
    done = forks.run("-c", script)
    facts, logits = json.loads(done.stdout)
    assert json.loads(facts["class_names"]) == list("abc")
    x = torch.arange(15.0).reshape(1, 5, 3)
    torch.testing.assert_close(torch.tensor(logits), load_run(run).model()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("series", marks=pytest.mark.slow),
        pytest.param("sentences", marks=pytest.mark.slow),
        pytest.param("images", marks=pytest.mark.slow),
        pytest.param("language", marks=pytest.mark.slow),
    ],
)
def test_an_onnx_file_computes_what_the_run_computes(task, waves, tmp_path, cli):  # noqa: F811
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    if task == "series":
        run = train_small(tmp_path / "run", waves, **ONE_LAYER)
        inputs = {"x": torch.randn(2, 7, 3), "attention_mask": torch.ones(2, 7, dtype=torch.bool)}
    elif task == "sentences":
        run = trained_run(tmp_path / "run", TOKENS | {"dataset": "sst2"}, make_tokens(tmp_path / "data"))
        inputs = {"x": torch.tensor([[2, 3, 4]]), "attention_mask": torch.ones(1, 3, dtype=torch.bool)}
    elif task == "images":
        root = make_colours(tmp_path / "data")
        recipe = write_image_recipe(tmp_path / "colours.yaml", image_size=8, epochs=1)
        arguments = ["--output", str(tmp_path / "run"), "--data-root", str(root), "--progress", "false"]
        assert main(["train", str(recipe), *arguments]) == 0
        run, inputs = tmp_path / "run", {"images": torch.rand(1, 3, 8, 8)}
    else:
        run, inputs = (
            trained_run(tmp_path / "run", LANGUAGE, make_text(tmp_path)),
            {"tokens": torch.tensor([5])},
        )
    code, said, _ = cli("export", run, tmp_path / "model.onnx", "--to", "onnx")
    assert code == 0
    assert said.startswith(f"written: {tmp_path / 'model.onnx'} (")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    fed = {name: value.numpy() for name, value in inputs.items()}
    for node in session.get_inputs()[1:] if task == "language" else ():
        kind = np.int64 if "int64" in node.type else np.float32
        fed[node.name] = np.zeros((1, *node.shape[1:]), kind)
    logits = torch.from_numpy(session.run(["logits"], fed)[0])
    model = load_run(run).model()
    expected = model(inputs["tokens"][None])[:, 0] if task == "language" else model(*inputs.values())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_exported_is_refused_and_leaves_nothing(waves, trained, refused, here):  # noqa: F811
    (here / "full").mkdir()
    (here / "full" / "notes.txt").write_text("mine")
    assert "folder full: exists (accepted: a new or an empty folder)" in refused("export", trained, "full")
    assert "unknown format 'onxx'" in refused("export", trained, "new", "--to", "onxx")
    assert "seed=7 is not in" in refused("export", trained, "new", "--seed", "7")
    assert "file full/notes.txt: exists" in refused("export", trained, "full/notes.txt", "--to", "torch")
