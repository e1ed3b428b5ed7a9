"""10,000 generated cases: mechanisms, options, masks, precisions and call forms against what must equal them.

A case is a seed. It draws a mechanism with options, sizes, a mask, a form of call, and one of the relations
below that holds for all of these. ``run(seed)`` repeats a case; a failure names its seed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from contracts.rounded import spread
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_attention import auxiliary_loss, create_attention, list_attention
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.mechanisms import get_mechanism
from reference import kernel_pca, multilinear, primal, regression, softmax, support_vector

CASES, BLOCKS = 10_000, 40
MAX_LEN = 12
UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}

Options = dict[str, Any]


@dataclass
class Drawn:
    """A mechanism with options, and what the oracles call them."""

    name: str
    options: Options = field(default_factory=dict)
    oracle: Options | None = None
    causal: bool = True
    grid: int = 0  # tokens, where the options fix their number
    other: Options | None = None  # options of another form of the same numbers
    other_causal: bool = False


def draw_mechanism(rng: random.Random, heads: int) -> Drawn:
    name = rng.choice([mechanism.name for mechanism in list_attention()])
    return DRAW.get(name, draw_default)(rng, name, heads)


def draw_default(rng: random.Random, name: str, heads: int) -> Drawn:
    """A mechanism that no function below knows: without options, and without an oracle."""
    return Drawn(name, causal=get_mechanism(name).causal)


def draw_softmax(rng: random.Random, name: str, heads: int) -> Drawn:
    kernel = "cosine" if name == "cosine" else "softmax"
    return Drawn(name, {"bias": rng.random() < 0.7}, {"kernel": kernel, "symmetric": name == "symmetric"})


def draw_linear(rng: random.Random, name: str, heads: int) -> Drawn:
    oracles: dict[str, Options | None] = {
        "elu": {"kernel": "linear"},
        "relu": {"kernel": "linear", "feature_map": torch.relu},
        "identity": {"kernel": "linear", "feature_map": lambda x: x, "normalize_rows": False},
        "cosine": {"kernel": "linear", "feature_map": lambda x: x / x.norm(), "normalize_rows": False},
        "frobenius": None, "softmax_plus": None, "taylor": None,
    }  # fmt: skip
    feature_map = rng.choice(list(oracles))
    return Drawn(name, {"feature_map": feature_map, "bias": rng.random() < 0.7}, oracles[feature_map])


def draw_ridge(rng: random.Random, name: str, heads: int) -> Drawn:
    oracles: dict[str, Options | None] = {
        "cosine": {}, "identity": {"feature_map": lambda x: x}, "relu": {"feature_map": torch.relu},
        "elu": {"feature_map": lambda x: torch.where(x > 0, x + 1, torch.exp(x))},
        "frobenius": None, "taylor": None,
    }  # fmt: skip
    feature_map = rng.choice(list(oracles))
    options = {
        "feature_map": feature_map, "lam": rng.choice([0.1, 1.0, 10.0]), "bias": rng.random() < 0.7,
        "forgetting": rng.choice([None, 0.92, 0.99]),
    }  # fmt: skip
    return Drawn(name, options, oracles[feature_map])


def draw_delta(rng: random.Random, name: str, heads: int) -> Drawn:
    return Drawn(name, {"bias": rng.random() < 0.7}, {})


def draw_kernel(rng: random.Random, *, strides: tuple[int, ...] = (1, 2, 3, 4, 6)) -> tuple[Any, Options]:
    """A kernel and the oracle's words for it."""
    kind = rng.choice(["softmax", "linear", "sparse"])
    if kind != "sparse":
        return kind, {"kernel": kind}
    pattern, stride = rng.choice(["strided", "fixed"]), rng.choice(strides)
    summary = rng.randint(1, stride) if pattern == "fixed" else 1
    options = {"pattern": pattern, "stride": stride, "summary": summary}
    return {"sparse": options}, {"kernel": "sparse", "pattern": (pattern, stride, summary)}


def draw_sparse(rng: random.Random, name: str, heads: int) -> Drawn:
    pattern, stride = rng.choice(["strided", "fixed"]), rng.randint(1, 6)
    options = {"pattern": pattern, "stride": stride}
    options["summary"] = rng.randint(1, stride) if pattern == "fixed" else 1
    oracle = {"kernel": "sparse", "pattern": (pattern, stride, options["summary"])}
    return Drawn(
        name, {**options, "impl": "dense"}, oracle, other={**options, "impl": "blocked"}, other_causal=True
    )


def draw_support_vector(rng: random.Random, name: str, heads: int) -> Drawn:
    kernel, oracle = draw_kernel(rng)
    options: Options = {"kernel": kernel}
    if "batch_norm" in name:
        options["beta"] = rng.choice([0.0, 0.5, 1.0])
        options["learn_beta"] = rng.random() < 0.3
        options["normalize"] = rng.random() < 0.4
        options["eps"] = rng.choice([1e-5, 1e-3, 0.5, 1.0])
        oracle |= {"beta": "learnt" if options["learn_beta"] else options["beta"]}
        oracle |= {"normalize": options["normalize"], "eps": options["eps"]}
    if "scaled_heads" in name:
        options["factors"] = [rng.randint(1, 4) for _ in range(heads)]
        options["pooling"] = rng.choice(["average", "max", "conv"])
        oracle |= {"factors": options["factors"], "pooling": options["pooling"]}
    centred = options.get("normalize") or options.get("learn_beta") or options.get("beta", 0.0) != 0
    # The oracle's bare exponentials overflow where keys that are all alike are divided by eps.
    bare = options.get("normalize") and options["eps"] < 0.1
    drawn = Drawn(name, options, None if bare else oracle, causal=not (kernel == "linear" and centred))
    if isinstance(kernel, dict):
        factors = options.get("factors", [1])
        if all(kernel["sparse"]["stride"] % factor == 0 for factor in factors):
            drawn.options = {**options, "kernel": {"sparse": {**kernel["sparse"], "impl": "dense"}}}
            drawn.other = {**options, "kernel": {"sparse": {**kernel["sparse"], "impl": "blocked"}}}
            drawn.other_causal = True
    return drawn


def draw_conv1d(rng: random.Random, name: str, heads: int) -> Drawn:
    kernel, oracle = draw_kernel(rng)
    kind = rng.choice(["shared", "separate", "separable"])
    options = {"kernel": kernel, "kernel_size": rng.randint(1, 5), "conv_weights": kind}
    return Drawn(name, options, {**oracle, "conv": kind})


def draw_conv2d(rng: random.Random, name: str, heads: int) -> Drawn:
    grid, class_tokens = (rng.randint(1, 3), rng.randint(1, 3)), rng.randint(0, 2)
    kind = rng.choice(["shared", "separate", "separable"])
    options = {
        "grid_size": grid, "class_tokens": class_tokens, "conv_weights": kind,
        "kernel_size": rng.randint(1, 3),
    }  # fmt: skip
    oracle = {"conv": kind, "grid": grid, "class_tokens": class_tokens}
    return Drawn(name, options, oracle, causal=False, grid=grid[0] * grid[1] + class_tokens)


def draw_primal(rng: random.Random, name: str, heads: int) -> Drawn:
    options = {
        "rank": rng.randint(1, 4), "rank_multiplier": rng.randint(1, 3), "eta": rng.choice([0.0, 0.3]),
        "data_dependent": rng.random() < 0.6, "running_means": rng.random() < 0.6,
        "feature_map": rng.choice(["cosine", "identity"]), "objective_form": rng.choice(["mean", "sum"]),
        "square_per": rng.choice(["batch", "sequence"]), "bias": rng.random() < 0.7,
    }  # fmt: skip
    return Drawn(
        name, {**options, "impl": "reference"}, {}, other={**options, "impl": "fused"},
        other_causal=not options["data_dependent"],
    )  # fmt: skip


def draw_multilinear(rng: random.Random, name: str, heads: int) -> Drawn:
    core = rng.choice(["none", "none", "cost", "mlsvd"])
    options = {
        "order": rng.choice([2, 3, 3, 4]), "rank": rng.randint(1, 2),
        "variant": rng.choice(["standard", "data_dependent", "learnable", "learnable_diagonal"]),
        "core": core, "eta": rng.choice([0.0, 0.3]), "eta_core": 0.1 if core == "cost" else 0.0,
        "rank_multiplier": rng.randint(1, 2),
        "feature_map": rng.choice(["frobenius", "frobenius", "cosine", "identity"]),
        "objective_form": rng.choice(["sum", "mean"]), "bias": rng.random() < 0.7,
    }  # fmt: skip
    fused = options["feature_map"] in ("frobenius", "identity")
    small = options["order"] <= 3 and options["feature_map"] in ("frobenius", "cosine")
    return Drawn(
        name, {**options, "impl": "reference"}, {} if small else None,
        other={**options, "impl": "fused"} if fused else None,
    )  # fmt: skip


def draw_dual(rng: random.Random, name: str, heads: int) -> Drawn:
    options = {"order": rng.choice([2, 3]), "rank": rng.randint(1, 3)}
    if rng.random() < 0.4:
        options["num_samples"] = rng.randint(1, 5)
    chunk_size = rng.randint(1, 5)
    return Drawn(name, options, {}, causal=False, other={**options, "chunk_size": chunk_size})


def draw_tensor(rng: random.Random, name: str, heads: int) -> Drawn:
    options = {"order": rng.choice([2, 3]), "rank": rng.randint(1, 3), "option": rng.choice([1, 2, 3])}
    return Drawn(name, options, {}, causal=False)


def draw_rpc(rng: random.Random, name: str, heads: int) -> Drawn:
    convention = rng.choice(["released", "paper"])
    options = {
        "iterations": rng.randint(1, 4), "convention": convention, "symmetric": rng.random() < 0.6,
        "lam": rng.choice([0.05, 0.3]) if convention == "paper" else rng.choice([0.1, 1.0, 4.0]),
    }  # fmt: skip
    return Drawn(name, options, {})


def draw_scaled(rng: random.Random, name: str, heads: int) -> Drawn:
    return Drawn(name, {"scaling": rng.choice(["symmetric", "matrix"])}, {})


DRAW: dict[str, Callable[[random.Random, str, int], Drawn]] = {
    "softmax": draw_softmax, "symmetric": draw_softmax, "cosine": draw_softmax, "linear": draw_linear,
    "ridge": draw_ridge, "delta": draw_delta, "gated_delta": draw_delta,
    "sparse": draw_sparse, "primal": draw_primal, "multilinear": draw_multilinear,
    "dual_multilinear": draw_dual, "tensor": draw_tensor, "batch_norm": draw_support_vector,
    "scaled_heads": draw_support_vector, "batch_norm_scaled_heads": draw_support_vector,
    "conv1d": draw_conv1d, "conv2d": draw_conv2d, "rpc": draw_rpc, "scaled": draw_scaled,
}  # fmt: skip


@dataclass
class Case:
    """A layer and the arguments of one call; ``arguments`` are those beside x."""

    rng: random.Random
    drawn: Drawn
    layer: AttentionLayer
    x: Tensor
    arguments: Options

    @property
    def mask(self) -> Tensor | None:
        return self.arguments.get("attention_mask")

    @property
    def context(self) -> Tensor | None:
        return self.arguments.get("context")

    @property
    def real(self) -> Tensor:
        """The tokens whose outputs mean something, (B, N)."""
        if self.mask is None or self.context is not None:
            return torch.ones(self.x.shape[:2], dtype=torch.bool)
        return self.mask

    def twin(self, options: Options) -> AttentionLayer:
        """The same weights with other options."""
        layer = build(self.drawn.name, self.layer.embed_dim, self.layer.num_heads, options)
        layer = layer.to(self.x.dtype)
        layer.load_state_dict(self.layer.state_dict())
        return layer


def build(name: str, embed_dim: int, heads: int, options: Options) -> AttentionLayer:
    takes = next(mechanism.options for mechanism in list_attention() if mechanism.name == name)
    extra = {"max_len": MAX_LEN} if "max_len" in takes else {}
    return create_attention(name, embed_dim, heads, **options, **extra)


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads, width, batch = rng.randint(1, 3), rng.choice([1, 2, 3, 5]), rng.randint(1, 3)
    drawn = draw_mechanism(rng, heads)
    layer = build(drawn.name, heads * width, heads, drawn.options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    layer = layer.double()
    length = drawn.grid or rng.randint(1, 9)
    x = torch.randn(batch, length, heads * width, dtype=torch.float64)
    arguments: Options = {"is_causal": drawn.causal and rng.random() < 0.4}
    keys = length
    if layer.supports(context=True) and not arguments["is_causal"] and rng.random() < 0.3:
        keys = rng.randint(1, 9)
        arguments["context"] = torch.randn(batch, keys, heads * width, dtype=torch.float64)
    kind = "none" if drawn.grid else rng.choice(["none", "right", "holes"])
    if kind != "none":
        lengths = torch.randint(1, keys + 1, (batch, 1))
        mask = torch.arange(keys)[None] < lengths
        arguments["attention_mask"] = mask if kind == "right" else mask[:, torch.randperm(keys)]
    return Case(rng, drawn, layer, x, arguments)


def loss_and_gradients(
    layer: AttentionLayer, x: Tensor, arguments: Options, real: Tensor, towards: Tensor
) -> list[Tensor]:
    """The real tokens' outputs, and the gradients of their product with ``towards`` plus the penalty."""
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf, **arguments)[real]
    total = (y * towards.to(y.dtype)[real]).sum() + auxiliary_loss(layer)
    leaves = [leaf, *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]


def close(
    found: list[Tensor], wanted: list[Tensor], unit: float, *computations: Callable[[], list[Tensor]]
) -> None:
    """Equal but for rounding: by a plain bound, or by what rounding does to the computations behind both."""
    plain = 1e3 if unit == UNITS[torch.float64] else 8.0
    offs = [(a.double() - b.double()).norm().item() for a, b in zip(found, wanted, strict=True)]
    if all(off <= plain * unit * (1 + b.norm().item()) for off, b in zip(offs, wanted, strict=True)):
        return
    spreads = [spread(run, run(), unit=unit, draws=4) for run in computations]
    for n, (off, *radii, value) in enumerate(zip(offs, *spreads, wanted, strict=True)):
        bound = 32 * sum(radii) + 64 * unit * (1 + value.norm().item())
        assert off <= bound, f"result {n} is off by {off:.3g} where roundings explain {bound:.3g}"


def equals_reference(case: Case) -> None:
    """Outputs and gradients of the loops in tests/reference."""
    oracle, layer, drawn = dict(case.drawn.oracle or {}), case.layer, case.drawn
    weights = dict(layer.named_parameters())
    x, towards = case.x.clone().requires_grad_(), torch.randn_like(case.x)
    again = lambda: loss_and_gradients(layer, case.x, case.arguments, case.real, towards)  # noqa: E731
    found_by_layer = again()  # first: it says what the bound of J is counted in
    heads, causal = {"num_heads": layer.num_heads}, {"is_causal": case.arguments["is_causal"]}
    penalty: Tensor | float = 0.0
    if drawn.name in ("softmax", "symmetric", "cosine"):
        y = softmax.attention(x, weights, case.mask, context=case.context, **heads, **causal, **oracle)
    elif drawn.name in ("ridge", "delta", "gated_delta"):
        y = regression.regression_attention(
            x, weights, case.mask, context=case.context, **heads, **causal, **oracle
        )
    elif drawn.name == "rpc":
        options = {name: getattr(layer, name) for name in ("iterations", "lam", "convention")}
        y = kernel_pca.rpc(x, weights, case.mask, **heads, **causal, **options)[0]
    elif drawn.name == "scaled":
        y = kernel_pca.scaled(x, weights, case.mask, context=case.context, **heads, **causal)
    elif drawn.name == "primal":
        no_lambda = torch.zeros(layer.num_heads, layer.rank, dtype=x.dtype)  # the oracle always makes J
        found = primal.primal_attention(
            x, {"sqrt_lambda": no_lambda, **weights}, case.mask,
            num_rows=layer.num_rows if layer.data_dependent else None, max_len=MAX_LEN,
            running_means=layer.running_means, cosine=drawn.options["feature_map"] == "cosine",
            **heads, **causal,
        )  # fmt: skip
        y = found.y
        if layer.eta:
            penalty = layer.squared_objective(found.objective(layer.objective_form, layer.square_per)).mean()
            penalty = layer.eta * penalty
    elif drawn.name == "multilinear":
        found = multilinear.multilinear_attention(
            x, weights, case.mask, variant=layer.variant, core=layer.core_treatment,
            feature_map=drawn.options["feature_map"], objective_form=layer.objective_form,
            num_rows=layer.num_rows if layer.variant == "data_dependent" else None, max_len=MAX_LEN,
            **heads, **causal,
        )  # fmt: skip
        y = found.y
        if layer.eta:
            penalty = layer.eta * layer.squared_objective(found.objective)
        penalty = penalty + layer.eta_core * found.core_penalty
    elif drawn.name == "dual_multilinear":
        y = multilinear.dual_attention(
            x, weights, case.mask, rank=layer.rank, num_samples=layer.num_samples, **heads
        )[0]
    elif drawn.name == "tensor":
        y = multilinear.tensor_attention(x, weights, case.mask, option=layer.option, **heads)[0]
    else:
        if oracle.get("beta") == "learnt":
            oracle["beta"] = layer.beta
        y = support_vector.support_vector_attention(
            x, weights, case.mask, context=case.context, **heads, **causal, **oracle
        )
    total = (y * towards)[case.real].sum() + penalty
    wanted = [y[case.real].detach()]
    wanted += torch.autograd.grad(total, [x, *weights.values()], allow_unused=True, materialize_grads=True)
    close(found_by_layer, wanted, UNITS[torch.float64], again)


def equals_the_other_form(case: Case) -> None:
    """impl reference against fused, dense against blocked, whole against chunked."""
    other, towards = case.twin(case.drawn.other or {}), torch.randn_like(case.x)
    one, two = (
        lambda layer=layer: loss_and_gradients(layer, case.x, case.arguments, case.real, towards)
        for layer in (other, case.layer)
    )
    close(one(), two(), UNITS[torch.float64], one, two)


def is_close_in_lower_precision(case: Case) -> None:
    """float32 with its gradients, bfloat16 without: off by what their roundings do to the float64 layer."""
    dtype = case.rng.choice([torch.float32, torch.bfloat16])
    low = copy.deepcopy(case.layer).to(dtype)
    exact = copy.deepcopy(low).double()
    x = case.x.to(dtype)
    lowered = {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in case.arguments.items()
    }
    raised = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in lowered.items()
    }
    towards = torch.randn_like(case.x).to(dtype)
    found = loss_and_gradients(low, x, lowered, case.real, towards)
    again = lambda: loss_and_gradients(exact, x.double(), raised, case.real, towards.double())  # noqa: E731
    assert all(value.isfinite().all() for value in found)
    count = len(found) if dtype == torch.float32 else 1
    close(found[:count], again()[:count], UNITS[dtype], lambda: again()[:count])


def is_finite_in_float32(case: Case) -> None:
    """Outputs and gradients, where float32 cannot hold what float64 holds."""
    low, x = copy.deepcopy(case.layer).float(), case.x.float()
    lowered = {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in case.arguments.items()
    }
    found = loss_and_gradients(low, x, lowered, case.real, torch.randn_like(x))
    assert all(value.isfinite().all() for value in found)


def equals_the_formula_of_attention(case: Case) -> None:
    """The fused operator against the formula's own kernel, at logits of ordinary and of large size."""
    size = case.rng.choice([1.0, 10.0, 100.0])
    x, towards = size * case.x, torch.randn_like(case.x)
    again = lambda: loss_and_gradients(case.layer, x, case.arguments, case.real, towards)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        wanted = again()
    close(again(), wanted, UNITS[torch.float64], again)


def leaves_the_range_of_float32(drawn: Drawn) -> bool:
    """Whether the weights may be smaller than float32 can hold, where such a query sees no key.

    Queries far from nearly equal keys, divided by their deviation, have elu features of exp(-1 / sqrt(eps)).
    """
    options = drawn.options
    return (
        options.get("kernel") == "linear"
        and options.get("normalize", False)
        and options.get("eps", 1e-5) < 0.1
    )


def relations(case: Case) -> Iterator[Callable[[Case], None]]:
    """Those that hold for this case."""
    drawn, causal, own = case.drawn, case.arguments["is_causal"], case.context is None
    if drawn.oracle is not None:
        yield equals_reference
    if drawn.other is not None and own and (not causal or drawn.other_causal):
        yield equals_the_other_form
    yield is_finite_in_float32 if leaves_the_range_of_float32(drawn) else is_close_in_lower_precision
    if drawn.name in (
        "softmax",
        "symmetric",
        "sparse",
        "rpc",
        "scaled",
        "batch_norm",
        "scaled_heads",
        "conv1d",
    ):
        yield equals_the_formula_of_attention


def run(seed: int) -> str:
    """One case; the name of the relation that was checked."""
    case = draw(seed)
    possible = list(relations(case))
    weights = [3 if relation in (equals_reference, equals_the_other_form) else 1 for relation in possible]
    (relation,) = case.rng.choices(possible, weights)
    try:
        relation(case)
    except Exception as error:
        given = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in case.arguments.items()}
        raise AssertionError(
            f"seed {seed}: {relation.__name__} with {case.drawn.name} {case.drawn.options}, "
            f"x {tuple(case.x.shape)}, {case.layer.num_heads} heads, {given}: {type(error).__name__}: {error}"
        ) from error
    return f"{case.drawn.name}: {relation.__name__}"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_generated_cases_hold(block):
    failures = []
    for seed in range(block, CASES, BLOCKS):
        try:
            run(seed)
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, f"{len(failures)} of {CASES // BLOCKS} cases:\n" + "\n".join(failures)


def test_a_sample_of_the_campaign_meets_every_mechanism():
    met = {run(seed).partition(":")[0] for seed in range(CASES, CASES + 150)}
    assert met == {mechanism.name for mechanism in list_attention()}
    assert met >= set(DRAW)
