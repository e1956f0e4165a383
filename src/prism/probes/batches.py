"""Batches of a synthetic task for training and testing: drawn by split, with the places that are asked, ahead of time.

What is drawn depends on the task, the seed and the batch size alone: at one seed every rule sees the same sequences in the
same order. For a GPU a thread draws ahead, so that it does not wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prism.probes.task import IGNORE, Batch, Task, draw, stream

AHEAD = 32
"""Batches that are drawn ahead."""
_VALUES = 1 << 18
"""About how many input values are drawn at once: small batches are drawn several at a time."""


class Questions(NamedTuple):
    """A batch with the M places at which something is asked, padded so that few different M occur."""

    inputs: Tensor
    """`[B, T, …]`"""
    asked: Tensor
    """`[M]`, rows of `[B · T]`; 0 in the padding."""
    targets: Tensor
    """`[M]` or `[M, E]`; IGNORE or NaN in the padding."""

    def to(self, device: torch.device) -> Questions:
        return self if device.type == "cpu" else Questions(*(x.to(device, non_blocking=True) for x in self))

    def pin(self) -> Questions:
        return Questions(*(x.pin_memory() for x in self))


def questions(batch: Batch) -> Questions:
    """Find the places that are asked. Their number is padded to a multiple of the batch size."""
    flat = batch.targets.flatten(0, 1)
    found = (~flat.isnan().any(-1) if flat.is_floating_point() else flat != IGNORE).nonzero().squeeze(1)
    spare = -len(found) % len(batch.inputs)
    empty = torch.nan if flat.is_floating_point() else IGNORE
    targets = torch.cat([flat[found], flat.new_full((spare, *flat.shape[1:]), empty)])
    return Questions(batch.inputs, torch.cat([found, found.new_zeros(spare)]), targets)


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
        each = max(1, int(steps * self.share) // len(values))
        early = [(each, replace(task, **{self.option: value})) for value in values]
        return [*early, (max(1, steps - each * len(values)), task)]


def training_batches(stages: Sequence[tuple[int, Task]], batch: int, seed: int) -> Iterator[Questions]:
    """Batches of the split `train`, on the CPU."""
    generator = stream("train", seed, stages[-1][1].name)
    for steps, task in stages:
        values = task.sample(batch, torch.Generator().manual_seed(0)).inputs.numel()
        at_once = max(1, min(16, _VALUES // values))
        for start in range(0, steps, at_once):
            count = min(at_once, steps - start)
            inputs, targets = draw(task, batch * count, "train", generator)
            for part in range(count):
                rows = slice(part * batch, (part + 1) * batch)
                yield questions(Batch(inputs[rows], targets[rows]))


def ahead(batches: Iterator[Questions], device: torch.device) -> Iterator[Questions]:
    """The same batches on a device; for a GPU they are drawn by a thread, in advance."""
    if device.type == "cpu":
        yield from batches
        return
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
