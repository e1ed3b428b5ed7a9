"""``convert``: a folder of Hugging Face's into another, interrupted and gone on with."""

from __future__ import annotations

import json

import pytest
import torch

from kernel_attention.analysis.conversion import convert as conversion

transformers = pytest.importorskip("transformers")
WORDS = ["a", "good", "bad", "film", "is", "not", "the", "plot", "long", "short"]
QUICK = ("--steps", 3, "--batch_size", 4)


@pytest.fixture
def model(tmp_path):
    """The folder of a small encoder with its tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=12, num_hidden_layers=3, num_attention_heads=3,
        intermediate_size=12,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """A file of twenty texts."""
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(" ".join(WORDS[i % 7 : i % 7 + 3 + i % 3]) for i in range(20)) + "\n\n")
    return file


def test_the_folder_opens_with_what_was_trained(cli, here, model, texts):
    code, out, err = cli("convert", model, "--data", texts, "--output", "new", "--layers", "0,-1", *QUICK)
    assert code == 0
    assert "encoder.layer.2.attention.self" in out
    assert "written: new" in out
    assert "record: 1 of 1" in err
    assert not (here / "new" / "conversion.pt").exists()
    report = json.loads((here / "new" / "conversion.json").read_text())
    assert [layer["path"][:15] for layer in report["layers"]] == ["encoder.layer.0", "encoder.layer.2"]
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        "new", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    kinds = [type(layer.attention.self).__name__ for layer in loaded.bert.encoder.layer]
    assert kinds[1] == "BertSelfAttention"
    assert kinds[0] == kinds[2] != kinds[1]
    batch = transformers.AutoTokenizer.from_pretrained("new")(["a good film"], return_tensors="pt")
    assert loaded.eval()(**batch).logits.isfinite().all()


def test_an_interruption_and_the_same_command(cli, here, model, texts, monkeypatch):
    command = ("convert", model, "--data", texts, "--output", "new", "--layers", "all", *QUICK)
    trained, train = [], conversion.transfer_attention

    def stop(layer, calls, descent):
        trained.append(layer)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return train(layer, calls, descent)

    monkeypatch.setattr(conversion, "transfer_attention", stop)
    code, _, err = cli(*command)
    assert code == 1
    assert "resume: the same command goes on" in err
    assert [path.name for path in (here / "new").iterdir()] == ["conversion.pt"]
    assert "other seed" in cli(*command, "--seed", 1)[2]
    assert cli(*command)[0] == 0
    assert len(trained) == 4  # the first two were not trained again
    code, _, err = cli(*command)
    assert code == 2
    assert "holds a conversion that is done" in err
    again = ("convert", "new", "--data", texts, "--output", "newer", *QUICK)
    assert "holds 'linear' already" in cli(*again)[2]


def test_bad_input_is_one_line(refused, model, texts, tmp_path):
    given = ("convert", model, "--data", texts, "--output", "new", *QUICK)
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "convert needs --data" in refused("convert", model, "--output", "new")
    assert "holds no text" in refused(*given, "--data", tmp_path / "empty.txt")
    assert "missing.txt" in refused(*given, "--data", tmp_path / "missing.txt")
    assert "transformers cannot open it" in refused("convert", tmp_path / "none", *given[2:])
    assert "holds other files" in refused(*given, "--output", tmp_path / "full")
    assert "unknown attention mechanism 'liner'" in refused(*given, "--attention", "liner")
    assert "9" in refused(*given, "--layers", "9")
    assert "steps=-1" in refused(*given, "--steps", "-1")


def test_the_folder_is_exported_as_a_program(cli, refused, here, model, texts):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert cli("convert", model, "--data", texts, "--output", "new", "--layers", "0", *QUICK)[0] == 0
    code, said, _ = cli("export", "new", "new.onnx", "--to", "onnx")
    assert (code, said) == (0, "written: new.onnx (texts of 2 to 512; pad shorter ones)\n")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained("new").eval()
    batch = transformers.AutoTokenizer.from_pretrained("new")(
        ["a good film", "the plot is not short"], padding=True, return_tensors="pt"
    )
    session = onnxruntime.InferenceSession("new.onnx")
    (logits,) = session.run(None, {name: batch[name].numpy() for name in ("input_ids", "attention_mask")})
    with torch.no_grad():
        expected = loaded(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)

    assert "is a folder of transformers already" in refused("export", "new", "newer")
    assert "has no seeds" in refused("export", "new", "new.pt2", "--to", "torch", "--seed", "1")
    assert "file new.onnx: exists" in refused("export", "new", "new.onnx", "--to", "onnx")
    (here / "new" / "model.safetensors").unlink()
    assert "transformers cannot open it" in refused("export", "new", "new.pt2", "--to", "torch")
