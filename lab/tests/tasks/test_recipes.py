"""Every shipped recipe: its facts are the papers', its header is true, its model takes a training step."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

from kernel_attention.core.objective import auxiliary_loss
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.mechanisms.primal.layer import PrimalAttention
from kernel_attention.series import Batch
from kernel_attention.series.task import SequenceTask
from kernel_attention_lab.arguments import parse
from kernel_attention_lab.runs import list_recipes, read_recipe, recipe_text
from kernel_attention_lab.tasks import Recipe
from kernel_attention_lab.tasks.registry import build_model

# Name, s, eta, rank multiplier, reported accuracy (Primal-Attention, supplement, table 1), shape of the data:
# channels, longest sequence, classes (UEA archive).
UEA = {
    "ethanol_concentration": ("EthanolConcentration", 30, 0.1, 10, 33.1, (3, 1751, 4)),
    "face_detection": ("FaceDetection", 20, 0.1, 5, 67.1, (144, 62, 2)),
    "handwriting": ("Handwriting", 30, 0.2, 5, 29.6, (3, 152, 26)),
    "heartbeat": ("Heartbeat", 30, 0.5, 10, 76.1, (61, 405, 2)),
    "japanese_vowels": ("JapaneseVowels", 40, 0.5, 5, 98.4, (12, 29, 9)),
    "pems_sf": ("PEMS-SF", 40, 0.1, 5, 89.6, (963, 144, 7)),
    "self_regulation_scp1": ("SelfRegulationSCP1", 30, 0.5, 10, 92.5, (6, 896, 2)),
    "self_regulation_scp2": ("SelfRegulationSCP2", 20, 0.0, 10, 57.2, (7, 1152, 2)),
    "spoken_arabic_digits": ("SpokenArabicDigits", 20, 0.1, 5, 100.0, (13, 93, 10)),
    "uwave_gesture_library": ("UWaveGestureLibrary", 20, 0.0, 10, 86.3, (3, 315, 8)),
}
SHAPES = {f"uea/{name}": row[-1] for name, row in UEA.items()} | {"demo": (12, 29, 9)}


def recipe_of(name: str) -> Recipe:
    return Recipe(**read_recipe(name)[1])


def header_of(name: str) -> str:
    lines = recipe_text(name).splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


def test_every_uea_recipe_is_in_the_table():
    assert {name for name in list_recipes() if name.startswith("uea/")} | {"demo"} == set(SHAPES)


@pytest.mark.parametrize("name", UEA)
def test_hyperparameters_are_the_papers(name):
    dataset, rank, eta, rank_multiplier, _, _ = UEA[name]
    recipe = recipe_of(f"uea/{name}")
    assert recipe.dataset == dataset
    options = dict(recipe.attention["primal"])
    assert (options.pop("rank"), options.pop("eta"), options.pop("rank_multiplier")) == (
        rank,
        eta,
        rank_multiplier,
    )
    squared = {"square_per": "sequence", "objective_bound": None}
    assert options == (squared if eta else {}), "the objective as the released code squares it"
    shape = (recipe.embed_dim, recipe.num_heads, recipe.num_layers, recipe.feedforward_dim, recipe.dropout)
    assert shape == (512, 8, 2, 2048, 0.1)
    assert recipe.epochs == (400 if name == "pems_sf" else 100)
    assert (recipe.batch_size, recipe.learning_rate, recipe.gradient_clip) == (16, 1e-3, 4.0)
    assert recipe.optimizer == ("adam" if name == "spoken_arabic_digits" else "radam")
    assert (recipe.positions, recipe.pooling, recipe.norm_first) == ("learnt", "flatten", False)
    assert recipe.protocol == "holdout", "the optimistic protocol is only ever chosen by name"


def test_every_header_names_the_command_that_runs_it():
    for name in list_recipes():
        commands = re.findall(r"^# +kernel-attention +(train .+)$", header_of(name), re.MULTILINE)
        assert commands, name
        for command in commands:
            parsed, options, _ = parse(shlex.split(command))
            assert (parsed, options.recipe) == ("train", name)


@pytest.mark.parametrize("name", UEA)
def test_header_names_the_reported_figure(name):
    reported = re.search(r"Reported.*?: (\d+(?:\.\d)?)", header_of(f"uea/{name}"))
    assert float(reported[1]) == UEA[name][4]


@pytest.mark.parametrize("name", [name for name in list_recipes() if "task" not in read_recipe(name)[1]])
def test_model_takes_a_training_step(name):
    # The other families' recipes name many sets; their models are tried on a shape of no set.
    recipe, (channels, length, classes) = recipe_of(name), SHAPES.get(name, (5, 24, 3))
    torch.manual_seed(0)
    facts = {
        "num_features": channels,
        "max_len": length,
        "class_names": [str(index) for index in range(classes)],
    }
    task = SequenceTask(build_model(recipe, facts), recipe)
    layers = [layer.attention for layer in task.model.encoder.layers]
    assert name not in SHAPES or all(isinstance(layer, PrimalAttention) for layer in layers)
    steps = min(length, 24)  # the model has the set's sizes, and N^2 of softmax layers tells nothing more
    x, mask = torch.randn(2, steps, channels), torch.ones(2, steps, dtype=torch.bool)
    mask[1, -2:] = False
    before = task.model.head.weight.detach().clone()
    optimizer, _ = task.make_optimizer()
    loss = torch.nn.functional.cross_entropy(task.model(*Batch(x, mask)[:2]), torch.tensor([0, classes - 1]))
    (loss + auxiliary_loss(task.model)).backward()
    norm = torch.nn.utils.clip_grad_norm_(task.parameters(), recipe.gradient_clip)
    optimizer.step()
    assert torch.isfinite(norm)
    assert not torch.equal(task.model.head.weight, before)
    penalized = [layer for layer in layers if isinstance(layer, PenalizedAttention)]
    assert [layer.objective is not None for layer in penalized] == [layer.eta > 0 for layer in penalized]
