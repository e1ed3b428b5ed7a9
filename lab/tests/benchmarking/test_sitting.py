"""The sitting on a GPU, tried on the CPU with tiny sizes."""

from __future__ import annotations

import json

import pytest

from kernel_attention_lab.benchmarking import machine, sitting

TINY = ["--device", "cpu", "--dtype", "float32", "--widths", "16", "--lengths", "9", "--model-length", "16"]


def test_the_plan_has_every_form_of_every_width_and_length():
    plan = list(sitting.pieces())
    assert {(each.setting.embed_dim, each.setting.length, each.setting.is_causal) for each in plan} == {
        (width, length, is_causal)
        for width in (256, 512, 1024) for length in (1024, 4096, 16384, 65536) for is_causal in (False, True)
    }  # fmt: skip
    assert {each.form for each in plan} == set(sitting.FORMS)
    assert {each.setting.body for each in plan} == {"layer", "vit", "tokens"}
    assert {each.form for each in plan if each.contender == "sdpa"} == set(sitting.FORMS)


def test_an_interrupted_sitting_keeps_its_rows_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "_LARGE", 16)
    monkeypatch.setattr(machine, "_COPIED", 1 << 12)
    monkeypatch.setattr(sitting, "_SECONDS", 0.0)
    plan = [
        each for each in sitting.pieces("cpu", "float32", [16], [9], 16) if each.form in ("eager", "graph")
    ]
    plan = [each for each in plan if each.contender in sitting.LAYERS[:4]][:8]
    path = tmp_path / "record.json"
    first = sitting.sit(plan[:3], 60.0, path)
    kept = json.loads(path.read_text())["rows"]
    assert kept == first["rows"]
    assert len(kept) == 3
    done = [row for row in kept if "failed" not in row]
    assert 0 < len(done) < 3
    assert sitting.sit(plan, 0.0, path)["rows"] == done, "what failed is tried again"
    record = sitting.sit(plan, 60.0, path)
    assert record["rows"][: len(done)] == done
    assert len(record["rows"]) == len(plan)
    assert not record["left"]
    for row in record["rows"]:
        if row["form"] == "graph":
            assert row["failed"]  # no CUDA graph on a CPU
        else:
            assert row["seconds"]["lower"] <= row["seconds"]["median"] <= row["seconds"]["upper"]
            assert row["operations"] > 0
            assert row["share"] > 0


@pytest.mark.slow  # Inductor compiles a model
def test_a_model_is_compiled_with_its_objective(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_LARGE", 16)
    monkeypatch.setattr(machine, "_COPIED", 1 << 12)
    monkeypatch.setattr(sitting, "_SECONDS", 0.0)
    plan = [
        each for each in sitting.pieces("cpu", "float32", [16], [9], 16)
        if each.form == "compiled" and each.setting.body == "tokens" and each.contender in sitting.MODELS[1:2]
    ]  # fmt: skip
    (row,) = sitting.sit(plan, 60.0, tmp_path / "record.json")["rows"]
    assert "failed" not in row


def test_the_record_of_another_revision_is_moved_aside(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"machine": {"revision": "abc"}, "rows": [{"failed": "old"}]}))
    assert sitting.sit([], 60.0, path)["rows"] == []
    assert json.loads((tmp_path / "record-abc.json").read_text())["rows"] == [{"failed": "old"}]


def test_the_program_prints_what_it_measures(tmp_path, capsys):
    path = tmp_path / "record.json"
    assert sitting.run_sitting([*TINY, "--seconds", "0", "--record", str(path)]) == 0
    assert "0 rows" in capsys.readouterr().out
