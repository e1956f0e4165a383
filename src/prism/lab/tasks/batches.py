"""Batches of a synthetic task for training and testing: drawn by split, with the places that are asked, ahead of time.

What is drawn depends on the task, the seed, the batch size and the device: at one seed every rule sees the same sequences in
the same order. Batches for a GPU are drawn there; those of tasks that draw on the CPU only, by a thread, ahead of time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prism.lab.tasks.task import IGNORE, Batch, Task, draw, stream

AHEAD = 4
"""Groups of batches that are drawn ahead."""
_VALUES = 1 << 18
"""About how many input values are drawn at once: small batches are drawn several at a time."""


class Questions(NamedTuple):
    """A batch with A places in every sequence that include all at which something is asked, M = B · A in all."""

    inputs: Tensor
    """`[B, T, …]`"""
    asked: Tensor
    """`[M]`, rows of `[B · T]`."""
    targets: Tensor
    """`[M]` or `[M, E]`; IGNORE or NaN where nothing is asked after all."""

    def to(self, device: torch.device) -> Questions:
        return Questions(*(x.to(device, non_blocking=True) for x in self))

    def pin(self) -> Questions:
        return Questions(*(x.pin_memory() for x in self))


def is_asked(targets: Tensor) -> Tensor:
    """Where something is asked: `[…]` of integers, `[…, E]` of numbers → `[…]` bool."""
    return ~targets.isnan().any(-1) if targets.is_floating_point() else targets != IGNORE


def questions(batch: Batch, count: int = 1) -> Questions:
    """Split sequences into `count` equal batches, stacked in a new first dimension, and find the places that are asked.

    Every sequence gets as many places as the one that asks most, so that shapes are the same from batch to batch.
    """
    asked = is_asked(batch.targets)
    rows, length = asked.shape
    most = max(1, int(asked.sum(1).max()))
    places = (~asked).byte().argsort(dim=1, stable=True)[:, :most]
    every = torch.arange(rows, device=places.device).unsqueeze(1)
    targets = batch.targets[every, places].flatten(0, 1)
    flat = (every % (rows // count)) * length + places
    return Questions(*(x.unflatten(0, (count, -1)) for x in (batch.inputs, flat.flatten(), targets)))


@dataclass(frozen=True)
class Curriculum:
    """Training that starts with a small value of one of the task's options and doubles it until it has its full value."""

    option: str
    start: int
    share: float = 0.5
    """The share of all steps after which the option has its full value."""

    def stages(self, task: Task, steps: int) -> list[tuple[int, Task]]:
        """The tasks to train on, each with its number of steps."""
        known = {field.name for field in fields(task)}
        full = getattr(task, self.option) if self.option in known else None
        if not isinstance(full, int):
            raise ValueError(
                f"curriculum.option must be a whole-number option of task {task.name!r}, got {self.option!r}"
            )
        if not 1 <= self.start < full:
            raise ValueError(
                f"curriculum.start must be from 1 to {full - 1} ({self.option} is {full}), got {self.start}"
            )
        if not 0 < self.share < 1:
            raise ValueError(f"curriculum.share must be between 0 and 1, got {self.share}")
        values = [self.start]
        while 2 * values[-1] < full:
            values.append(2 * values[-1])
        if steps <= len(values):
            raise ValueError(
                f"a curriculum from {self.option} = {self.start} to {full} has {len(values) + 1} stages, but training has "
                f"{steps} steps: raise the steps or curriculum.start"
            )
        each = max(1, int(steps * self.share) // len(values))
        early = [(each, replace(task, **{self.option: value})) for value in values]
        return [*early, (max(1, steps - each * len(values)), task)]


def training_batches(
    stages: Sequence[tuple[int, Task]], batch: int, seed: int, device: torch.device
) -> Generator[Questions, None, None]:
    """Batches of the split `train` on a device."""
    if all(draws_on(task, device) for _, task in stages):
        groups = _drawn(stages, batch, seed, device)
    else:
        groups = ahead(_drawn(stages, batch, seed, torch.device("cpu")), device)
    for group in groups:
        for place in range(len(group.inputs)):
            yield Questions(*(x[place] for x in group))


def draws_on(task: Task, device: torch.device) -> bool:
    """Whether a task can draw on a device."""
    if device.type == "cpu":
        return True
    try:
        return draw(task, 1, "train", _generator("train", 0, "", device)).inputs.device.type == device.type
    except RuntimeError:  # tensors on two devices
        return False


def _generator(split: str, seed: int, name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(stream(split, seed, name).initial_seed())


def _drawn(stages: Sequence[tuple[int, Task]], batch: int, seed: int, device: torch.device) -> Iterator[Questions]:
    """Groups of batches, stacked: one transfer to a GPU serves several steps."""
    generator = _generator("train", seed, stages[-1][1].name, device)
    for steps, task in stages:
        values = task.sample(batch, torch.Generator().manual_seed(0)).inputs.numel()
        at_once = max(1, min(16, _VALUES // values))
        for start in range(0, steps, at_once):
            count = min(at_once, steps - start)
            yield questions(draw(task, batch * count, "train", generator), count)


def ahead(batches: Iterator[Questions], device: torch.device) -> Iterator[Questions]:
    """Groups of batches from the CPU on a GPU, drawn by a thread."""
    ready: queue.Queue[Questions | BaseException | None] = queue.Queue(AHEAD)
    over = threading.Event()
    thread = threading.Thread(target=_fill, args=(batches, ready, over), daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item.to(device)
    finally:
        over.set()
        thread.join()


def _fill(
    batches: Iterator[Questions], ready: queue.Queue[Questions | BaseException | None], over: threading.Event
) -> None:
    """Draw batches into a queue until there are no more, or they are no longer wanted; None ends them."""
    last: BaseException | None = None
    try:
        for item in batches:
            if not _put(item.pin(), ready, over):
                return
    except BaseException as error:  # for the thread that trains
        last = error
    _put(last, ready, over)


def _put(
    item: Questions | BaseException | None,
    ready: queue.Queue[Questions | BaseException | None],
    over: threading.Event,
) -> bool:
    """Wait for room in a queue; False if nothing is wanted any more."""
    while not over.is_set():
        with suppress(queue.Full):
            ready.put(item, timeout=0.2)
            return True
    return False


def held_out(task: Task, count: int, split: str, seed: int, name: str = "") -> list[Batch]:
    """`count` sequences of the split `validation` or `test`, in batches that fit into memory."""
    generator = stream(split, seed, f"{task.name} {name}")
    inputs, targets = draw(task, count, split, generator)
    rows = max(1, min(256, 2**17 // inputs[0].numel()))
    return [Batch(inputs[i : i + rows], targets[i : i + rows]) for i in range(0, count, rows)]
