"""Comparison of a host's attention with our softmax attention of its own projections.

Names and shapes of weights do not say what a module computes: attention over channels has them too. So before
a host is replaced, a copy of it gets random weights and reads a short random sequence, and so does our layer.
The host itself is not called, and the state of the random numbers stays.

A new layer takes the old one's projections over. Where its outputs are then of another size, or point
elsewhere, every later layer of a trained model reads what it has never seen. So softmax attention and the new
layer read the same random inputs, and their outputs are compared too. Trained inputs differ from random ones,
but the mechanisms that destroy a trained encoder (all-MiniLM-L6-v2) are those above the threshold, and no
others.
"""

import contextlib
import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.hosts.projections import carry, projections
from kernel_attention.hosts.reading import HostDescription
from kernel_attention.mechanisms import create_attention

_LENGTH = 7
_GRIDS = ((2, 7), (7, 7), (8, 8))
_LONGEST = 1024  # of the sequences tried; a host's own length may be one that it needs
_CLOSE = 1e-3  # of the largest output, in float32; other functions are off by a tenth and more
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that say for how many tokens a host has tables.
_SIZES = ("window_area", "window_size", "resolution", "seq_len")


@dataclass(frozen=True)
class HostComparison:
    """The findings about a host.

    Attributes:
        differs: how it differs from softmax attention of its projections; None where it is that.
        outputs: how many outputs it returns in a tuple; 0: one tensor; None: not known.
    """

    differs: str | None = None
    outputs: int | None = None


def compare(
    module: nn.Module, owners: tuple[nn.Module, ...], num_heads: int, longest: int | None
) -> HostComparison:
    """Compare a host's attention with our softmax layer, in evaluation mode and float32.

    ``owners`` are the modules around the host, the outermost first, and ``longest`` the number of tokens that
    the model states, if it does.

    Raises:
        InputError: for a module that does not attend over tokens, that reads tensors of 4 dimensions, or
            whose output has another shape.
    """
    held = [*module.parameters(), *module.buffers()]
    devices = {tensor.device for tensor in held if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        outputs = None
        try:
            pair = _Pair(_copy(module, owners), owners[-1], num_heads)
            found = pair.find_input(_lengths(module, longest))
            outputs = len(found) if isinstance(found, tuple) else 0
            if any(tensor.is_meta for tensor in held):
                raise _ForeignError("its weights are on the device meta")
            return HostComparison(pair.difference(), outputs)
        except _ForeignError as error:
            return HostComparison(f"not compared with softmax attention: {error}", outputs)


class _ForeignError(Exception):
    """A host that cannot be compared, in words."""


class _Pair:
    """A copy of the host, which is changed, and our softmax layer, with the same random weights."""

    def __init__(self, host: nn.Module, owner: nn.Module, num_heads: int) -> None:
        self.host = host
        self.sources = dict(projections(host, owner))
        weight = self.sources["q_proj.weight"].tensor
        self.embed_dim, self.device = weight.size(1), weight.device
        self.generator = torch.Generator().manual_seed(0)
        own = {id(parameter) for parameter in host.parameters()}
        self._draw(own)
        # Made on meta, because nothing that is drawn there stays.
        made = create_attention("softmax", self.embed_dim, num_heads, device="meta", dtype=torch.float32)
        softmax = made.to_empty(device=self.device).eval()
        self.softmax: AttentionLayer = softmax
        inside = {name: source for name, source in self.sources.items() if id(source.parameter) in own}
        carried = set(carry(softmax, inside))
        if "out_proj.weight" not in inside:  # it stands beside the host
            nn.init.eye_(softmax.get_parameter("out_proj.weight"))
            nn.init.zeros_(softmax.get_parameter("out_proj.bias"))
            carried.add("out_proj.weight")
        for name, parameter in softmax.named_parameters():
            if name.endswith("weight") and name not in carried:
                raise _ForeignError(f"its {name} is not a map {tuple(parameter.shape)}")

    def _draw(self, own: set[int]) -> None:
        """Draw the projections anew, so that logits are near 1, and move all other parameters."""
        known = {id(source.parameter) for source in self.sources.values()}
        for parameter in self.host.parameters():
            if id(parameter) not in known and parameter.is_floating_point():
                parameter.add_(0.1 * self._random(parameter.shape))
        for source in self.sources.values():
            if id(source.parameter) in own:
                scale = source.tensor.size(1) ** -0.5 if source.tensor.dim() == 2 else 0.3
                source.tensor.copy_(scale * self._random(source.tensor.shape))

    def _random(self, shape: Iterable[int]) -> Tensor:
        """Numbers of mean 0 and variance 1."""
        drawn = torch.rand(tuple(shape), generator=self.generator, dtype=torch.float32, device="cpu")
        return drawn.sub_(0.5).mul_(12**0.5).to(self.device)

    def find_input(self, lengths: Iterable[int]) -> Any:
        """Find a sequence that the host reads; return what the host returns.

        Raises:
            InputError: where it reads tensors of 4 dimensions only.
            _ForeignError: where it reads none.
        """
        reasons = []
        for length in dict.fromkeys(lengths):
            self.x = self._random((1, length, self.embed_dim))
            for self.masked in (False, True):
                try:
                    return self._call(self.x)
                except _ForeignError as error:
                    reasons.append(error)
        self.masked = False
        for grid in _GRIDS:
            with contextlib.suppress(_ForeignError):
                self._call(self._random((1, *grid, self.embed_dim)))
                name = type(self.host).__name__
                raise InputError(f"{name} reads tensors of 4 dimensions, expected (B, N, {self.embed_dim})")
        raise reasons[0]

    def _call(self, x: Tensor) -> Any:
        if isinstance(self.host, nn.MultiheadAttention):
            x = x if self.host.batch_first else x.transpose(0, 1)
            y, weights = self.host(x, x, x, need_weights=False)
            return (y if self.host.batch_first else y.transpose(0, 1)), weights
        # What has no default is given as None, which a caller means by it.
        first, *others = inspect.signature(self.host.forward).parameters.values()
        variable = (first.VAR_POSITIONAL, first.VAR_KEYWORD)
        needed = [
            other.name for other in others if other.default is other.empty and other.kind not in variable
        ]
        given: dict[str, Tensor | None] = {first.name: x, **dict.fromkeys(needed)}
        if self.masked:
            given["attention_mask"] = x.new_zeros(1, 1, x.size(1), x.size(1))
        try:
            return self.host(**given)
        except Exception as error:  # foreign code, which may need what only its model has
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise _ForeignError(f"called alone, it says {reason!r}") from None

    def _output(self, x: Tensor) -> Tensor:
        found = self._call(x)
        return found[0] if isinstance(found, tuple) else found

    def difference(self) -> str | None:
        """How the host differs; None: it does not.

        Raises:
            InputError: see ``compare``.
        """
        x = self.x
        y = self._output(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            what = f"a tensor {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise InputError(
                f"{type(self.host).__name__} makes {what} of {tuple(x.shape)}, expected the same shape"
            )
        if any(_close(y, self.softmax(x, is_causal=causal)) for causal in (False, True)):
            return None
        alike = x[:, :1].expand_as(x)
        is_mean = _close(self._output(alike), self.softmax(alike))
        order = torch.randperm(x.size(1), generator=self.generator).to(x.device)
        is_symmetric = _close(self._output(x[:, order]), y[:, order])
        self._require_mixing()
        reasons = [
            *["its outputs are not weighted means of its values"] * (not is_mean),
            *["it depends on the places of the tokens"] * (not is_symmetric),
        ]
        return "another attention: " + (
            " and ".join(reasons) or "its weights are another function of queries and keys"
        )

    def _require_mixing(self) -> None:
        """Refuse a host that leaves tokens alone where all have the same query and the same key.

        Attention over tokens then takes the mean of the values. Attention over channels does not.
        """
        for name, source in self.sources.items():
            if name.startswith(("q_proj", "k_proj")):
                source.tensor.zero_()
        other = self.x.clone()
        other[:, 0] += self._random((self.embed_dim,))
        change = self._output(other) - self._output(self.x)
        if _close(change[:, 1:], torch.zeros_like(change[:, 1:]), change):
            raise InputError(
                f"{type(self.host).__name__} does not attend over tokens: with equal queries and equal keys, "
                "its outputs do not depend on the values of other tokens. Attention over channels, or of one "
                "token alone, has no counterpart here"
            )


def _copy(module: nn.Module, owners: Iterable[nn.Module]) -> Any:
    """The module in float32 and evaluation mode, without hooks; what it knows of its owners is not copied."""
    memo: dict[int, Any] = {id(owner): owner for owner in owners}
    for part in module.modules():
        memo |= {
            id(hooks): OrderedDict() for name in _HOOKS if (hooks := getattr(part, name, None)) is not None
        }
    try:
        copied: Any = copy.deepcopy(module, memo)
        copied.eval()  # a host's own method may return nothing
        copied = copied.float()
    except Exception as error:  # a foreign module may hold what cannot be copied
        raise _ForeignError(f"its copy fails ({str(error).partition(chr(10))[0]})") from None
    for part in copied.modules():
        # The fast implementations want 16 bits or a mask, and compute the same.
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"
    return copied


def _lengths(module: nn.Module, longest: int | None) -> Iterator[int]:
    """Numbers of tokens to try: few, then those for which the host may have tables."""
    yield _LENGTH
    stated = [getattr(part, name, None) for part in module.modules() for name in _SIZES]
    for size in stated:
        if isinstance(size, int):
            yield from (size, size**2)
        elif isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(n, int) for n in size):
            yield from (size[0] * size[1], size[0] * size[1] + 1)
    if longest is not None and longest <= _LONGEST:
        yield longest


def _close(first: Tensor, second: Tensor, scale: Tensor | None = None) -> bool:
    largest = (second if scale is None else scale).abs().max()
    return bool((first - second).abs().max() <= _CLOSE * largest)


HARM = 4 / 3
"""Larger errors destroy a trained model: MiniLM's layers then have 1.4 to 169, and otherwise at most 1.2."""

_RANDOM_CASES, _RANDOM_LENGTH = 2, 32


def is_trained(model: nn.Module) -> bool:
    """True where the weights of a normalisation are not all alike, as they are in a new model."""
    norms = (part for part in model.modules() if "Norm" in type(part).__name__)
    weights = (getattr(part, "weight", None) for part in norms)
    return any(
        isinstance(weight, Tensor)
        and weight.dim() == 1
        and not weight.is_meta
        and bool((weight != weight[0]).any())
        for weight in weights
    )


@torch.no_grad()
def random_error(layer: AttentionLayer, host: HostDescription, is_interface: bool) -> float:
    """The share of the variance of softmax attention's outputs that a layer with a host's weights misses on
    random inputs.

    1 is the best constant; 0 where the layer cannot read the inputs: with ``is_interface``, queries, keys and
    values.
    """
    device, dtype = host.like.device, host.like.dtype
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    was_training = layer.training
    layer.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if is_interface:
                q, k, v = (
                    draw(_RANDOM_CASES, host.num_heads, _RANDOM_LENGTH, layer.head_dim) for _ in range(3)
                )
                y = layer.attend_heads(q, k, v)
                wanted = nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                softmax = create_attention(
                    "softmax", host.embed_dim, host.num_heads, bias=host.bias, device=device, dtype=dtype
                )
                carry(softmax, host.sources)
                x = draw(_RANDOM_CASES, _RANDOM_LENGTH, host.embed_dim)
                y, wanted = layer(x), softmax.eval()(x)
    except InputError:  # such as a grid of other sizes
        return 0.0
    finally:
        layer.train(was_training)
    y, wanted = (z.double().flatten(0, -2) for z in (y, wanted))
    return float((y - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())
