"""Several processes as one: who am I, what do the others say, and how a model is spread over all.

Design choices
- One process needs no process group: every question below then answers itself.
- Processes agree before they act: if one fails, all raise the same sentence, and none waits for ever.
- Sharded models are born on the meta device and initialised shard by shard: no device ever holds a whole one.
- Nothing here knows the model but its `_no_split_modules`, the layers that are sharded one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from prism.device import pick_device

T = TypeVar("T")


class OtherProcessError(OSError):
    """What failed, failed elsewhere."""


@dataclass(frozen=True)
class World:
    """This process among all."""

    device: torch.device
    rank: int = 0
    size: int = 1
    parallel: str = "none"

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the processes, in float64."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def add_up(self, numbers: Tensor) -> Tensor:
        """The sum of a tensor on this process's device over all processes; nothing is read from the device."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def gather(self, value: T) -> list[T]:
        """What every process says, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """Run an action that talks to nobody in every process; if it fails anywhere, it fails everywhere."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        said = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(said):
            if message is not None:
                raise OtherProcessError(f"process {rank} stopped with {message}")
        return result

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Run an action in the first process while the others wait; its failure is everyone's."""
        return self.together(lambda: action() if self.main else None)


@contextmanager
def joined(parallel: str, device: str) -> Iterator[World]:
    """Join the processes that torchrun started (or none) and leave them in the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if parallel == "auto":
        parallel = "fsdp" if size > 1 else "none"
    if parallel == "none" and size > 1:
        raise ValueError(f"parallel is none, but torchrun started {size} processes: use ddp or fsdp")
    if parallel != "none" and "RANK" not in os.environ:
        raise ValueError(
            f"parallel is {parallel}: start the run with torchrun, for example torchrun --nproc-per-node 2 -m prism …"
        )
    here = pick_device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if parallel == "none":
        yield World(device=here)
        return
    backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    try:
        yield World(here, dist.get_rank(), dist.get_world_size(), parallel)
    finally:
        dist.destroy_process_group()


def spread(build: Callable[[], nn.Module], initialize: Callable[[nn.Module], None], world: World) -> nn.Module:
    """The model of this process with its initial weights, which are the same whatever `world` is."""
    if world.parallel != "fsdp":
        model = build()
        initialize(model)
        return model.to(world.device)
    with torch.device("meta"):
        model = build()
    mesh = init_device_mesh(world.device.type, (world.size,))
    ties = _ties(model)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=world.device)
    for place, original in ties:
        _set_parameter(model, place, model.get_parameter(original))
    initialize(model)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are sharded, and compiled, one by one: those whose classes the model names as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def parallel_forward(model: nn.Module, world: World) -> nn.Module:
    """What is called in training: the model itself, or DDP around it."""
    if world.parallel != "ddp":
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


@contextmanager
def accumulating(forward: nn.Module, last: bool) -> Iterator[None]:
    """Only the last of the accumulated backward passes exchanges gradients."""
    if isinstance(forward, nn.parallel.DistributedDataParallel) and not last:
        with forward.no_sync():
            yield
        return
    if isinstance(forward, FSDPModule):
        forward.set_requires_gradient_sync(last)
    yield


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """(name, name of the parameter it shares): making real tensors out of meta ones would lose this."""
    names: dict[nn.Parameter, str] = {}
    return [
        (name, names[parameter])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if names.setdefault(parameter, name) != name
    ]


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
