"""Arguments that cannot be meant: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import shlex

import pytest
from runs.small_runs import write_recipe


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "no command given (accepted: init, train, evaluate, predict, explain, generate, play, "),
        ("trian demo", "unknown command 'trian'; did you mean 'train'?"),
        ("train", "train needs either a recipe or --resume RUN"),
        ("train demo --resume run", "train needs either a recipe or --resume RUN"),
        ("train dmo", "unknown recipe 'dmo'; did you mean 'demo'?"),
        ("train japanese_vowels", "did you mean 'uea/japanese_vowels'"),
        ("train demo --epoch 3", "train has no option --epoch; did you mean --epochs?"),
        ("train demo --learning-rte=3", "train has no option --learning-rte; did you mean --learning_rate?"),
        ("train demo --nonsense", "train has no option --nonsense (see: kernel-attention train --help)"),
        (
            "train demo --eta 0.1",
            "no option --eta; it is an option of primal, primal_values, multilinear, kernel_gp: --attention "
            "'{primal: {eta: ...}}' (see",
        ),
        ("train demo --attention.primal.rank 3", "train has no option --attention.primal.rank"),
        ("train demo --seeds+ 3", "train has no option --seeds+; did you mean --seeds?"),
        ("train demo more", "unrecognized arguments: more"),
        ("train demo --epochs", "argument --epochs: expected one argument"),
        ("train demo --epochs x", "--epochs 'x' must be a whole number"),
        ("train demo --epochs 0", "--epochs '0' must be a whole number of at least 1"),
        ("train demo --learning-rate fast", "--learning_rate 'fast' must be a finite number"),
        ("train demo --learning-rate -1", "--learning_rate '-1' must be a finite number above 0"),
        ("train demo --dropout 1.5", "--dropout '1.5' must be a finite number of at least 0 and below 1"),
        ("train demo --norm-first maybe", "--norm_first 'maybe' must be true or false"),
        ("train demo --progress maybe", "--progress 'maybe' must be true or false"),
        ("train demo --seeds 1 1", "--seeds '[1,1]' must be one or more different whole numbers"),
        ("train demo --seeds []", "--seeds '[]' must be one or more different whole numbers"),
        (
            "train demo --protocol holdot",
            "'holdot' must be one of holdout, paper, thesis-1, thesis-3; did you mean 'holdout'?",
        ),
        ("train images/cifar10_tiny --protocol thesis-3", "'thesis-3' must be one of holdout, paper"),
        ("train demo --optimizer sgd", "--optimizer 'sgd' must be one of radam, adam, adamw"),
        ("train demo --precision 64-true", "--precision '64-true' must be one of auto, 32-true, bf16-mixed,"),
        ("train demo --accelerator abacus", "--accelerator 'abacus' must be one of auto, cpu, gpu, cuda,"),
        ("train demo --missing fill", "--missing 'fill' must be one of auto, interpolate, error"),
        ("train demo --dataset JapanesVowels", "'JapanesVowels'; did you mean 'JapaneseVowels'?"),
        ("train demo --dataset ../x", "dataset '../x' is not the name of a data set"),
        ("train demo --data-root missing", "data_root 'missing' does not exist"),
        ("train demo --attention primall", "unknown attention mechanism 'primall'; did you mean 'primal'"),
        ("train demo --attention '{primal: {rnk: 3}}'", "did you mean 'rank'?"),
        ("train demo --attention '{primal: {rank: 0}}'", "rank=0 must be a whole number of at least 1"),
        ("train demo --attention '{primal: 3}'", "must be a name or {name: options}"),
        ("train demo --attention '[primal]'", "lists 1 entries for num_layers=2"),
        ("train demo --num-heads 7", "embed_dim=64 must be divisible by num_heads=7"),
        ("train --resume missing", "run missing: not a run folder (it has no config.yaml)"),
        ("train --resume run --epochs 3 --output x", "and cannot take --epochs, --output"),
        ("evaluate", "the following arguments are required: run (see: kernel-attention evaluate --help)"),
        ("evaluate missing", "run missing: not a run folder"),
        ("evaluate missing --output x.txt", "output x.txt: the name must end in .csv or .json"),
        ("predict run", "the following arguments are required: file"),
        ("predict run x.npy --seed first", "--seed 'first' must be a whole number"),
        ("reproduce lra", "unknown suite 'lra'; did you mean 'primal_attention_lra' or"),
        ("list datasts", "unknown list 'datasts'; did you mean 'datasets'?"),
        ("list attention --attention primal", "list has no option --attention"),
    ],
)  # fmt: skip
def test_refused(command, message, refused):
    assert message in refused(*shlex.split(command))


@pytest.mark.parametrize("output", ["{file}", "{file}/run", "/proc/run", "/proc/1/run"])
def test_an_output_that_cannot_be_written(output, refused, waves, tmp_path):
    file = tmp_path / "file"
    file.touch()
    recipe = write_recipe(tmp_path / "recipe.yaml")
    message = refused("train", recipe, "--data-root", waves, "--output", output.format(file=file))
    assert message.startswith(f"output {output.format(file=file)}: ")


def test_an_output_that_is_in_use(refused, here, waves, tmp_path):
    (here / "run").mkdir()
    (here / "run" / "thesis.tex").touch()
    recipe = write_recipe(tmp_path / "recipe.yaml")
    message = refused("train", recipe, "--data-root", waves, "--output", "run")
    assert message == "output run is not empty: choose another folder, or continue it with --resume run"


def test_a_run_is_not_overwritten(refused, trained, waves, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    assert "is not empty" in refused("train", recipe, "--data-root", waves, "--output", trained)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dataset: Waves\nepoch: 3\n",
            "unknown key of recipe.yaml 'epoch'; did you mean 'epochs' or 'warmup_epochs'?",
        ),
        ("dataset: Waves\nattention: {primal: {rank: 3\n", "recipe.yaml: not valid YAML"),
        ("", "recipe.yaml: expected lines of the form key: value"),
        ("dataset: Wavs\n", "unknown dataset 'Wavs'; did you mean 'Waves'"),
    ],
)
def test_a_bad_recipe(text, message, refused, here, waves):
    (here / "recipe.yaml").write_text(text)
    assert message in refused("train", "recipe.yaml", "--data-root", waves)
