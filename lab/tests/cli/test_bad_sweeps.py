"""Sweeps that cannot be meant: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import shlex

import pytest
from runs.small_runs import write_recipe

RATES = "--grid learning_rate=0.001,0.01"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "sweep needs either a recipe or --resume FOLDER"),
        ("RECIPE", "a sweep needs a space: --grid KEY=VALUES, --range KEY=LOW,HIGH or --space FILE"),
        (f"dmo {RATES}", "unknown recipe 'dmo'; did you mean 'demo'?"),
        ("RECIPE --grid learning_rte=1", "unknown key of the space 'learning_rte'; did you mean"),
        ("RECIPE --grid lr=1", "unknown key of the space 'lr'; did you mean 'learning_rate'?"),
        ("RECIPE --grid learning_rate", "--grid 'learning_rate' must be KEY=VALUES, such as"),
        ("RECIPE --grid learning_rate=", "must be KEY=VALUES"),
        ("RECIPE --grid learning_rate=[0.1", "not valid YAML"),
        ("RECIPE --grid learning_rate=0.1,fast", "learning_rate='fast' must be a finite number above 0"),
        ("RECIPE --grid learning_rate=0.1,0.10", "learning_rate has the value 0.1 twice"),
        ("RECIPE --grid learning_rate=[]", "space: learning_rate has no values"),
        (f"RECIPE {RATES} {RATES}", "space: key learning_rate is given twice"),
        (f"RECIPE {RATES} --learning_rate 0.1", "--learning_rate is the same for every point, but"),
        ("RECIPE --grid attention=[softmax,primall]", "unknown attention mechanism 'primall'; did you mean"),
        ("RECIPE --grid seeds=0,1", "seeds cannot vary in a sweep: its figures are averaged over the seeds"),
        ("RECIPE --grid dataset=[Waves]", "dataset cannot vary in a sweep: figures of different data"),
        ("RECIPE --grid protocol=[paper]", "protocol cannot vary in a sweep"),
        ("RECIPE --range learning_rate=0.1,1", "learning_rate is a range, and a grid takes values"),
        ("RECIPE --sampler tpe --range learning_rate=1", "--range learning_rate must be LOW,HIGH"),
        ("RECIPE --sampler tpe --range learning_rate=1,0.1", "must have low below high, found 1.0 and 0.1"),
        ("RECIPE --sampler tpe --range dropout=0,0.5,log", "has log, so low must be above 0, found 0.0"),
        ("RECIPE --sampler tpe --range epochs=1,9,0.5", "the step of epochs must be a whole number above 0"),
        ("RECIPE --sampler tpe --range attention=1,2", "attention takes no numbers"),
        ("RECIPE --sampler tpe --range epochs=1,9.5", "epochs=9.5 must be a whole number"),
        (f"RECIPE {RATES} --sampler sobol", "--sampler 'sobol' must be one of grid, random, tpe"),
        (f"RECIPE {RATES} --points 3", "points=3: the grid has 2 points, and all of them are run"),
        (f"RECIPE {RATES} --sampler tpe --points 0", "points=0 must be a whole number between 1 and 10000"),
        (f"RECIPE {RATES} --sampler random --sampler_seed -1", "sampler_seed=-1 must be a whole number"),
        (f"RECIPE {RATES} --workers 0", "workers=0 must be a whole number between 1 and 256"),
        (f"RECIPE {RATES} --dataset Nowhere", "Nowhere"),
        ("RECIPE --space missing.yaml", "missing.yaml: cannot be read"),
        ("RECIPE --space RECIPE", "expected the key space with the values of every key below it"),
        ("--resume missing", "sweep missing: not a sweep folder (it has no sweep.json)"),
        (f"--resume missing {RATES}", "and cannot take --grid"),
        (f"RECIPE {RATES} --output FULL", "is not empty, and holds no sweep"),
    ],
)  # fmt: skip
def test_one_line(command, message, refused, waves, here):
    recipe = write_recipe(here / "small.yaml")
    full = here / "full"
    full.mkdir()
    (full / "file").touch()
    words = command.replace("RECIPE", str(recipe)).replace("FULL", str(full))
    root = () if "--resume" in command else ("--data_root", waves)
    assert message in refused("sweep", *shlex.split(words), *root)


def test_a_space_in_a_file(refused, waves, here):
    recipe = write_recipe(here / "small.yaml")
    for content, message in (
        ("space: {learning_rate: 0.1}", "learning_rate must be a list of values, or a range"),
        ("space: {learning_rate: {low: 0.1}}", "the range of learning_rate needs low and high"),
        ("space: {learning_rate: {low: 0.1, hi: 1}}", "unknown entry of the range of learning_rate 'hi'"),
        ("space: {epochs: [1]}\nrecipe: demo", "unknown key of"),
        ("- 1", "expected the key space"),
    ):
        (here / "space.yaml").write_text(content)
        said = refused("sweep", recipe, "--space", "space.yaml", "--data_root", waves)
        assert message in said, said
