"""The processes that train one model together: their numbers, devices and precision, and how they agree.

``torchrun`` starts them and gives each its number in environment variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist

from kernel_attention.errors import InputError
from kernel_attention.training.settings import Precision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PATIENCE = timedelta(days=7)  # the others wait while the first evaluates a test split
_MEETING = timedelta(hours=1)  # for all processes to come


@dataclass(frozen=True)
class ProcessPlace:
    """The number of a process among those of a run.

    Args:
        rank: its number among all, from 0.
        world: their number.
        local_rank: its number on its machine.
        local_world: their number on it.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def is_first(self) -> bool:
        """True where this process writes the run folder and speaks to the user."""
        return self.rank == 0


class Processes:
    """The processes of a run, of which this is one. Without a group it is the only one.

    Args:
        place: of this process.
        shards: processes that share each sequence; neighbours by rank.

    Attributes:
        replica: the number of the model's copy that this process holds, or holds a part of the sequences for.
        replicas: the number of copies, each of which has sequences of its own.
        sharing: the group of the processes that share sequences with this one; None: it has whole sequences.
        alike: the group of one process of every copy, that of this process among them; None for one copy.
    """

    def __init__(self, place: ProcessPlace, shards: int = 1) -> None:
        self.place = place
        self.replica, self.shard = divmod(place.rank, shards)
        self.replicas = place.world // shards
        self.sharing: ProcessGroup | None = None
        self.alike: ProcessGroup | None = None
        self._agreeing: ProcessGroup | None = None
        if place.world > 1:
            self._agreeing = dist.new_group(backend="gloo", timeout=_PATIENCE)
            ranks = torch.arange(place.world).view(self.replicas, shards)
            if shards > 1:
                self.sharing = _own_group(ranks.tolist(), place.rank)
            if self.replicas > 1:
                self.alike = _own_group(ranks.T.tolist(), place.rank)

    @property
    def is_first(self) -> bool:
        """True where this process writes the run folder and speaks to the user."""
        return self.place.is_first

    def total(self, numbers: list[float]) -> list[float]:
        """The sums over the processes of numbers that each has, in float64."""
        if self.place.world == 1:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self._agreeing)
        return sums.tolist()

    def told(self, value: Any) -> Any:
        """The value of the first process."""
        found = [value]
        if self.place.world > 1:
            dist.broadcast_object_list(found, src=0, group=self._agreeing)
        return found[0]

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks."""
        if self.place.world == 1:
            return [value]
        found = [None] * self.place.world
        dist.all_gather_object(found, value, group=self._agreeing)
        return found


def _own_group(groups: list[list[int]], rank: int) -> ProcessGroup:
    """The group of this process; all processes must make all groups."""
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if rank in ranks)


ALONE = Processes(ProcessPlace())
"""One process."""


@contextlib.contextmanager
def joined(place: ProcessPlace, device: torch.device, shards: int = 1) -> Iterator[Processes]:
    """Meet the other processes, and part from them: by gloo where the ``device`` is a processor, by NCCL on
    graphics cards.

    Raises:
        InputError: where there is a process group already.
    """
    if place.world == 1:
        yield ALONE
        return
    if dist.is_initialized():
        raise InputError("this process has a process group already: train starts or joins one of its own")
    backend = "nccl" if device.type == "cuda" else "gloo"
    meeting: dict[str, Any] = {"timeout": _MEETING}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        meeting["device_id"] = device
    dist.init_process_group(backend, **meeting)
    try:
        yield Processes(place, shards)
    finally:
        dist.destroy_process_group()


Resolved = Literal["32-true", "bf16-mixed", "16-mixed"]


class HasPrecision(Protocol):
    """Settings of a training: a dataclass with these fields."""

    @property
    def precision(self) -> Precision:
        """As in ``TrainSettings``."""
        ...

    @property
    def accelerator(self) -> str:
        """As in ``TrainSettings``."""
        ...


def resolve_precision(settings: HasPrecision) -> Resolved:
    """The precision of settings; of ``auto``, bf16-mixed where the processor has it, else 32-true."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16-mixed" if has_bfloat16(training_device(settings.accelerator)) else "32-true"


def has_bfloat16(device: torch.device) -> bool:
    """True where the device has instructions that multiply bfloat16 numbers."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False  # mps: autocast has no bfloat16 in every release that the package accepts
    if hasattr(torch.cpu, "get_capabilities"):  # newer than the oldest release that the package accepts
        found = torch.cpu.get_capabilities()
        return any(is_there for name, is_there in found.items() if name.endswith("bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def training_device(accelerator: str, local_rank: int = 0) -> torch.device:
    """The device on which a process trains with this accelerator, by its number on its machine."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "cpu" or found is None:
        return torch.device("cpu")
    return torch.device(found.type, local_rank) if local_rank else found
