"""The training loop: draw, compute and settle one step after the other. All else is done by callbacks (callbacks.py).

Design choices
- A step computes gradients (gradient accumulation over micro-batches), then loss and gradient norm, and updates the
  weights if both are finite. Otherwise the step is skipped and counted; `max_skips` in a row end the run.
- On a GPU no step waits for the device (`decides_on_device`), or small models would wait more than compute. The device
  decides whether to skip, and the processes agree on it there. The host reads loss, norm and stop flag of step s only
  after it has queued step s+1. Log line, skip count, the end after `max_skips` and a stop by a signal therefore come one
  step later. Before a callback acts on the weights (`Callback.due`) and at the end of the run every step is settled, so
  all of them find the same facts as on the CPU, where each step is read and settled before the next.
- After a step the callbacks act in their order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from prism.engine import InvalidValueError
from prism.train.checkpoint import NotFiniteError
from prism.train.step import Step


class Steps(Protocol):
    """What the loop repeats. `prism.train.step.Stepper` makes the steps of a task."""

    steps: int
    max_skips: int
    device: torch.device

    def draw(self, number: int) -> Step:
        """Step 1, 2, … with its samples."""

    def factor(self, number: int) -> float:
        """Factor of the learning rate in a step."""

    def compute(self, step: Step, factor: float, stopping: bool, update: bool) -> Tensor:
        """Queue a step, with the update of the weights or without; its numbers `[4]`, as `Stepper.compute` returns them."""

    def update(self, factor: float) -> None:
        """Update the weights with the gradients of the last step, which was computed without an update."""


@dataclass(frozen=True)
class Settled:
    """What a step found."""

    number: int
    loss: float
    """Of the global batch."""
    norm: float
    """Of the gradient, before clipping."""
    factor: float
    """Of the learning rate."""
    speed: float
    """Units a second."""
    finite: bool
    """False: the step was skipped."""


class Callback:
    """What a run does besides its steps. A subclass overrides what it needs."""

    def settled(self, loop: Loop, step: Settled) -> None:
        """A step's numbers were read: on a GPU, when the next step is queued already."""

    def due(self, loop: Loop) -> bool:
        """Whether this callback acts after step `loop.step`, for which the weights must be those of this step."""
        return False

    def after(self, loop: Loop) -> bool:
        """Act after a step; True ends the run."""
        return False

    def noted(self, loop: Loop, record: dict[str, Any], text: str) -> None:
        """Another callback has found something: a record for the log, the same for the terminal."""


class DivergedError(NotFiniteError):
    """Too many steps in a row were not finite; `step` is the last of them."""

    def __init__(self, message: str, step: Step) -> None:
        super().__init__(message)
        self.step = step


class Loop:
    """Steps and the position in them.

    Args:
        asked: whether this process was asked to stop.
        state: of a loop to continue, from `state()`.
    """

    def __init__(
        self,
        stepper: Steps,
        callbacks: Sequence[Callback],
        asked: Callable[[], bool] = lambda: False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.stepper, self.callbacks, self.asked = stepper, callbacks, asked
        start = state or {"step": 0, "skipped": 0, "skipped_in_a_row": 0}
        self.step: int = start["step"]
        self.skipped: int = start["skipped"]
        self.skipped_in_a_row: int = start["skipped_in_a_row"]
        self.loss: float | None = None
        """Of the last step that was not skipped."""
        self.stopping = self.ending = False
        """Whether any process was asked to stop; whether the run ends after this step."""
        self.on_device = decides_on_device(stepper.device)
        self.pending: tuple[Step, HostCopy] | None = None
        """The step that is queued and not yet settled, with its numbers."""
        self.settled_at = -math.inf

    def state(self) -> dict[str, int]:
        """The position, with all steps settled."""
        return {"step": self.step, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def run(self) -> None:
        """Make steps until the last, or until a callback or a signal ends the run."""
        while not self.ending and self.step < self.stepper.steps:
            self.advance()

    def advance(self) -> None:
        """Make one step and everything that follows from it."""
        self.step += 1
        step = self.stepper.draw(self.step)
        try:
            numbers = self.stepper.compute(step, self.stepper.factor(step.number), self.asked(), self.on_device)
        except InvalidValueError:  # the other processes wait for gradients that will not come
            self.settle()
            raise self.diverged(step) from None
        queued = step, HostCopy(numbers)
        self.settle()  # the step before this one
        self.pending = queued
        self.ending = self.step == self.stepper.steps or self.stopping
        if not self.on_device or self.ending or any(callback.due(self) for callback in self.callbacks):
            self.settle()
            self.ending |= self.stopping
        for callback in self.callbacks:
            self.ending |= callback.after(self)

    def settle(self) -> None:
        """Read the pending step's numbers, if there is one, and act on them: update or skip, tell the callbacks."""
        if self.pending is None:
            return
        (step, numbers), self.pending = self.pending, None
        loss, stops, faults, norm = numbers.read()
        finite, factor = math.isfinite(loss) and not faults, self.stepper.factor(step.number)
        if finite:
            if not self.on_device:
                self.stepper.update(factor)
            self.skipped_in_a_row = 0
            self.loss = loss
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.stepper.max_skips:
                raise self.diverged(step)
        # The device starts on a step that was queued early when the step before it ends.
        now = time.perf_counter()
        speed = step.weight / (now - max(step.started, self.settled_at))
        self.settled_at = now
        found = Settled(step.number, loss, norm, factor, speed, finite)
        for callback in self.callbacks:
            callback.settled(self, found)
        self.stopping |= stops > 0

    def note(self, record: dict[str, Any], text: str) -> None:
        """Tell all callbacks what one of them has found."""
        for callback in self.callbacks:
            callback.noted(self, record, text)

    def diverged(self, step: Step) -> DivergedError:
        times = max(1, self.skipped_in_a_row)
        return DivergedError(
            f"loss or gradient was not finite {times} times in a row, up to step {step.number}: the run stops", step
        )


def decides_on_device(device: torch.device) -> bool:
    """Whether the device decides to skip a step and the host reads its numbers one step later.

    On a GPU reading a number waits for all work queued before it, so it is put off until the next step is queued. On the
    CPU nothing is queued: each step is read at once.
    """
    return device.type == "cuda"


class HostCopy:
    """A copy of a device's numbers in host memory, which arrives when the device has computed them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers. Waits for them, but not for work queued after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._numbers.tolist()
        return values
