"""Train one model on a synthetic task and test it: `train_probe`.

- Trained on the split `train`, judged during training on `validation`, tested once, at the end, on `test`.
- AdamW, linear warm-up, cosine decay to 5 %, clipped gradients. Sequences are new at every step.
- The product's training loop makes the steps. On a GPU a whole step is one CUDA graph: models this small would spend their
  time starting kernels.
- A loss that is not finite ends the run with an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.device import pick_device, without_subnormals
from prism.engine import InvalidValueError
from prism.engine.cuda_graph import capture
from prism.lab.model import ModelSettings, ProbeModel
from prism.lab.tasks.batches import Curriculum, Questions, held_out, is_asked, questions, training_batches
from prism.lab.tasks.catalogue import build_task
from prism.lab.tasks.task import Batch, Task
from prism.nn import no_weight_decay
from prism.train.callbacks import Report
from prism.train.loop import Callback, DivergedError, Loop, Settled
from prism.train.step import Step

POINTS = 40
"""Points of the training curve."""
SHAPES = 16
"""Different shapes of batches up to which steps are captured as graphs."""


@dataclass(frozen=True)
class ProbeRun:
    """One model to train: a task, a rule with its sizes, and a budget. All fields are plain values."""

    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tests by label: the task's options that differ from training. Empty: the task's own tests."""
    model: ModelSettings = field(default_factory=ModelSettings)
    steps: int = 900
    batch: int = 32
    learning_rate: float = 1e-2
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of the gradient."""
    curriculum: Curriculum | None = None
    seed: int = 0
    evaluations: int = 10
    """Times that the model is judged on the split validation, the last step included."""
    validation_sequences: int = 512
    test_sequences: int = 1024
    test: bool = True
    """Whether to test the model at the end; not needed to choose a learning rate."""
    stop_at: float | None = None
    """Stop when the score on validation reaches this. None: never."""
    device: str = "cpu"
    """`cpu`, `cuda`, or `auto`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the products; bfloat16 uses autocast."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validation_sequences", "test_sequences", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)!r}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be at least 0 and below 1, got {self.warmup!r}")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision must be float32 or bfloat16, got {self.precision!r}")

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> ProbeRun:
        """The run that `asdict(run)` came from, also after a trip through JSON."""
        curriculum = values.get("curriculum")
        return cls(
            **{
                **values,
                "model": ModelSettings(**values["model"]),
                "curriculum": None if curriculum is None else Curriculum(**curriculum),
            }
        )

    def build_task(self) -> Task:
        return build_task(self.task, self.task_options)

    def build_tests(self) -> dict[str, Task]:
        """The tasks to test with, by label; the first is the main one."""
        task = self.build_task()
        if not self.tests:
            return task.tests()
        return {name: build_task(self.task, {**self.task_options, **more}) for name, more in self.tests.items()}

    def stages(self) -> list[tuple[int, Task]]:
        task = self.build_task()
        return [(self.steps, task)] if self.curriculum is None else self.curriculum.stages(task, self.steps)


def probe_job(settings: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """`train_probe` for settings as plain values."""
    return train_probe(ProbeRun.from_plain(settings), report)


@without_subnormals()
def train_probe(run: ProbeRun, report: Report = lambda step, loss: None) -> dict[str, Any]:
    """Train and test one model; calls `report(step, loss)` now and then.

    Returns scores, ceilings and baselines by test label, the score on validation, the training curve, sizes and times.
    """
    device = pick_device(run.device)
    torch.manual_seed(run.seed)
    tests, started = run.build_tests(), time.perf_counter()
    main = next(iter(tests))
    model = ProbeModel(run.build_task(), run.model).to(device)
    with closing(training_batches(run.stages(), run.batch, run.seed, device)) as batches:
        trainer = Trainer(model, run, device, batches)
        curve = Curve(run, trainer, tests[main], report)
        loop = Loop(trainer, [curve])
        try:
            loop.run()
        except DivergedError as error:
            raise FloatingPointError(f"the loss is not finite at step {error.step.number} of {run.steps}") from None
    scores = {}
    for label, task in tests.items() if run.test else ():
        data = held_out(task, run.test_sequences, "test", run.seed, label)
        scores[label] = evaluate(model, task, data, trainer.autocast)
    return {
        "metric": tests[main].metric,
        "better": "higher",
        "validation": curve.score,
        "scores": scores,
        "ceiling": {label: task.ceiling() for label, task in tests.items()},
        "baseline": {label: task.baseline() for label, task in tests.items()},
        "loss": curve.points[-1]["loss"],
        "curve": curve.points,
        "state_size": model.state_size,
        "parameters": model.parameter_count,
        "steps": loop.step,
        "tokens": trainer.tokens,
        "seconds": round(curve.seconds, 3),
        "seconds_with_tests": round(time.perf_counter() - started, 3),
        "device": device.type,
        "graph": trainer.captures,
    }


class Curve(Callback):
    """Points of a training: the mean loss since the last one and, now and then, the score on the split validation."""

    def __init__(self, run: ProbeRun, trainer: Trainer, task: Task, report: Report) -> None:
        self.run, self.trainer, self.task, self.report = run, trainer, task, report
        self.data = held_out(task, run.validation_sequences, "validation", run.seed)
        self.judged = {max(1, round(run.steps * (i + 1) / run.evaluations)) for i in range(run.evaluations)}
        self.noted_at = self.judged | {max(1, round(run.steps * (i + 1) / POINTS)) for i in range(POINTS)}
        self.points: list[dict[str, Any]] = []
        self.score = math.nan
        self.total, self.count = np.float32(0), 0
        """Sum of the losses since the last point, in float32 as in stored results, and how many they are."""
        self.seconds = 0.0
        """Of training, without validations."""
        self.started = time.perf_counter()

    def settled(self, loop: Loop, step: Settled) -> None:
        self.total, self.count = self.total + np.float32(step.loss), self.count + 1

    def due(self, loop: Loop) -> bool:
        return loop.step in self.noted_at

    def after(self, loop: Loop) -> bool:
        if loop.step not in self.noted_at:
            return False
        loss = float(self.total) / self.count
        self.total, self.count = np.float32(0), 0
        self.seconds += time.perf_counter() - self.started
        seconds = round(self.seconds, 3)
        self.points.append({"step": loop.step, "tokens": self.trainer.tokens, "seconds": seconds, "loss": loss})
        if loop.step in self.judged:
            self.score = evaluate(self.trainer.model, self.task, self.data, self.trainer.autocast)
            self.points[-1]["score"] = self.score
        self.report(loop.step, loss)
        self.started = time.perf_counter()
        return self.run.stop_at is not None and self.score >= self.run.stop_at


class Trainer:
    """The steps of a probe for the training loop: a model with its optimizer; a GPU replays a step as a CUDA graph."""

    max_skips = 1

    def __init__(self, model: ProbeModel, run: ProbeRun, device: torch.device, batches: Iterator[Questions]) -> None:
        self.model, self.run, self.device, self.batches = model, run, device, batches
        self.steps, self.tokens = run.steps, 0
        on_gpu = device.type == "cuda"
        low = run.precision == "bfloat16"
        self.autocast: Callable[[], Any] = (lambda: torch.autocast(device.type, torch.bfloat16)) if low else nullcontext
        exempt = no_weight_decay(model)
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if name not in exempt], "weight_decay": run.weight_decay},
            {"params": [p for name, p in named if name in exempt], "weight_decay": 0.0},
        ]
        self.rate = torch.zeros((), device=device) if on_gpu else 0.0  # a graph reads it from the device
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.98), fused=on_gpu or None, capturable=on_gpu
        )
        self.graphs: dict[Any, _Graph | None] = {}
        """By the shapes of a batch; None: a batch of these shapes has been computed once."""
        self.captures = on_gpu
        """Whether steps are captured. False after a rule that reads values from the device could not be."""

    def draw(self, number: int) -> Step:
        started, batch = time.perf_counter(), next(self.batches)
        tokens = batch.inputs.shape[0] * batch.inputs.shape[1]
        self.tokens += tokens
        return Step(number, cast(Any, batch), tokens, started)

    def factor(self, number: int) -> float:
        return schedule(number - 1, self.steps, self.run.warmup)

    def compute(self, step: Step, factor: float, stopping: bool, update: bool) -> Tensor:
        """Loss, no stops, no faults, gradient norm `[4]`; with `update`, which a GPU asks for, also new weights.

        A gradient that is not finite shows in the next loss.
        """
        batch = cast(Questions, step.samples)
        try:
            if not update:
                return self.differentiate(batch)
            self.set_rate(factor)
            return self.whole_step(batch)
        except InvalidValueError as error:  # the engine's checks met a NaN before it could reach the loss
            raise FloatingPointError(f"the training diverged at step {step.number} of {self.steps}: {error}") from error

    def update(self, factor: float) -> None:
        self.set_rate(factor)
        self.optimizer.step()

    def set_rate(self, factor: float) -> None:
        rate = self.run.learning_rate * factor
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def whole_step(self, batch: Questions) -> Tensor:
        """Loss, gradients and update; a graph from the second batch of its shapes on."""
        shapes = tuple(x.shape for x in batch)
        graph = self.graphs.get(shapes)
        if graph is None and self.captures and shapes in self.graphs and len(self.graphs) <= SHAPES:
            try:
                graph = _Graph(self, batch)
            except RuntimeError:  # the rule waits for the device within a step
                self.captures = False
                torch.cuda.synchronize()
        self.graphs[shapes] = graph
        return self.launch(batch) if graph is None else graph.replay(batch)

    def launch(self, batch: Questions) -> Tensor:
        """`whole_step`, kernel by kernel."""
        numbers = self.differentiate(batch)
        self.optimizer.step()
        return numbers

    def differentiate(self, batch: Questions) -> Tensor:
        """The numbers of a batch, and its clipped gradients."""
        self.optimizer.zero_grad(set_to_none=self.device.type != "cuda")
        shared: dict[str, Tensor] = {}
        with self.autocast():
            loss = loss_of(self.model(batch.inputs, batch.asked, shared), batch.targets)
            if "balance_loss" in shared:
                loss = loss + shared["balance_loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        zero = torch.zeros_like(norm)
        return torch.stack([loss.detach(), zero, zero, norm])


class _Graph:
    """A training step that was captured for batches of certain shapes."""

    def __init__(self, trainer: Trainer, batch: Questions) -> None:
        self.batch = Questions(*(x.clone() for x in batch))
        self.numbers, self.graph = capture(lambda: trainer.launch(self.batch), self.batch.inputs.device)

    def replay(self, batch: Questions) -> Tensor:
        for held, new in zip(self.batch, batch, strict=True):
            held.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.numbers


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits `[M, answers]`, or mean squared error of numbers `[M, E]`, over what is asked."""
    if not targets.is_floating_point():
        return F.cross_entropy(outputs.float(), targets)  # ignores IGNORE
    there = ~targets.isnan()
    errors = torch.where(there, outputs.float() - torch.where(there, targets, 0.0), 0.0)
    return errors.square().sum() / there.sum()


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, data: list[Batch], autocast: Callable[[], Any] = nullcontext) -> float:
    """The mean score of sequences."""
    device = next(model.parameters()).device
    scores = []
    for batch in data:
        asked = Questions(*(x[0] for x in questions(batch)))
        with autocast():
            outputs = model(asked.inputs.to(device), asked.asked.to(device)).float()
        found = (outputs if asked.targets.is_floating_point() else outputs.argmax(-1)).cpu()
        real = is_asked(asked.targets)
        predictions = torch.zeros_like(batch.targets).flatten(0, 1)
        predictions[asked.asked[real]] = found[real].to(predictions.dtype)
        scores.append(task.score(predictions.view_as(batch.targets), batch.targets).double())
    return torch.cat(scores).mean().item()


def schedule(step: int, steps: int, warmup: float, floor: float = 0.05) -> float:
    """The learning rate of a step (from 0) as a share of its peak."""
    rise = max(1, int(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    progress = (step - rise) / max(1, steps - rise)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
