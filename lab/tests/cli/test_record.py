"""The command ``record``."""

from __future__ import annotations

import json

from kernel_attention_lab.evidence import make_records, read_records


def test_a_run_becomes_records(cli, here, trained):
    code, out, err = cli("record", trained, "--to", "results/waves", "--label", "primal_3")
    assert (code, err) == (0, "")
    assert out == "written: results/waves/primal_3-0.json\nwritten: results/waves/primal_3-1.json\n"
    assert read_records(here / "results/waves") == make_records(trained, label="primal_3")
    code, out, _ = cli("record", trained, "--to", "results/waves", "--label", "primal_3")
    assert (code, out.count("unchanged: ")) == (0, 2)


def test_what_cannot_be_recorded_is_one_line(refused, cli, here, trained, tmp_path):
    assert "record needs --to FOLDER" in refused("record", trained)
    assert "not a run folder" in refused("record", tmp_path, "--to", "results")
    assert "label 'a/b' must be letters, digits" in refused("record", trained, "--to", "x", "--label", "a/b")
    for label, size in (("a" * 400, 400), ("ü" * 101, 202)):
        said = refused("record", trained, "--to", "x", "--label", label)
        assert f"has {size} bytes; accepted: up to 200" in said
    assert cli("record", trained, "--to", "x")[0] == 0
    path = here / "x/primal-1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"label": "other"}))
    assert "is there with other content" in refused("record", trained, "--to", "x")
    (here / "file").write_text("")
    assert "cannot be written" in refused("record", trained, "--to", "file/x")
