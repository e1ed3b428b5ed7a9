"""The predictive distribution of a classifier: what it says, how sure it is, and why it is not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError, require_positive

_DROPOUTS = (nn.modules.dropout._DropoutNd,)


class PredictiveDistribution(NamedTuple):
    """Probabilities of k classes by sampling. All but the last are on the CPU or where the model is.

    Attributes:
        probabilities: their mean over the samples, (.., k).
        entropy: of the mean, in nats, (..): the whole uncertainty.
        mutual_information: between class and sample, in nats, (..): entropy less the samples' mean entropy.
            It is what more training data would remove; 0 where all samples agree.
        samples: the probabilities of every sample, (S, .., k).
    """

    probabilities: Tensor
    entropy: Tensor
    mutual_information: Tensor
    samples: Tensor


def predict_distribution(
    model: Any, x: Any, samples: int = 10, *, dropout: bool = False
) -> PredictiveDistribution:
    """The predictive distribution of a classifier on x, by samples of its layers or by its members.

    A module is asked in evaluation mode, with the layers sampling that have samples: ``kernel_gp`` and
    ``sgpa``. Its modes are restored. A fitted ``AttentionClassifier`` has its members as samples; a member
    with layers that sample is asked ``samples`` times. Its logits are divided by ``temperature_``. The mean
    of the probabilities is not its ``predict_proba``, which averages the logits.

    Args:
        model: a module that gives logits (.., k), or an object with ``logits``, as models of Hugging Face
            do; or a fitted ``AttentionClassifier``.
        x: the input; a mapping has the names of the model's arguments, a tuple their order.
        samples: forward passes S.
        dropout: whether dropout samples too (MC dropout). A classifier's members are left alone.

    Raises:
        InputError: for a model in which nothing samples.
    """
    require_positive(samples=samples)
    if not isinstance(model, nn.Module):
        if not hasattr(model, "sampled_logits"):
            raise InputError(f"model={type(model).__name__} must be a module or a fitted AttentionClassifier")
        return _distribution(model.sampled_logits(x, samples))
    if not any(_samples(module, dropout) for module in model.modules()):
        raise InputError(
            "nothing in the model samples: replace an attention by 'kernel_gp' or 'sgpa', or give "
            "dropout=True to a model with dropout"
        )
    with torch.no_grad(), sampling(model, dropout=dropout):
        return _distribution(torch.stack([_logits(model, x) for _ in range(samples)]))


@contextmanager
def sampling(model: nn.Module, *, dropout: bool = False) -> Iterator[None]:
    """Evaluation mode for the block, with the layers sampling that have samples, and dropout if asked."""
    modes = [(module, module.training) for module in model.modules()]
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "samples_in_evaluation")]
    before = [layer.samples_in_evaluation for layer in layers]
    try:
        for module, _ in modes:
            module.training = dropout and isinstance(module, _DROPOUTS)
        for layer in layers:
            layer.samples_in_evaluation = True
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, value in zip(layers, before, strict=True):
            layer.samples_in_evaluation = value


def has_samples(model: nn.Module) -> bool:
    """True where a layer of the model has samples."""
    return any(_samples(module, False) for module in model.modules())


def _samples(module: nn.Module, dropout: bool) -> bool:
    if dropout and isinstance(module, _DROPOUTS) and module.p > 0:
        return True
    return hasattr(module, "samples_in_evaluation")


def _logits(model: nn.Module, x: Any) -> Tensor:
    named = x if isinstance(x, Mapping) else {}
    ordered = () if isinstance(x, Mapping) else x if isinstance(x, tuple) else (x,)
    out = model(*ordered, **named)
    out = getattr(out, "logits", out)
    if not isinstance(out, Tensor):
        raise InputError(f"the model gave {type(out).__name__}, expected logits or an object with them")
    return out


def _distribution(logits: Tensor) -> PredictiveDistribution:
    logs = logits.double().log_softmax(-1)
    samples = logs.exp()
    mean = samples.mean(0)
    entropy = -torch.special.xlogy(mean, mean).sum(-1)
    within = -torch.special.xlogy(samples, samples).sum(-1).mean(0)
    return PredictiveDistribution(mean, entropy, (entropy - within).clamp_min(0.0), samples)
