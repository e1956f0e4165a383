"""Draw and compute a training step: gradients by micro-batches, the gradient norm, the update of the weights.

The loop (loop.py) settles what a step found. A benchmark makes the same steps without a loop:
`Stepper(task, World(device), model)`, `prepare()`, then `compute(…)`.

- Step s uses samples (s-1)·B … s·B-1 of the endless order, no matter which process computes them: the position in the
  data is one number.
- The loss is summed over units (tokens, events) and divided by those of the whole global batch, so no split of the batch
  changes it.

What makes steps fast is here or is chosen here: bfloat16 products, kernels and recomputation in the layers
(`prism.engine.layer_ops`, `prism.engine.recompute`), compilation, fused optimizers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prism.engine import InvalidValueError
from prism.nn.block import Block
from prism.train.distributed import World, accumulating, layers_of, parallel_forward, whole
from prism.train.graph import GraphedPasses
from prism.train.optimizer import Optimizers
from prism.train.settings import RunSettings, ScheduleSettings
from prism.train.task import Samples, Task


@dataclass(frozen=True)
class Step:
    """A step and this process's samples of it."""

    number: int
    samples: Samples
    weight: int
    """Units of the global batch."""
    started: float


def autocast(settings: RunSettings, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which a run with these settings computes losses."""
    bf16 = settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")
    return partial(torch.autocast, device.type, torch.bfloat16) if bf16 else nullcontext


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


class Stepper:
    """A task's model and optimizers in this process, and how a step is computed with them."""

    def __init__(self, task: Task, world: World, model: nn.Module) -> None:
        self.task, self.world, self.model = task, world, model
        self.settings = settings = task.settings
        self.steps, self.max_skips, self.device = settings.steps, settings.max_skips, world.device
        self.share = world.share(settings.batch.sequences)
        self.at_once = min(settings.batch.micro or self.share, self.share)
        self.optimizers = Optimizers(model, settings.optimizer)
        on_gpu = world.device.type == "cuda"
        self.autocast = autocast(settings, world.device)
        self.recompute = settings.recompute == "cheap" or (settings.recompute == "auto" and on_gpu)
        self.forward = model
        self.graphed: GraphedPasses | None = None

    def prepare(self) -> None:
        """Apply the settings of recomputation, compilation and parallelism to the model. Once, after weights are loaded."""
        for module in self.model.modules():
            if isinstance(module, Block):
                module.recompute = self.recompute
        if self.settings.compile:
            for layer in layers_of(self.model):  # layers of one class share one compilation
                layer.compile()
        self.forward = parallel_forward(self.model, self.world)
        if self.settings.graph:
            self.graphed = GraphedPasses(self.model, self.differentiate)

    def draw(self, number: int) -> Step:
        """A step's samples of this process, and the weight of everyone's."""
        started = time.perf_counter()
        first = (number - 1) * self.settings.batch.sequences
        everyone = np.arange(first, first + self.settings.batch.sequences)
        samples = self.task.samples(self.world.numbers(everyone), self.world.device)
        return Step(number, samples, self.task.weight(everyone), started)

    def factor(self, number: int) -> float:
        return lr_factor(number, self.steps, self.settings.schedule)

    def compute(self, step: Step, factor: float, stopping: bool, update: bool) -> Tensor:
        """Compute gradients and, with `update`, the new weights; nothing waits for the device.

        Args:
            factor: of the learning rate.
            stopping: whether this process was asked to stop.
            update: update the weights, unless loss or gradient is not finite, which the device decides.

        Returns:
            `[4]`, float64, on the device, the same in all processes: loss of the global batch, processes asked to stop,
            processes whose gradient norm is not finite, gradient norm before clipping.
        """
        if self.graphed is None:
            self.optimizers.zero_grad()
        else:
            self.graphed.zero_gradients()
        try:
            loss = self.backward(step)
        except InvalidValueError:  # the engine's checks met a NaN before it could reach the loss
            if self.world.size > 1:
                raise
            loss = torch.full((), math.nan, device=self.world.device)
        clip = self.settings.optimizer.clip
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = whole(nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)).to(loss.device)
        stops = torch.full_like(loss, stopping)
        sums = self.world.add_up(torch.stack([loss, stops, (~norm.isfinite()).to(loss.dtype)]).double())
        if update:
            skip = ~sums[0].isfinite() | (sums[2] > 0)
            self.optimizers.step(factor, skip.float())
        return torch.cat([sums, norm.double().unsqueeze(0)])

    def update(self, factor: float) -> None:
        """Update the weights with the gradients of the last step."""
        self.optimizers.step(factor)

    def backward(self, step: Step) -> Tensor:
        """Accumulate the gradients of this process's samples; its part of the loss, a scalar on the device."""
        total = torch.zeros((), device=self.world.device)
        starts = range(0, self.share, self.at_once)
        run = self.differentiate if self.graphed is None else self.graphed
        for start in starts:
            part = step.samples[start : start + self.at_once].to(self.world.device)
            with accumulating(self.forward, last=start == starts[-1]):
                total += run(part, step.weight)
        return total

    def differentiate(self, samples: Samples, weight: int | Tensor) -> Tensor:
        """Add the gradients of samples; their loss divided by the weight."""
        with self.autocast():
            loss = self.task.loss(self.forward, samples) / weight
        (loss * self.world.size).backward()  # DDP and FSDP average over processes, this is a sum
        return loss.detach()
