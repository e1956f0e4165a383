"""The training loop.

Design choices
- Step s uses samples (s-1)·B … s·B-1 of the endless order, whoever computes them: position is one number.
- A step is: accumulate gradients, look at loss and gradient norm, update if both are finite, else count a skip.
- The loss is summed over tokens and divided by those of the whole global batch, so no split of the batch changes it.
- At a step's end, in this order: log, validate, checkpoint, obey a signal. A checkpoint of step s therefore comes after
  everything that the log says about steps ≤ s.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as save_safetensors
from torch import nn

from prism.data.files import write_atomically
from prism.data.prepare import Corpus, prepare
from prism.data.windows import Batch, Windows
from prism.engine.update import InvalidValueError
from prism.train import rng, tensors
from prism.train.checkpoint import Checkpoint, Checkpoints
from prism.train.distributed import World, accumulating, joined, layers_of, parallel_forward, spread, whole
from prism.train.export import export
from prism.train.finite import NotFiniteError
from prism.train.log import Log
from prism.train.model import Builder, build_model, initialize, read_weights, vocabulary
from prism.train.optimizer import Optimizers
from prism.train.progress import Bar
from prism.train.run import check_folder, open_run
from prism.train.schedule import lr_factor
from prism.train.settings import Settings
from prism.train.stop import StopRequest
from prism.train.validate import Score, Validation, total_nats

Report = Callable[[int, float], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `model` is the exported folder; None if a signal stopped the run before its last step."""

    run: Path
    step: int
    skipped: int
    loss: float | None
    score: Score | None
    model: Path | None


def train(settings: Settings, build: Builder = build_model, report: Report | None = None) -> Outcome:
    """Train, or go on training, until the last step or a signal. All bad input is refused before anything is written.

    Args:
        report: is told step and loss after every step; there is no bar then.
    """
    settings.check()
    check_folder(settings.out, settings.resume)
    weights = None if settings.model.weights is None else read_weights(settings.model.weights)
    verify = settings.data.verify and os.environ.get("LOCAL_RANK", "0") == "0"
    corpus = prepare(
        settings.data.recipe(), settings.data.cache, verify, lambda message: print(message, file=sys.stderr)
    )
    vocab_size = vocabulary(settings.model, corpus.manifest)
    end = corpus.manifest.end
    Windows(corpus.stream("train"), settings.data.context)  # enough data?
    with joined(settings.parallel, settings.device) as world:
        if settings.batch.sequences % world.size:
            raise ValueError(
                f"batch.sequences is {settings.batch.sequences}, which {world.size} processes cannot share equally"
            )
        model = spread(
            lambda: build(settings.model, vocab_size, end),
            lambda fresh: initialize(fresh, settings.seed, weights),
            world,
        )
        with open_run(settings, corpus, vocab_size, world) as folder:
            return _Run(settings, corpus, world, model, folder, build, report).go()


class _Run:
    """The parts of a run and the position they are at."""

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        world: World,
        model: nn.Module,
        folder: Path,
        build: Builder,
        report: Report | None,
    ) -> None:
        self.settings, self.world, self.model, self.folder, self.build = settings, world, model, folder, build
        self.report, self.bar_shown = report, world.main and report is None
        end = corpus.manifest.end if settings.data.separate_documents else None
        self.windows = Windows(corpus.stream("train"), settings.data.context, end)
        self.share = settings.batch.sequences // world.size
        self.at_once = min(settings.batch.micro or self.share, self.share)
        self.validation = Validation(
            corpus, settings.data.context, end, settings.validation.sequences, self.at_once, world
        )
        self.optimizers = Optimizers(model, settings.optimizer)
        self.checkpoints = Checkpoints(folder / "checkpoints", settings.checkpoint.keep, world)
        bf16 = settings.precision == "bf16" or (settings.precision == "auto" and world.device.type == "cuda")
        self.autocast = partial(torch.autocast, world.device.type, torch.bfloat16) if bf16 else nullcontext
        self.step = self.skipped = self.skipped_in_a_row = 0
        self.saved: Checkpoint | None = None
        self.loss: float | None = None
        self.score: Score | None = None

    def go(self) -> Outcome:
        steps = self.settings.steps
        rng.seed(self.settings.seed + 1 + self.world.rank)  # what dropout would draw differs by process
        self.model.train()
        with Bar(0, steps, self.bar_shown) as bar:
            self.resume(bar)
        if self.settings.compile:
            for layer in layers_of(self.model):  # alike layers share one compilation
                layer.compile()
        self.forward = parallel_forward(self.model, self.world)
        with StopRequest() as stop, self.open_log() as log, Bar(self.step, steps, self.bar_shown) as bar:
            while self.step < steps:
                stopped = self.advance(log, bar, stop)
                if stopped:
                    bar.say(f"stopped at step {self.step} and saved: the same command goes on from here")
                    return Outcome(self.folder, self.step, self.skipped, self.loss, self.score, None)
        model = self.world.on_main(self.export)
        return Outcome(self.folder, self.step, self.skipped, self.loss, self.score, model)

    def open_log(self) -> Log | nullcontext[None]:
        return Log(self.folder, self.step, self.settings.log.tensorboard) if self.world.main else nullcontext()

    def resume(self, bar: Bar) -> None:
        checkpoint = self.checkpoints.newest_good(bar.say)
        if checkpoint is None:
            return
        state = checkpoint.state
        self.step, self.skipped = state["step"], state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        tensors.load(checkpoint.tensors, self.model, self.optimizers, self.world)
        random = checkpoint.rng(self.world.rank)
        if random is not None:
            rng.restore(random)
        self.saved = checkpoint
        bar.say(f"going on from {checkpoint.folder.name} in {self.folder}")
        if self.step > self.settings.steps:
            raise ValueError(f"the run in {self.folder} is at step {self.step}, beyond steps {self.settings.steps}")

    def advance(self, log: Log | None, bar: Bar, stop: StopRequest) -> bool:
        """One step and all that follows from it; True if a signal asked to end here."""
        started = time.perf_counter()
        self.step += 1
        loss, norm, stopping = self.update(stop)
        seconds = time.perf_counter() - started
        last = self.step == self.settings.steps
        finite = math.isfinite(loss) and math.isfinite(norm)
        speed = self.settings.batch.sequences * self.settings.data.context / seconds
        due = self.step % self.settings.log.every == 0 or last
        if log is not None and (due or not finite):
            log.write(
                self.step,
                loss=loss if math.isfinite(loss) else None,
                gradient_norm=norm if math.isfinite(norm) else None,
                lr=self.settings.optimizer.lr * self.lr_factor(),
                skipped=self.skipped,
                tokens=self.step * self.settings.batch.sequences * self.settings.data.context,
                tokens_per_second=speed,
            )
        bar.update(self.step, loss, speed, due)
        if self.report is not None:
            self.report(self.step, loss)
        if finite:
            self.loss = loss
        if last or _is_due(self.step, self.settings.validation.every):
            self.validate(log, bar)
        if last or stopping or _is_due(self.step, self.settings.checkpoint.every):
            self.save()
        return stopping and not last

    def update(self, stop: StopRequest) -> tuple[float, float, bool]:
        """Gradients of this step's samples, and an update if all is finite. Loss and norm are the global batch's."""
        first = (self.step - 1) * self.settings.batch.sequences + self.world.rank * self.share
        batch = self.windows.samples(np.arange(first, first + self.share), self.settings.seed)
        self.optimizers.zero_grad()
        try:
            mine = self.backward(batch)
        except InvalidValueError:  # a NaN met the engine's checks before it could reach the loss
            if self.world.size > 1:  # the others wait for gradients that will not come: there is no going on
                raise NotFiniteError(self.give_up(batch)) from None
            mine = math.nan
        clip = self.settings.optimizer.clip
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = whole(nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)).item()
        loss, signals = self.world.sum(mine, stop.name is not None)
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizers.step(self.lr_factor())
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.settings.max_skips:
                raise NotFiniteError(self.give_up(batch))
        return loss, norm, signals > 0

    def backward(self, batch: Batch) -> float:
        """This process's part of the loss, in as many passes as `batch.micro` asks for."""
        tokens = self.settings.batch.sequences * self.settings.data.context
        total = torch.zeros((), device=self.world.device)
        starts = range(0, self.share, self.at_once)
        for start in starts:
            part = batch[start : start + self.at_once].to(self.world.device)
            with accumulating(self.forward, last=start == starts[-1]):
                with self.autocast():
                    loss = total_nats(self.forward, part) / tokens
                (loss * self.world.size).backward()  # DDP and FSDP average over processes, this is a sum
            total += loss.detach()
        return total.item()

    def lr_factor(self) -> float:
        return lr_factor(self.step, self.settings.steps, self.settings.schedule)

    def validate(self, log: Log | None, bar: Bar) -> None:
        with self.autocast():
            self.score = score = self.validation.score(self.model)
        if log is not None:
            log.write(
                self.step,
                validation_nats=score.nats,
                validation_perplexity=score.perplexity,
                validation_bits_per_byte=score.bits_per_byte,
            )
        bar.say(
            f"step {self.step}: validation {score.nats:.4f} nats, perplexity {score.perplexity:.3f}, "
            f"{score.bits_per_byte:.4f} bits per byte"
        )

    def save(self) -> None:
        state = {
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "processes": self.world.size,
            "torch": torch.__version__,
        }
        held = tensors.model_tensors(self.model) | tensors.optimizer_tensors(self.model, self.optimizers)
        self.saved = self.checkpoints.save(held, rng.capture(), state)

    def give_up(self, batch: Batch) -> str:
        """Keep what was being learned from when it happened, and say where it is."""
        path = self.folder / f"not-finite-step-{self.step:08d}-process-{self.world.rank}.safetensors"
        write_atomically(path, save_safetensors(batch.tensors()))
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
        assert self.saved is not None
        return export(self.folder, self.saved, self.folder / "model", self.build)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
