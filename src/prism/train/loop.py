"""Train a model for any task: steps, log, validation, checkpoints, early stopping and the final export.

Design choices
- Step s uses samples (s-1)·B … s·B-1 of the endless order, no matter which process computes them: the position in the
  data is one number.
- A step computes gradients (gradient accumulation over micro-batches), then loss and gradient norm, and updates the
  weights if both are finite. Otherwise the step is skipped and counted; `max_skips` in a row end the run.
- The loss is summed over units (tokens, events) and divided by those of the whole global batch, so no split of the batch
  changes it.
- On a GPU no step waits for the device (`decides_on_device`), or small models would wait more than compute. The device
  decides whether to skip, and the processes agree on it there. The host reads loss, norm and stop flag of step s only
  after it has queued step s+1. Log line, skip count, the end after `max_skips` and a stop by a signal therefore come one
  step later. Before a validation, a checkpoint and the end of the run every step is settled, so all of them hold the same
  facts as on the CPU, where each step is read and settled before the next.
- After a step, in this order: log, validate, show a sample, checkpoint, obey a signal. A checkpoint of step s is therefore
  written after everything that the log says about steps ≤ s.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_safetensors
from torch import nn

from prism.device import warn_if_crowded
from prism.engine import InvalidValueError
from prism.files import write_atomically
from prism.train import tensors
from prism.train.checkpoint import Checkpoint, Checkpoints, NotFiniteError, checkpoint_at
from prism.train.distributed import World, joined, spread
from prism.train.export import write_export
from prism.train.graph import check_graph
from prism.train.progress import Bar, StopRequest
from prism.train.readback import HostCopy, decides_on_device
from prism.train.run import Log, open_run, store_settings
from prism.train.settings import ScheduleSettings
from prism.train.step import Step, Stepper
from prism.train.task import ShowsSamples, Task


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

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. Without patience, then or now, there is nothing to continue."""
        best = state.get("best")
        if self.patience and best is not None:
            self.step, self.quality, self.stale = best["step"], best["quality"], state["stale"]


def lr_factor(step: int, steps: int, schedule: ScheduleSettings) -> float:
    """Factor of the learning rate in step 1 … `steps`: a function of the step alone, so checkpoints need not hold it."""
    warmup = min(schedule.warmup, steps)
    if step <= warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        done = (step - warmup) / (steps - warmup)
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2
    decaying = min(round(steps * schedule.decay), steps - warmup)
    plateau_end = steps - decaying
    if step <= plateau_end:
        return 1.0
    return 1 - (1 - schedule.final) * (step - plateau_end) / decaying


Report = Callable[[int, float], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `model` is the exported folder; None if a signal stopped the run before its last step."""

    run: Path
    step: int
    skipped: int
    loss: float | None
    score: Any
    """Of the last validation; with `validation.patience`, of the best one. None if this process made none."""
    model: Path | None
    best_step: int | None = None
    """With `validation.patience`: the step whose weights `model` holds."""
    stopped: bool = False
    """A signal ended the run before its last step; everything is saved."""


def train(task: Task, report: Report | None = None) -> RunResult:
    """Train, or resume training, until the last step, early stopping or a signal.

    Args:
        report: callback, called with step and loss after every step; it replaces the progress bar.
    """
    settings = task.settings
    with joined(settings.parallel, settings.device) as world:
        world.share(settings.batch.sequences)  # raises an error if they cannot share it
        if world.context is not None:
            task.share_sequences(world.context)
        model = spread(task.build, task.initialize, world)
        if settings.graph:
            check_graph(model, world.device, world.size)
        with open_run(task, world) as folder:
            return _Run(task, world, model, folder, report).go()


class _Run:
    """The parts of a run and its position."""

    def __init__(self, task: Task, world: World, model: nn.Module, folder: Path, report: Report | None) -> None:
        self.task, self.world, self.model, self.folder = task, world, model, folder
        self.settings = settings = task.settings
        self.report, self.bar_shown = report, world.main and report is None
        self.stepper = Stepper(task, world, model)
        self.share, self.at_once, self.optimizers = self.stepper.share, self.stepper.at_once, self.stepper.optimizers
        self.checkpoints = Checkpoints(folder / "checkpoints", settings.checkpoint.keep, world)
        self.on_device = decides_on_device(world.device)
        self.pending: tuple[Step, HostCopy] | None = None
        """The step that is queued and not yet settled, with its numbers."""
        self.settled_at = -math.inf
        self.step = self.skipped = self.skipped_in_a_row = 0
        self.saved: Checkpoint | None = None
        self.loss: float | None = None
        self.score: Any = None
        self.best = EarlyStopping(settings.validation.patience)

    def go(self) -> RunResult:
        tensors.seed(self.settings.seed + 1 + self.world.rank)  # dropout masks differ between processes
        self.model.train()
        with self.bar() as bar:
            self.resume(bar)
            self.advise(bar)
        self.world.on_main(lambda: store_settings(self.task, self.folder))
        self.stepper.prepare()
        with StopRequest() as stop, self.open_log() as log, self.bar() as bar:
            while not self.ended:
                stopped = self.advance(log, bar, stop)
                if stopped:
                    bar.say(f"stopped at step {self.step} and saved: the same command resumes from here")
                    return self.result(None, stopped=True)
            if self.best.run_out:
                bar.say(
                    f"no improvement in {self.best.patience} validations: the model is that of step {self.best.step}"
                )
        return self.result(self.world.on_main(self.export))

    def advise(self, bar: Bar) -> None:
        """Warn about settings that do not do what they seem to, and about a crowded CPU."""
        micro = self.settings.batch.micro
        if micro is not None and micro > self.share:
            bar.say(
                f"batch.micro is {micro}, but a process has {self.share} sequences a step: all are computed at once"
            )
        if self.world.main and self.world.device.type == "cpu":
            warn_if_crowded(bar.say)

    @property
    def ended(self) -> bool:
        return self.step >= self.settings.steps or self.best.run_out

    def result(self, model: Path | None, stopped: bool = False) -> RunResult:
        return RunResult(self.folder, self.step, self.skipped, self.loss, self.score, model, self.best.step, stopped)

    def bar(self) -> Bar:
        return Bar(self.step, self.settings.steps, self.bar_shown, self.task.unit)

    def open_log(self) -> Log | nullcontext[None]:
        return Log(self.folder, self.step, self.settings.log.all_trackers) if self.world.main else nullcontext()

    def resume(self, bar: Bar) -> None:
        checkpoint = self.checkpoints.newest_good(bar.say)
        if checkpoint is None:
            return
        state = checkpoint.state
        self.step, self.skipped = state["step"], state["skipped"]
        if self.step > self.settings.steps:
            raise ValueError(
                f"the run in {self.folder} is at step {self.step}, but steps is {self.settings.steps}: "
                "raise --steps, or give another run folder with --out"
            )
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.best.restore(state)
        tensors.load(checkpoint.tensors, self.model, self.optimizers, self.world)
        random = checkpoint.rng(self.world.rank)
        if random is not None:
            tensors.restore(random, self.world.device)
        self.saved = checkpoint
        if self.step:  # a run may begin with a checkpoint of step 0, which resumes nothing
            bar.say(f"resuming from {checkpoint.folder.name} in {self.folder}")

    def advance(self, log: Log | None, bar: Bar, stop: StopRequest) -> bool:
        """Make one step and everything that follows from it; True if a signal asked to stop here."""
        self.step += 1
        step = self.draw()
        try:
            numbers = self.stepper.compute(step, self.lr_factor(step.number), stop.name is not None, self.on_device)
        except InvalidValueError:  # the other processes wait for gradients that will not come
            self.settle(log, bar)
            raise NotFiniteError(self.give_up(step)) from None
        queued = step, HostCopy(numbers)
        stopping = self.settle(log, bar)  # of the step before this one
        self.pending = queued
        validates = self.step == self.settings.steps or _is_due(self.step, self.settings.validation.every)
        saves = _is_due(self.step, self.settings.checkpoint.every)
        task = self.task
        samples = isinstance(task, ShowsSamples) and _is_due(self.step, task.sample_every)
        if not self.on_device or stopping or validates or saves or samples:
            stopping |= self.settle(log, bar)
        improved = self.validate(log, bar) if validates else False
        if samples and isinstance(task, ShowsSamples):
            self.show_sample(task, log, bar)
        if self.ended or improved or stopping or saves:
            self.save()
        return stopping and not self.ended

    def draw(self) -> Step:
        """This step's samples of this process, and the weight of everyone's."""
        started = time.perf_counter()
        first = (self.step - 1) * self.settings.batch.sequences
        everyone = np.arange(first, first + self.settings.batch.sequences)
        samples = self.task.samples(self.world.numbers(everyone), self.world.device)
        return Step(self.step, samples, self.task.weight(everyone), started)

    def settle(self, log: Log | None, bar: Bar) -> bool:
        """Read the pending step's numbers and act on them: update or skip, log, report.

        Returns:
            Whether any process was asked to stop. False if no step is pending.
        """
        if self.pending is None:
            return False
        (step, numbers), self.pending = self.pending, None
        loss, stops, faults, norm = numbers.read()
        finite = math.isfinite(loss) and not faults
        if finite:
            if not self.on_device:
                self.optimizers.step(self.lr_factor(step.number))
            self.skipped_in_a_row = 0
            self.loss = loss
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.settings.max_skips:
                raise NotFiniteError(self.give_up(step))
        # The device starts on a step that was queued early when the step before it ends.
        now = time.perf_counter()
        speed = step.weight / (now - max(step.started, self.settled_at))
        self.settled_at = now
        due = step.number % self.settings.log.every == 0 or step.number == self.settings.steps
        if log is not None and (due or not finite):
            log.write(
                step.number,
                loss=loss if math.isfinite(loss) else None,
                gradient_norm=norm if math.isfinite(norm) else None,
                lr=self.settings.optimizer.lr * self.lr_factor(step.number),
                skipped=self.skipped,
                **self.task.seen(step.number),
                **{f"{self.task.unit}_per_second": speed},
            )
        bar.update(step.number, loss, speed, due)
        if self.report is not None:
            self.report(step.number, loss)
        return stops > 0

    def lr_factor(self, step: int) -> float:
        return lr_factor(step, self.settings.steps, self.settings.schedule)

    def validate(self, log: Log | None, bar: Bar) -> bool:
        """Validate the weights of this step; True if they are the best so far and the run has early stopping."""
        with self.stepper.autocast():
            found = self.task.validate(self.model, self.world, self.at_once)
        improved = self.best.note(self.step, found.quality)
        if improved or not self.best.patience:
            self.score = found.score
        if log is not None:
            log.write(self.step, **found.record)
        bar.say(f"step {self.step}: validation {found.text}")
        return improved

    def show_sample(self, task: ShowsSamples, log: Log | None, bar: Bar) -> None:
        with self.stepper.autocast():
            text = task.sample(self.model)
        if log is not None:
            log.write(self.step, sample=text)
        bar.say(f"step {self.step}: sample\n{textwrap.indent(text, '  ')}")

    def save(self) -> None:
        state = {
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            **self.best.state(),
            "processes": self.world.size,
            "torch": torch.__version__,
        }
        held = tensors.model_tensors(self.model) | tensors.optimizer_tensors(self.model, self.optimizers)
        self.saved = self.checkpoints.save(held, tensors.capture(self.world.device), state)

    def give_up(self, step: Step) -> str:
        """Write the step's samples to a file; the message that says where it is and why the run ends."""
        path = self.folder / f"not-finite-step-{step.number:08d}-process-{self.world.rank}.safetensors"
        write_atomically(path, save_safetensors(step.samples.tensors()))
        last = None if self.saved is None else self.saved.folder.name
        kept = "no checkpoint was written yet" if last is None else f"the last checkpoint is {last}"
        return (
            f"loss or gradient was not finite {max(1, self.skipped_in_a_row)} times in a row, up to step {step.number}: "
            f"the run stops; the samples are in {path}, {kept}"
        )

    def export(self) -> Path:
        chosen = self.saved
        if self.best.step is not None:
            chosen = checkpoint_at(self.folder / "checkpoints", self.best.step)
        assert chosen is not None
        return write_export(self.task.write_model, self.folder, chosen, self.folder / "model")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
