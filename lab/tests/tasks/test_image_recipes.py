"""The recipes of images: their settings and figures are the papers', every model in a header builds."""

from __future__ import annotations

import re

import pytest
import torch
import yaml

from kernel_attention.errors import InputError
from kernel_attention.models.encoder_layer import ChannelAttention
from kernel_attention_lab.runs import list_recipes, read_recipe, recipe_text
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.images import ImageExperiment, ImageRecipe

NAMES = [name for name in list_recipes() if name.startswith("images/")]

# Width, heads, hidden width (DeiT), and the first figure of every row: top-1 on ImageNet-1K.
PAPERS = {
    "imagenet_deit_tiny": ((192, 3, 768), {
        "SymViT": 70.44, "RPC-SymViT(4iter/layer1)": 70.94, "RPC-SymViT(5iter/layer1)": 71.31,
        "RPC-SymViT(6iter/layer1)": 71.49, "RPC-SymViT(2iter/all-layer)": 70.59, "ViT": 72.11,
        "RPC-AsymViT(4iter/layer1)": 72.34, "RPC-AsymViT(Sym/Asym)": 72.34, "Scaled-alpha": 73.02,
        "Scaled-S": None,
    }),
    "imagenet_deit_tiny_4_heads": ((192, 4, 768), {
        "softmax": 72.23, "Attention-Conv2D": 73.18, "Attention-BN": None, "Attention-SH": None,
        "Attention-BN+SH": None,
    }),
    "imagenet_deit_small": ((384, 6, 1536), {"DeiT-Small/16": None, "Primal.+DeiT-Small/16": None}),
    "imagenet100_deit_small": ((384, 6, 1536), {"DeiT-Small/16": None, "Primal.+DeiT-Small/16": None}),
    "imagenet_deit_base": ((768, 12, 3072), {
        "SymViT-base": 80.62, "RPC-SymViT-base(2iter/all-layer)": 80.72, "DeiT-base": None,
    }),
    "imagenet_fan_tiny": ((192, 3, 768), {"FAN-tiny": 77.89, "RPC-FAN-tiny(4iter/layer1)": 77.98}),
}  # fmt: skip


def recipe_of(name: str) -> ImageRecipe:
    recipe = make_recipe(read_recipe(name)[1])
    assert isinstance(recipe, ImageRecipe)
    return recipe


def rows_of(name: str) -> dict[str, tuple[float | None, object]]:
    """{what: (the first figure, attention)} of the header's rows; attention is None for the recipe's own."""
    text = recipe_text(name)
    found = re.findall(
        r"^#   (?:([\d.]+|-)(?: +(?:[\d.]+|-))* +)?([A-Za-z]\S*) {2,}(?:'(.*)'|(\w+)|\(this recipe\))$",
        text, re.MULTILINE,
    )  # fmt: skip
    return {
        what: (None if figure in ("", "-") else float(figure), yaml.safe_load(spec or word or "null"))
        for figure, what, spec, word in found
    }


def first(options: dict, other: str) -> list:
    return [{"rpc": options}, *[other] * 11]


@pytest.mark.parametrize("name", PAPERS)
def test_training_is_deits(name):
    recipe, (shape, _) = recipe_of(f"images/{name}"), PAPERS[name]
    assert (recipe.embed_dim, recipe.num_heads, recipe.feedforward_dim) == shape
    assert (recipe.num_layers, recipe.image_size, recipe.patch_size, recipe.pooling) == (12, 224, 16, "class")
    assert recipe.kept_size == 256
    assert (recipe.optimizer, recipe.weight_decay, recipe.gradient_clip) == ("adamw", 0.05, 0.0)
    assert recipe.learning_rate == 5e-4 * recipe.batch_size / 512
    assert (recipe.epochs, recipe.warmup_epochs, recipe.schedule) == (300, 5, "cosine")
    assert (recipe.augmentation, recipe.random_erasing, recipe.repeats) == ("deit", 0.25, 3)
    assert (recipe.mixup, recipe.cutmix, recipe.label_smoothing) == (0.8, 1.0, 0.1)
    assert (recipe.dropout, recipe.drop_path, recipe.ema_decay) == (0.0, 0.1, 0.99996)
    assert recipe.protocol == "holdout", "the optimistic protocol is only ever chosen by name"
    rates = [recipe.learning_rate * recipe.learning_rate_factor(step, 10**6) for step in (0, 5 * 10**6)]
    assert rates[0] == pytest.approx(1e-6, rel=1e-3)
    assert rates[1] == recipe.learning_rate
    assert recipe.learning_rate * recipe.learning_rate_factor(300 * 10**6, 10**6) == pytest.approx(1e-5)


@pytest.mark.parametrize("name", PAPERS)
def test_figures_are_the_papers(name):
    assert {what: figure for what, (figure, _) in rows_of(f"images/{name}").items()} == PAPERS[name][1]


def test_mechanisms_are_the_papers():
    tiny = {what: spec for what, (_, spec) in rows_of("images/imagenet_deit_tiny").items()}
    assert tiny == {
        "SymViT": "symmetric",
        **{
            f"RPC-SymViT({n}iter/layer1)": first({"iterations": n, "lam": 4.0}, "symmetric")
            for n in (4, 5, 6)
        },
        "RPC-SymViT(2iter/all-layer)": {"rpc": {"iterations": 2, "lam": 3.0}},
        "ViT": None,
        "RPC-AsymViT(4iter/layer1)": first({"iterations": 4, "lam": 4.0, "symmetric": False}, "softmax"),
        "RPC-AsymViT(Sym/Asym)": first({"iterations": 4, "lam": 4.0}, "softmax"),
        "Scaled-alpha": {"scaled": {"scaling": "symmetric"}},
        "Scaled-S": {"scaled": {"scaling": "matrix"}},
    }
    heads = {what: spec for what, (_, spec) in rows_of("images/imagenet_deit_tiny_4_heads").items()}
    factors = [1, 1, 2, 4]
    assert heads == {
        "softmax": None,
        "Attention-Conv2D": {"conv2d": {"kernel_size": 2}},
        "Attention-BN": {"batch_norm": {"beta": 1.0}},
        "Attention-SH": {"scaled_heads": {"factors": factors}},
        "Attention-BN+SH": {"batch_norm_scaled_heads": {"beta": 1.0, "factors": factors}},
    }
    for name in ("imagenet_deit_small", "imagenet100_deit_small"):
        primal = rows_of(f"images/{name}")["Primal.+DeiT-Small/16"][1]
        assert primal == ["softmax"] * 11 + [{"primal": {"rank": 96, "eta": 0.05, "rank_multiplier": 10}}]
    base = rows_of("images/imagenet_deit_base")["RPC-SymViT-base(2iter/all-layer)"][1]
    assert base == {"rpc": {"iterations": 2, "lam": 3.0}}
    fan = recipe_of("images/imagenet_fan_tiny")
    assert (fan.attention, fan.channel_attention) == ("symmetric", True)
    assert rows_of("images/imagenet_fan_tiny")["RPC-FAN-tiny(4iter/layer1)"][1] == first(
        {"iterations": 4, "lam": 4.0}, "symmetric"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_model_of_a_header_builds_at_its_size(name):
    """On the meta device; DeiT-tiny with softmax has DeiT-tiny's 5.7 million parameters."""
    recipe, rows = recipe_of(name), rows_of(name)
    side = recipe.image_size or {"cifar10": 32, "tiny_imagenet100": 64}[recipe.dataset]
    facts = {"height": side, "width": side, "class_names": [str(n) for n in range(1000)]}
    counts = {}
    for what, (_, attention) in [("", (None, None)), *rows.items()]:
        keys = read_recipe(name)[1] | ({} if attention is None else {"attention": attention})
        recipe = make_recipe(keys)
        with torch.device("meta"):
            model = ImageExperiment.build_model(recipe, facts)
        counts[what] = sum(parameter.numel() for parameter in model.parameters())
        channels = sum(isinstance(module, ChannelAttention) for module in model.modules())
        assert channels == (recipe.num_layers if recipe.channel_attention else 0)
    published = {"imagenet_deit_tiny": 5_717_416, "imagenet_deit_small": 22_050_664,
                 "imagenet_deit_base": 86_567_656}  # fmt: skip
    assert counts[""] == published.get(name.removeprefix("images/"), counts[""])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"crop_ratio": 0.875}, "crop_ratio=0.875 needs an image_size"),
        ({"crop_ratio": 0.0, "image_size": 32}, "crop_ratio=0.0 must be"),
        ({"crop_ratio": 1.5, "image_size": 32}, "crop_ratio=1.5 must be"),
        ({"augmentation": "rand"}, "augmentation='rand' must be one of none, crop_flip, deit"),
        ({"warmup_epochs": 3, "epochs": 3}, "warmup_epochs=3 must be below epochs=3"),
        ({"min_learning_rate": 1.0}, "min_learning_rate=1.0 exceeds learning_rate=0.0005"),
        ({"norm_first": False}, "a vision transformer has norm_first=true"),
    ],
)
def test_keys_that_do_not_go_together(keys, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ImageRecipe(dataset="cifar10", **keys)
