"""Counts of the kernels that a call launches on an accelerator, and of its questions to the host.

An accelerator runs behind the host. A small kernel costs the launch, 5 to 10 us, whatever it computes, and a
question about values (``.item()``, ``if x.any():``, ``nonzero``) waits until the queue is empty and forbids
CUDA graphs. Neither needs a GPU to be counted: tensors on the device ``meta`` have sizes and no values, take
every branch of an accelerator, and cannot answer a question.

The rule: an operator of ATen that computes or moves numbers is one launch. Views, ``detach`` and allocations
that are not filled are none. A fused kernel of attention is one each way, and ``torch.arange`` or a fill of
zeros one.
"""

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_attention.core.calls import Objective
from kernel_attention.core.objective import collect_objectives
from kernel_attention.errors import InputError
from kernel_attention.testing.battery import Subject, check, inputs, right_padding

_SYNCHRONIZING = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim", "_unique2",
}  # fmt: skip
_DECOMPOSITIONS = {"_linalg_eigh", "_linalg_svd", "linalg_eig"}
_FREE = {
    "_reshape_alias", "_unsafe_view", "alias", "detach", "device", "dim", "empty", "empty_like",
    "empty_permuted", "empty_strided", "is_same_size", "lift_fresh", "new_empty", "new_empty_strided",
    "stride", "sym_numel", "sym_size", "sym_stride", "sym_storage_offset",
}  # fmt: skip


class LaunchCounter(TorchDispatchMode):
    """Count the launches and the synchronisations of what runs inside the block.

    Copies from another device, of memory that is not pinned, wait too.

    Attributes:
        launches: operators that launch a kernel, by name.
        synchronizations: operators that wait for the device, by name.
        decompositions: those of PyTorch that ask whether they have converged, by name.
        hidden: operators of this package, whose launches cannot be seen, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.synchronizations: Counter[str] = Counter()
        self.decompositions: Counter[str] = Counter()
        self.hidden: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and count it."""
        name = function._schema.name.partition("::")[2]
        if name in _SYNCHRONIZING or (name == "index" and _is_by_mask(arguments)):
            self.synchronizations[name] += 1
        elif name in _DECOMPOSITIONS:
            self.decompositions[name] += 1
        elif name in ("_to_copy", "copy_") and _changes_device(arguments, options or {}):
            self.synchronizations["copy from another device"] += 1
        elif function.namespace not in ("aten", "prims", "prim"):
            self.hidden[str(function)] += 1
        elif function.namespace == "aten" and name not in _FREE and not function.is_view:
            self.launches[name] += 1
        return function(*arguments, **(options or {}))


def _is_by_mask(arguments: tuple[Any, ...]) -> bool:
    """True where ``aten.index`` chooses by booleans: the host must ask how many are true."""
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in arguments[1])


def _changes_device(arguments: Any, options: dict[str, Any]) -> bool:
    devices = [each.device.type for each in arguments if isinstance(each, Tensor)]
    asked = options.get("device")
    devices += [] if asked is None else [asked.type]
    return len(set(devices)) > 1


class _FusedAttention(TorchFunctionMode):
    """PyTorch's attention as one operator each way, as on an accelerator; on ``meta`` it is a formula."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if function is not nn.functional.scaled_dot_product_attention or not arguments[0].is_meta:
            return function(*arguments, **options)
        return _fused(*arguments, **options)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:  # PyTorch converts it so
        bias = torch.empty((), dtype=q.dtype, device=q.device).masked_fill(~bias, -torch.inf)
    bias = None if bias is None else bias.expand(*q.shape[:3], k.size(2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, q.requires_grad or k.requires_grad or v.requires_grad, dropout_p, is_causal,
        scale=scale,
    )[0]  # fmt: skip


class Launches(NamedTuple):
    """Kernels that a call launches.

    Attributes:
        forward: in the forward pass.
        backward: from the gradients of the output and of the objective to those of the input and of every
            parameter.
        synchronizations: operators that wait for the device, in both.
        decompositions: eigenvalue and singular value decompositions, which wait too, in both.
        hidden: operators of this package, whose launches cannot be seen, in both.
        names: the launches of both passes by name.
    """

    forward: int
    backward: int
    synchronizations: Counter[str]
    decompositions: Counter[str]
    hidden: Counter[str]
    names: tuple[Counter[str], Counter[str]]


@contextlib.contextmanager
def counting_launches() -> Iterator[LaunchCounter]:
    """A ``LaunchCounter``; PyTorch's attention is one launch each way, on ``meta`` too."""
    with _FusedAttention(), LaunchCounter() as counter:
        yield counter


def count_launches(layer: nn.Module, *inputs: Tensor, **arguments: Any) -> Launches:
    """The launches of a training step of ``layer(*inputs, **arguments)``, of which no number is changed.

    What a layer makes once and keeps, such as the positions of sampled rows, is made before.

    Args:
        layer: the module. A copy of it is called.
        inputs: floating-point tensors on its device; they get gradients.
        arguments: of the call.

    Raises:
        RuntimeError: on the device ``meta``, for a question that needs values, if it is not counted before.
    """
    layer = copy.deepcopy(layer)
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    with torch.no_grad():
        layer(*leaves, **arguments)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    with collect_objectives() as objectives, counting_launches() as forward:
        y = layer(*leaves, **arguments)
    found = [y, *(part for call in objectives.calls for part in _parts(call.objective))]
    found = [each for each in found if each.requires_grad]
    slopes = [torch.empty_like(each) for each in found]
    with counting_launches() as backward:
        torch.autograd.grad(found, [*leaves, *parameters], slopes, allow_unused=True)
    return Launches(
        sum(forward.launches.values()),
        sum(backward.launches.values()),
        forward.synchronizations + backward.synchronizations,
        forward.decompositions + backward.decompositions,
        forward.hidden + backward.hidden,
        (forward.launches, backward.launches),
    )


def _parts(objective: Objective) -> list[Tensor]:
    return [part for part in (objective.value, objective.core) if part is not None]


def _calls(case: Subject) -> Iterator[dict[str, Any]]:
    """The arguments of every way to call the layer but x."""
    for form, mask in itertools.product(case.call_forms(), (None, right_padding())):
        yield {**form, "attention_mask": mask}
    if case.build().supports(context=True):
        yield {"context": inputs(length=13)}


@check()
def no_call_waits_for_the_device(case: Subject) -> None:
    # On the device meta a layer takes an accelerator's branches, and no question has an answer.
    for arguments in _calls(case):
        layer = case.build().to("meta")
        x = inputs().to("meta").requires_grad_()
        given = {name: _moved(value, lambda x: x.to("meta")) for name, value in arguments.items()}
        with counting_launches() as counter:
            try:
                with collect_objectives() as objectives:
                    y = layer(x, **given)
                loss = y.sum()
                (loss + objectives.total() if objectives.calls else loss).backward()
            except InputError:
                assert "context" in arguments  # forms of some engines have no cross-attention
                continue
            except (RuntimeError, NotImplementedError) as error:
                raise AssertionError(f"{_text(arguments)}: {error}") from error
        asked = dict(counter.synchronizations)
        assert not asked, f"{_text(arguments)}: {asked}"


@check()
def tensors_without_values_need_no_answer(case: Subject) -> None:
    # Fake tensors stand for sizes on the CPU, as in a compiler: an answer that depends on values is an error.
    for arguments in _calls(case):
        layer = case.build()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = {name: _moved(value, mode.from_tensor) for name, value in arguments.items()}
            x = mode.from_tensor(inputs())
            try:
                y = layer(x, **given)
            except InputError:
                assert "context" in arguments
                continue
            except RuntimeError as error:
                raise AssertionError(f"{_text(arguments)}: {type(error).__name__}: {error}") from error
        assert y.shape == x.shape


def _moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    return move(value) if isinstance(value, Tensor) else value


def _text(arguments: dict[str, Any]) -> str:
    """The arguments of a call that are not their defaults, for messages."""
    return ", ".join(name for name, value in arguments.items() if value is not None and value is not False)
