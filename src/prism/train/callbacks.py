"""What a run does besides its steps: show progress, log, validate, stop early, show samples, save checkpoints.

The order after a step is that of the list: a checkpoint of step s is written after everything that the log says about
steps ≤ s, so `Save` comes last.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prism.train import tensors
from prism.train.checkpoint import Checkpoint, Checkpoints
from prism.train.loop import Callback, Loop, Settled
from prism.train.run import Log
from prism.train.step import Stepper
from prism.train.task import ShowsSamples, Task

Report = Callable[[int, float], None]


class _Screen(Console):
    """stderr, whose reader may leave: a run continues without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Bar(Callback):
    """A progress bar with loss, speed and time left, or a line now and then where there is no terminal.

    Args:
        shown: whether this process shows anything.
    """

    def __init__(self, step: int, task: Task, shown: bool) -> None:
        self.console = _Screen(stderr=True, quiet=not shown, soft_wrap=True, highlight=False)
        self._lines = not self.console.is_terminal
        self._steps, self._unit, self._every = task.settings.steps, task.unit, task.settings.log.every
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[speed]}} {task.unit}/s  left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=self._lines or not shown,
        )
        self._task = self._progress.add_task("training", total=self._steps, completed=step, loss="–", speed="–")

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        with suppress(OSError):  # the terminal is gone
            self.console.print(message, markup=False)

    def settled(self, loop: Loop, step: Settled) -> None:
        self._progress.update(self._task, completed=step.number, loss=f"{step.loss:.4f}", speed=f"{step.speed:,.0f}")
        if self._lines and (_is_due(step.number, self._every) or step.number == self._steps):
            left = self._progress.tasks[self._task].time_remaining
            when = "" if left is None else f", {left:.0f} s left"
            self.say(f"step {step.number}/{self._steps}: loss {step.loss:.4f}, {step.speed:,.0f} {self._unit}/s{when}")

    def noted(self, loop: Loop, record: dict[str, Any], text: str) -> None:
        self.say(f"step {loop.step}: {text}")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._progress.stop()


class WriteLog(Callback):
    """Write steps, some or all, and what other callbacks note into the run's log. Skipped steps are always written."""

    def __init__(self, log: Log, task: Task) -> None:
        self.log, self.task, self.settings = log, task, task.settings

    def settled(self, loop: Loop, step: Settled) -> None:
        last = step.number == self.settings.steps
        if step.finite and not last and not _is_due(step.number, self.settings.log.every):
            return
        self.log.write(
            step.number,
            loss=step.loss if math.isfinite(step.loss) else None,
            gradient_norm=step.norm if math.isfinite(step.norm) else None,
            lr=self.settings.optimizer.lr * step.factor,
            skipped=loop.skipped,
            **self.task.seen(step.number),
            **{f"{self.task.unit}_per_second": step.speed},
        )

    def noted(self, loop: Loop, record: dict[str, Any], text: str) -> None:
        self.log.write(loop.step, **record)


class Tell(Callback):
    """Call a function with the number and loss of every step."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def settled(self, loop: Loop, step: Settled) -> None:
        self.report(step.number, step.loss)


@dataclass
class EarlyStopping:
    """The best step so far, and the number of validations since then.

    It is part of every checkpoint, so that a resumed run stops at the same step as an uninterrupted one.

    Args:
        patience: validations in a row without a new best that end the run; 0: no early stopping, nothing is recorded.
    """

    patience: int
    step: int | None = None
    quality: float | None = None
    stale: int = 0

    def note(self, step: int, quality: float) -> bool:
        """Record a validation; True if it is the best so far. NaN never is."""
        if not self.patience:
            return False
        if quality == quality and (self.quality is None or quality > self.quality):
            self.step, self.quality, self.stale = step, quality, 0
            return True
        self.stale += 1
        return False

    @property
    def run_out(self) -> bool:
        return 0 < self.patience <= self.stale

    def state(self) -> dict[str, Any]:
        best = None if self.step is None else {"step": self.step, "quality": self.quality}
        return {"best": best, "stale": self.stale}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state. Without patience, then or now, there is nothing to continue."""
        best = state.get("best")
        if self.patience and best is not None:
            self.step, self.quality, self.stale = best["step"], best["quality"], state["stale"]


class Validate(Callback):
    """Validate now and then and after the last step; end the run when validations no longer improve."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.every = stepper, stepper.settings.validation.every
        self.best = EarlyStopping(stepper.settings.validation.patience)
        self.improved = False
        """Whether this step is the best so far, in a run with early stopping."""
        self.score: Any = None
        """Of the last validation; with early stopping, of the best one."""

    def due(self, loop: Loop) -> bool:
        return loop.step == self.stepper.steps or _is_due(loop.step, self.every)

    def after(self, loop: Loop) -> bool:
        self.improved = False
        if self.due(loop):
            with self.stepper.autocast():
                found = self.stepper.task.validate(self.stepper.model, self.stepper.world, self.stepper.at_once)
            self.improved = self.best.note(loop.step, found.quality)
            if self.improved or not self.best.patience:
                self.score = found.score
            loop.note(found.record, f"validation {found.text}")
        return self.best.run_out


class Sample(Callback):
    """Show now and then what the model does, of a task that can."""

    def __init__(self, stepper: Stepper, task: ShowsSamples) -> None:
        self.stepper, self.task = stepper, task

    def due(self, loop: Loop) -> bool:
        return _is_due(loop.step, self.task.sample_every)

    def after(self, loop: Loop) -> bool:
        if self.due(loop):
            with self.stepper.autocast():
                text = self.task.sample(self.stepper.model)
            loop.note({"sample": text}, f"sample\n{textwrap.indent(text, '  ')}")
        return False


class Save(Callback):
    """Write a checkpoint now and then, of the best step, and when the run ends.

    Args:
        saved: the newest checkpoint, if the run resumes from one.
    """

    def __init__(
        self, stepper: Stepper, checkpoints: Checkpoints, validate: Validate, saved: Checkpoint | None
    ) -> None:
        self.stepper, self.checkpoints, self.validate, self.saved = stepper, checkpoints, validate, saved
        self.every = stepper.settings.checkpoint.every

    def due(self, loop: Loop) -> bool:
        return _is_due(loop.step, self.every)

    def after(self, loop: Loop) -> bool:
        if loop.ending or self.validate.improved or self.due(loop):
            model, optimizers, world = self.stepper.model, self.stepper.optimizers, self.stepper.world
            state = {
                **loop.state(),
                **self.validate.best.state(),
                "processes": world.size,
                "torch": torch.__version__,
            }
            held = tensors.model_tensors(model) | tensors.optimizer_tensors(model, optimizers)
            self.saved = self.checkpoints.save(held, tensors.capture(world.device), state)
        return False


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
