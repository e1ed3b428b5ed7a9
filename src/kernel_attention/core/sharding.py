"""Sequences divided among processes. Each rank holds a contiguous part, and the layers share small sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist
from torch import nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class ReadsSequence(Protocol):
    """A module that reads more than one token at a time: attention, positions, pooling.

    Attributes:
        sequence_group: the processes that share every sequence; None: whole sequences are here.
    """

    sequence_group: SequenceGroup | None

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why it cannot read sequences divided among processes; None where it can."""


def shard_sequence(model: Model, group: ProcessGroup | None = None) -> Model:
    """Make ``model`` read sequences divided among the processes of ``group``.

    Every rank then calls the model with its own part: x (B, N_r, d) and attention_mask (B, N_r). The parts
    are contiguous and in the order of the ranks; N_r is at least 1 and may differ. Outputs and gradients
    equal those of the whole sequence on one device. The amount of communication does not depend on its
    length. All ranks must call forward and backward in the same order.

    DistributedDataParallel averages a parameter's gradients over the ranks, which gives the gradient of the
    mean of the ranks' losses. So a rank's loss must be the mean over its own tokens, where all ranks have
    equally many; otherwise it is that mean times n_r times the number of ranks / n. ``auxiliary_loss`` is the
    same number on every rank, and every rank adds it.

    Attention layers, and the positions and the pooling of our encoders, then work over all parts. Everything
    else must work token by token. ``layer.sequence_group = None`` undoes the change of a layer, and so does
    pickling.

    Args:
        model: any module that holds our layers.
        group: the processes that share a sequence; None: all.

    Returns:
        ``model`` itself, changed in place.

    Raises:
        InputError: without a process group, or for a layer that cannot be sharded. No layer is changed then.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("shard_sequence: no process group; call torch.distributed.init_process_group first")
    readers = require_shardable(model)
    shared = SequenceGroup(group)
    if shared.rank < 0:
        raise InputError("shard_sequence: this process is no member of group; give every process its own")
    for reader in readers:
        reader.sequence_group = shared
    return model


def require_shardable(model: nn.Module, is_causal: bool = False) -> list[ReadsSequence]:
    """The modules of a model that read more than a token at a time, each of which can share a sequence.

    Raises:
        InputError: for a module that cannot be sharded, by its name, and for a model without our layers.
    """
    readers: list[ReadsSequence] = []
    for name, module in model.named_modules():
        reason = None
        if isinstance(module, nn.MultiheadAttention):
            reason = "it needs the whole sequence on one rank"
        elif not getattr(module, "supports_sharding", True):
            reason = "every part of a sequence would get the positions of the first part"
        elif isinstance(module, ReadsSequence):
            reason = module.why_not_sharded(is_causal)
            readers.append(module)
        if reason is not None:
            place = f"{name or 'model'} ({type(module).__name__})"
            raise InputError(f"shard_sequence: {place} cannot be sharded: {reason}")
    if not any(isinstance(reader, AttentionLayer) for reader in readers):
        raise InputError(f"shard_sequence: {type(model).__name__} holds no attention layer of ours")
    return readers
