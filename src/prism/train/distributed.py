"""Processes that train together: their communication, models under DDP or FSDP, and sequences that several share.

Design choices
- One process needs no process group: every collective below is then local.
- Processes agree before they act: if one fails, all raise the same error, and none waits forever.
- Sharded models are created on the meta device and initialised shard by shard: no device ever holds a whole one.
- Of the model only `_no_split_modules` is used: the layers that are sharded one by one.
- Processes that share sequences (`parallel.context`) have consecutive ranks, so that they sit on one machine. Each computes
  the gradient of everyone's loss with respect to its use of the weights: DDP and FSDP sum over all processes either way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from prism.device import pick_device, without_subnormals
from prism.engine.sequence_parallel import Context
from prism.train.settings import ParallelSettings

T = TypeVar("T")


class OtherProcessError(OSError):
    """Another process failed."""


@dataclass(frozen=True)
class World:
    """This process, its device, and its place among all processes."""

    device: torch.device
    rank: int = 0
    size: int = 1
    parallel: str = "none"
    context: Context | None = None
    """The processes that share this one's sequences; None: it has whole ones."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def shared_by(self) -> int:
        """How many processes share a sequence."""
        return 1 if self.context is None else self.context.size

    @property
    def groups(self) -> int:
        """How many processes, or groups that share sequences, divide a batch among them."""
        return self.size // self.shared_by

    @property
    def group(self) -> int:
        """Which of them this process is, or belongs to."""
        return self.rank // self.shared_by

    def share(self, sequences: int) -> int:
        """How many sequences of a global batch this process works on; those that share sequences have the same ones."""
        if sequences % self.groups:
            what = "processes" if self.context is None else f"groups of {self.shared_by} processes"
            raise ValueError(f"batch.sequences is {sequences}, which {self.groups} {what} cannot share equally")
        return sequences // self.groups

    def numbers(self, numbers: np.ndarray) -> np.ndarray:
        """This process's share of a global batch's sample numbers."""
        share = self.share(len(numbers))
        return numbers[self.group * share : (self.group + 1) * share]

    def sum(self, *numbers: float) -> list[float]:
        """Sum each number over all processes, in float64."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def add_up(self, numbers: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place on the device: no synchronisation with the host."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """Run an action without communication in every process; if it fails in one, it raises in all."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        failures = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(failures):
            if message is not None:
                raise OtherProcessError(f"process {rank} stopped with {message}")
        return result

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Run an action in the main process while the others wait; if it fails, it raises in all."""
        return self.together(lambda: action() if self.main else None)


@contextmanager
def joined(settings: ParallelSettings, device: str) -> Iterator[World]:
    """Join the process group that torchrun started, if any, and leave it at the end."""
    parallel, parts = settings.mode, settings.context
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if parts > 1 and "RANK" not in os.environ:
        raise ValueError(
            f"parallel.context is {parts}: start the run with torchrun, for example "
            f"torchrun --nproc-per-node {parts} -m prism …, or run it on one process with --parallel.context 1"
        )
    if size % parts:
        raise ValueError(
            f"parallel.context is {parts}, which does not divide the {size} processes that torchrun started: use a divisor"
        )
    if parallel == "auto":
        parallel = "fsdp" if size > 1 else "none"
    if parallel == "none" and size > 1:
        raise ValueError(f"parallel is none, but torchrun started {size} processes: use ddp or fsdp")
    if parallel != "none" and "RANK" not in os.environ:
        raise ValueError(
            f"parallel is {parallel}: start the run with torchrun, for example torchrun --nproc-per-node 2 -m prism …, or run "
            "it on one process with --parallel.mode auto"
        )
    here = pick_device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    with without_subnormals():
        if parallel == "none":
            yield World(device=here)
            return
        backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
        try:
            context = None if parts == 1 else Context(dist.new_subgroups(parts)[0])
            yield World(here, dist.get_rank(), dist.get_world_size(), parallel, context)
        finally:
            dist.destroy_process_group()


def spread(build: Callable[[], nn.Module], initialize: Callable[[nn.Module], None], world: World) -> nn.Module:
    """This process's model with initial weights that do not depend on `world`."""
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
    for name, original in ties:
        _set_parameter(model, name, model.get_parameter(original))
    initialize(model)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are sharded and compiled one by one: instances of the model's `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def parallel_forward(model: nn.Module, world: World) -> nn.Module:
    """The module to call in training: the model, or DDP around it."""
    if world.parallel != "ddp":
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


@contextmanager
def accumulating(forward: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients only in the last backward pass of gradient accumulation."""
    if isinstance(forward, nn.parallel.DistributedDataParallel) and not last:
        with forward.no_sync():
            yield
        return
    if isinstance(forward, FSDPModule):
        forward.set_requires_gradient_sync(last)
    yield


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """(name, name of the parameter it is tied to), to restore ties that `to_empty` loses."""
    names: dict[nn.Parameter, str] = {}
    return [
        (name, names[parameter])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if names.setdefault(parameter, name) != name
    ]


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter by its dotted name."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of one that may be sharded. Every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
