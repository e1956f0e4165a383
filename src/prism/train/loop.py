"""The training loop, for every task.

Design choices
- Step s uses samples (s-1)·B … s·B-1 of the endless order, whoever computes them: position is one number.
- A step is: accumulate gradients, look at loss and gradient norm, update if both are finite, else count a skip.
- The loss is summed over units (tokens, events) and divided by those of the whole global batch, so no split of the batch
  changes it.
- The device is read once a step, for loss and gradient norm together (`read`). Nothing else in a step waits for it, or
  small models would wait more than compute.
- At a step's end, in this order: log, validate, checkpoint, obey a signal. A checkpoint of step s therefore comes after
  everything that the log says about steps ≤ s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from prism.device import warn_if_crowded
from prism.engine.update import InvalidValueError
from prism.files import write_atomically
from prism.train import tensors
from prism.train import tensors as rng
from prism.train.checkpoint import Checkpoint, Checkpoints, NotFiniteError, checkpoint_at
from prism.train.distributed import World, accumulating, joined, layers_of, parallel_forward, spread, whole
from prism.train.export import write_export
from prism.train.optimizer import Optimizers
from prism.train.progress import Bar, StopRequest
from prism.train.run import Log, open_run, store_settings
from prism.train.settings import ScheduleSettings
from prism.train.task import Samples, Task

# Early stopping: which step was the best so far, and for how many validations there was no better one.


@dataclass
class Best:
    """Kept in every checkpoint, so that a resumed run stops where it would have.

    Args:
        patience: validations in a row without a new best that end the run; 0: none does, and nothing is kept.
    """

    patience: int
    step: int | None = None
    quality: float | None = None
    stale: int = 0

    def note(self, step: int, quality: float) -> bool:
        """Hear of a validation; True if it is the best so far. NaN never is."""
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
        """Of a run without patience nothing was kept, and one that gives it up forgets."""
        best = state.get("best")
        if self.patience and best is not None:
            self.step, self.quality, self.stale = best["step"], best["quality"], state["stale"]


# The learning rate as a function of the step alone: nothing to save, nothing to restore.


def lr_factor(step: int, steps: int, schedule: ScheduleSettings) -> float:
    """What the learning rate is multiplied by in step 1 … `steps`."""
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
    """Of the last validation; with `validation.patience`, of the best. None if this process made none."""
    model: Path | None
    best_step: int | None = None
    """With `validation.patience`: the step that the model is of."""
    stopped: bool = False
    """By a signal, before its end; everything is saved."""


def train(task: Task, report: Report | None = None) -> RunResult:
    """Train, or go on training, until the last step, the end of all patience or a signal.

    Args:
        report: is told step and loss after every step; there is no bar then.
    """
    settings = task.settings
    with joined(settings.parallel, settings.device) as world:
        if settings.batch.sequences % world.size:
            raise ValueError(
                f"batch.sequences is {settings.batch.sequences}, which {world.size} processes cannot share equally"
            )
        model = spread(task.build, task.initialize, world)
        with open_run(task, world) as folder:
            return _Run(task, world, model, folder, report).go()


class _Run:
    """The parts of a run and the position they are at."""

    def __init__(self, task: Task, world: World, model: nn.Module, folder: Path, report: Report | None) -> None:
        self.task, self.world, self.model, self.folder = task, world, model, folder
        self.settings = settings = task.settings
        self.report, self.bar_shown = report, world.main and report is None
        self.share = settings.batch.sequences // world.size
        self.at_once = min(settings.batch.micro or self.share, self.share)
        self.optimizers = Optimizers(model, settings.optimizer)
        self.checkpoints = Checkpoints(folder / "checkpoints", settings.checkpoint.keep, world)
        bf16 = settings.precision == "bf16" or (settings.precision == "auto" and world.device.type == "cuda")
        self.autocast = partial(torch.autocast, world.device.type, torch.bfloat16) if bf16 else nullcontext
        self.step = self.skipped = self.skipped_in_a_row = 0
        self.saved: Checkpoint | None = None
        self.loss: float | None = None
        self.score: Any = None
        self.best = Best(settings.validation.patience)

    def go(self) -> RunResult:
        rng.seed(self.settings.seed + 1 + self.world.rank)  # what dropout would draw differs by process
        self.model.train()
        with self.bar() as bar:
            self.resume(bar)
            self.advise(bar)
        self.world.on_main(lambda: store_settings(self.task, self.folder))
        if self.settings.compile:
            for layer in layers_of(self.model):  # alike layers share one compilation
                layer.compile()
        self.forward = parallel_forward(self.model, self.world)
        with StopRequest() as stop, self.open_log() as log, self.bar() as bar:
            while not self.ended:
                stopped = self.advance(log, bar, stop)
                if stopped:
                    bar.say(f"stopped at step {self.step} and saved: the same command goes on from here")
                    return self.outcome(None, stopped=True)
            if self.best.run_out:
                bar.say(f"no better validation in {self.best.patience}: the model is that of step {self.best.step}")
        return self.outcome(self.world.on_main(self.export))

    def advise(self, bar: Bar) -> None:
        """Say what about this run may surprise."""
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

    def outcome(self, model: Path | None, stopped: bool = False) -> RunResult:
        return RunResult(self.folder, self.step, self.skipped, self.loss, self.score, model, self.best.step, stopped)

    def bar(self) -> Bar:
        return Bar(self.step, self.settings.steps, self.bar_shown, self.task.unit)

    def open_log(self) -> Log | nullcontext[None]:
        return Log(self.folder, self.step, self.settings.log.tensorboard) if self.world.main else nullcontext()

    def resume(self, bar: Bar) -> None:
        checkpoint = self.checkpoints.newest_good(bar.say)
        if checkpoint is None:
            return
        state = checkpoint.state
        self.step, self.skipped = state["step"], state["skipped"]
        if self.step > self.settings.steps:
            raise ValueError(f"the run in {self.folder} is at step {self.step}, beyond steps {self.settings.steps}")
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.best.restore(state)
        tensors.load(checkpoint.tensors, self.model, self.optimizers, self.world)
        random = checkpoint.rng(self.world.rank)
        if random is not None:
            rng.restore(random, self.world.device)
        self.saved = checkpoint
        bar.say(f"going on from {checkpoint.folder.name} in {self.folder}")

    def advance(self, log: Log | None, bar: Bar, stop: StopRequest) -> bool:
        """One step and all that follows from it; True if a signal asked to end here."""
        started = time.perf_counter()
        self.step += 1
        first = (self.step - 1) * self.settings.batch.sequences
        weight = self.task.weight(np.arange(first, first + self.settings.batch.sequences))
        loss, norm, stopping = self.update(weight, stop)
        seconds = time.perf_counter() - started
        last = self.step == self.settings.steps
        finite = math.isfinite(loss) and math.isfinite(norm)
        due = self.step % self.settings.log.every == 0 or last
        if log is not None and (due or not finite):
            log.write(
                self.step,
                loss=loss if math.isfinite(loss) else None,
                gradient_norm=norm if math.isfinite(norm) else None,
                lr=self.settings.optimizer.lr * self.lr_factor(),
                skipped=self.skipped,
                **self.task.seen(self.step),
                **{f"{self.task.unit}_per_second": weight / seconds},
            )
        bar.update(self.step, loss, weight / seconds, due)
        if self.report is not None:
            self.report(self.step, loss)
        if finite:
            self.loss = loss
        improved = False
        if last or _is_due(self.step, self.settings.validation.every):
            improved = self.validate(log, bar)
        if self.ended or improved or stopping or _is_due(self.step, self.settings.checkpoint.every):
            self.save()
        return stopping and not self.ended

    def update(self, weight: int, stop: StopRequest) -> tuple[float, float, bool]:
        """Gradients of this step's samples, and an update if all is finite. Loss and norm are the global batch's."""
        first = (self.step - 1) * self.settings.batch.sequences + self.world.rank * self.share
        samples = self.task.samples(np.arange(first, first + self.share), self.world.device)
        self.optimizers.zero_grad()
        try:
            mine = self.backward(samples, weight)
        except InvalidValueError:  # a NaN met the engine's checks before it could reach the loss
            if self.world.size > 1:  # the others wait for gradients that will not come: there is no going on
                raise NotFiniteError(self.give_up(samples)) from None
            mine = torch.full((), math.nan, device=self.world.device)
        clip = self.settings.optimizer.clip
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        length = whole(nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip))
        stops = torch.full_like(mine, stop.name is not None)
        loss, signals, norm = read([*self.world.add_up(torch.stack([mine, stops]).double()), length])
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizers.step(self.lr_factor())
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.settings.max_skips:
                raise NotFiniteError(self.give_up(samples))
        return loss, norm, signals > 0

    def backward(self, samples: Samples, weight: int) -> Tensor:
        """This process's part of the loss, in as many passes as `batch.micro` asks for."""
        total = torch.zeros((), device=self.world.device)
        starts = range(0, self.share, self.at_once)
        for start in starts:
            part = samples[start : start + self.at_once].to(self.world.device)
            with accumulating(self.forward, last=start == starts[-1]):
                with self.autocast():
                    loss = self.task.loss(self.forward, part) / weight
                (loss * self.world.size).backward()  # DDP and FSDP average over processes, this is a sum
            total += loss.detach()
        return total

    def lr_factor(self) -> float:
        return lr_factor(self.step, self.settings.steps, self.settings.schedule)

    def validate(self, log: Log | None, bar: Bar) -> bool:
        """True if this is the best step so far, and the run asks for that."""
        with self.autocast():
            verdict = self.task.validate(self.model, self.world, self.at_once)
        improved = self.best.note(self.step, verdict.quality)
        if improved or not self.best.patience:
            self.score = verdict.score
        if log is not None:
            log.write(self.step, **verdict.record)
        bar.say(f"step {self.step}: validation {verdict.text}")
        return improved

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
        self.saved = self.checkpoints.save(held, rng.capture(self.world.device), state)

    def give_up(self, samples: Samples) -> str:
        """Keep what was being learned from when it happened, and say where it is."""
        path = self.folder / f"not-finite-step-{self.step:08d}-process-{self.world.rank}.safetensors"
        write_atomically(path, save_safetensors(samples.tensors()))
        kept = (
            "no checkpoint was written yet"
            if self.saved is None
            else f"the last checkpoint is {self.saved.folder.name}"
        )
        return (
            f"loss or gradient was not finite {max(1, self.skipped_in_a_row)} times in a row, up to step {self.step}: "
            f"the run stops; the samples are in {path}, {kept}"
        )

    def export(self) -> Path:
        chosen = self.saved
        if self.best.step is not None:
            chosen = checkpoint_at(self.folder / "checkpoints", self.best.step)
        assert chosen is not None
        return write_export(self.task.write_model, self.folder, chosen, self.folder / "model")


def read(numbers: Sequence[Tensor]) -> list[float]:
    """The values of numbers on a device: the one place in a training step that waits for it."""
    values: list[float] = torch.stack([number.double() for number in numbers]).tolist()
    return values


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
