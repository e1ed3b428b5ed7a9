"""How the processes of a run share a model: copies whose gradients are averaged, or parts of every weight."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import Strategy, _BackwardSyncControl
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kernel_attention.training.processes import ProcessPlace
from kernel_attention.training.settings import TrainSettings


class PlaceEnvironment(ClusterEnvironment):
    """Tells Fabric the place of this process; ``processes.joined`` has met the others.

    Args:
        place: of this process.
    """

    def __init__(self, place: ProcessPlace) -> None:
        super().__init__()
        self.place = place

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return ""

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.place.world

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.place.local_rank

    def node_rank(self) -> int:
        return self.place.rank // self.place.local_world


class CopiedStrategy(DDPStrategy):
    """Every process has a copy of the model, and gradients are averaged.

    Buffers are the same everywhere, tables of positions of a million tokens among them, so they are not sent
    at every step, but for the statistics of batch normalisation.
    """

    def setup_module(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Wrap the task."""
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        name = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # before 2.13
        self._ddp_kwargs[name] = any(isinstance(part, _BatchNorm) for part in module.modules())
        return super().setup_module(module)


class ShardedStrategy(DDPStrategy):
    """Fully sharded data parallelism: every process holds a part of each weight, gradient and moment.

    This is ``torch.distributed.fsdp.fully_shard`` of every layer and of the task around them. Fabric's own
    ``FSDPStrategy`` refuses processors, and its strategy for ``fully_shard`` is experimental.
    """

    def __init__(self) -> None:
        super().__init__()
        self._backward_sync_control = _ShardedSyncControl()

    def setup_module(self, module: nn.Module) -> Any:
        """Cut the weights of every layer, and what is left, over the processes."""
        from torch.distributed.fsdp import fully_shard

        model: Any = module.model
        for layer in getattr(model, "encoder", model).layers:
            fully_shard(layer)
        fully_shard(module)
        # An evaluation calls the task by another name, and needs whole weights as a step does.
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(module, "validation_step")
        return module


class _ShardedSyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return _unsynchronised(module) if enabled else nullcontext()


@contextmanager
def _unsynchronised(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def make_strategy(settings: TrainSettings) -> Strategy | str:
    """The strategy of a training."""
    if settings.processes == 1:
        return "auto"
    if settings.strategy == "fsdp":
        return ShardedStrategy()
    # An expert that no token of a batch chose has no gradient.
    return CopiedStrategy(find_unused_parameters=settings.leaves_unused)


def module_state(module: nn.Module) -> dict[str, Any]:
    """The state of a module with whole tensors. All processes must call it."""
    return {name: _whole(value) for name, value in module.state_dict().items()}


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Take this process's part of a state of ``module_state``."""
    current = module.state_dict()
    module.load_state_dict({name: _part_like(value, current.get(name)) for name, value in state.items()})


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with whole tensors. All processes must call it."""
    state = optimizer.state_dict()
    moments = {
        number: {name: _whole(value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return state | {"state": moments}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take this process's part of a state of ``optimizer_state``."""
    optimizer.load_state_dict(dict(state))
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = _part_like(value, parameter)


def _whole(value: Any) -> Any:
    """A tensor of all parts, where the value is one of them; else the value."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _part_like(value: Any, like: Any) -> Any:
    """The part of a whole tensor that this process holds of ``like``; the value where that has no parts."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
