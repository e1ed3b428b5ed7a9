"""Places that cannot be read or written, and screens that lack characters: one line, and no result lost."""

from __future__ import annotations

import io
import os
import sys

import pytest
from runs.small_runs import write_recipe

from kernel_attention_lab.cli import main

LONG = "x" * 300
COMMANDS = [
    ["predict", "PLACE", "PLACE/x.csv"],
    ["evaluate", "PLACE"],
    ["analyze", "PLACE"],
    ["export", "PLACE", "y"],
    ["compare", "PLACE", "PLACE2"],
    ["record", "PLACE", "--to", "y"],
    ["train", "--resume", "PLACE"],
    ["train", "PLACE/x.yaml"],
    ["sweep", "--resume", "PLACE"],
    ["reproduce", "PLACE/x.yaml"],
    ["init", "PLACE/x.csv"],
    ["attack", "PLACE"],
    ["play", "PLACE"],
    ["list", "datasets", "--data-root", "PLACE"],
    ["train", "demo", "--dataset", "Nope", "--data-root", "PLACE"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
@pytest.mark.parametrize("place", [LONG, "loop/run"])
def test_a_place_that_the_system_refuses_is_named_in_one_line(words, place, refused, here, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    said = refused(*(word.replace("PLACE", str(tmp_path / place)) for word in words))
    assert place in said


def test_a_working_folder_that_was_removed(cli, here, tmp_path):
    here.rmdir()
    assert cli("list", "recipes")[0] == 0
    code, _, err = cli("train", "demo", "--output", "run", "--data-root", tmp_path)
    assert code in (1, 2)
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [13, 28])
def test_an_answer_of_the_system_is_one_line(number, cli, here, monkeypatch):
    def fail(options):
        raise OSError(number, os.strerror(number), "somewhere" if number == 13 else None)

    monkeypatch.setitem(main.__globals__["_COMMANDS"], "list", fail)
    code, _, err = cli("list", "datasets")
    said = {13: (2, "error: somewhere: "), 28: (1, "failed: ")}[number]
    assert (code, err) == (said[0], f"{said[1]}{os.strerror(number)}\n")


def test_an_error_of_ours_keeps_its_traceback(cli, here, monkeypatch):
    def fail(options):
        raise ChildProcessError("every worker ended")

    monkeypatch.setitem(main.__globals__["_COMMANDS"], "list", fail)
    with pytest.raises(ChildProcessError):
        cli("list", "datasets")


@pytest.mark.parametrize("encoding", ["ascii", "cp932", "utf-8"])
def test_a_screen_that_lacks_a_character_gets_all_the_others(encoding, here, monkeypatch, waves):
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)

    def say(options):
        print("caf\udce9 · 3")
        return 0

    monkeypatch.setitem(main.__globals__["_COMMANDS"], "list", say)
    assert main(["list", "datasets"]) == 0
    screen.flush()
    said = screen.buffer.getvalue().decode(encoding)
    assert said.startswith("caf\\udce9 ")
    assert said.endswith(" 3\n")


def test_a_run_folder_must_be_text(refused, here, waves):
    recipe = write_recipe(here / "recipe.yaml", epochs=1)
    folder = os.fsdecode(os.fsencode(here) + b"/caf\xe9")
    said = refused("train", recipe, "--data-root", waves, "--output", folder, "--progress", "false")
    assert "is no UTF-8" in said
