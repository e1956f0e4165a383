"""Train a model for any task: a run folder that a killed run resumes from, the training loop, and the final export."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_safetensors

from prism.device import warn_if_crowded
from prism.files import write_atomically
from prism.train import tensors
from prism.train.callbacks import Bar, Report, Sample, Save, Tell, Validate, WriteLog
from prism.train.checkpoint import Checkpoint, Checkpoints, NotFiniteError, checkpoint_at
from prism.train.distributed import joined, spread
from prism.train.export import write_export
from prism.train.graph import check_graph
from prism.train.loop import Callback, DivergedError, Loop
from prism.train.run import Log, open_run, store_settings
from prism.train.signals import StopRequest
from prism.train.step import Stepper
from prism.train.task import ShowsSamples, Task


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
            return _run(task, Stepper(task, world, model), folder, report)


def _run(task: Task, stepper: Stepper, folder: Path, report: Report | None) -> RunResult:
    settings, world = task.settings, stepper.world
    shown = world.main and report is None
    tensors.seed(settings.seed + 1 + world.rank)  # dropout masks differ between processes
    stepper.model.train()
    validate = Validate(stepper)
    checkpoints = Checkpoints(folder / "checkpoints", settings.checkpoint.keep, world)
    say = Bar(0, task, shown).say
    resumed = _resume(stepper, checkpoints, validate, folder, say)
    _advise(stepper, say)
    world.on_main(lambda: store_settings(task, folder))
    stepper.prepare()
    save = Save(stepper, checkpoints, validate, resumed)
    state = None if resumed is None else resumed.state
    step = 0 if state is None else state["step"]
    opened = Log(folder, step, settings.log.all_trackers) if world.main else nullcontext()
    with StopRequest() as stop, opened as log, Bar(step, task, shown) as bar:
        callbacks: list[Callback] = [] if log is None else [WriteLog(log, task)]
        callbacks += [bar, *([] if report is None else [Tell(report)]), validate]
        callbacks += [Sample(stepper, task)] if isinstance(task, ShowsSamples) else []
        loop = Loop(stepper, [*callbacks, save], lambda: stop.name is not None, state)
        if not validate.best.run_out:
            try:
                loop.run()
            except DivergedError as error:
                raise _explained(error, folder, world.rank, save.saved) from None
        stopped = loop.stopping and loop.step < settings.steps and not validate.best.run_out
        if stopped:
            bar.say(f"stopped at step {loop.step} and saved: the same command resumes from here")
        elif validate.best.run_out:
            bar.say(
                f"no improvement in {validate.best.patience} validations: the model is that of step {validate.best.step}"
            )
    best = validate.best.step
    model = None if stopped else world.on_main(lambda: _export(task, folder, save.saved, best))
    return RunResult(folder, loop.step, loop.skipped, loop.loss, validate.score, model, best, stopped)


def _resume(
    stepper: Stepper, checkpoints: Checkpoints, validate: Validate, folder: Path, say: Callable[[str], None]
) -> Checkpoint | None:
    """Continue from the newest good checkpoint; None if the run has none."""
    checkpoint = checkpoints.newest_good(say)
    if checkpoint is None:
        return None
    step = checkpoint.state["step"]
    if step > stepper.steps:
        raise ValueError(
            f"the run in {folder} is at step {step}, but steps is {stepper.steps}: "
            "raise --steps, or give another run folder with --out"
        )
    validate.best.restore(checkpoint.state)
    tensors.load(checkpoint.tensors, stepper.model, stepper.optimizers, stepper.world)
    random = checkpoint.rng(stepper.world.rank)
    if random is not None:
        tensors.restore(random, stepper.world.device)
    if step:  # a run may begin with a checkpoint of step 0, which resumes nothing
        say(f"resuming from {checkpoint.folder.name} in {folder}")
    return checkpoint


def _advise(stepper: Stepper, say: Callable[[str], None]) -> None:
    """Warn about settings that do not do what they seem to, and about a crowded CPU."""
    micro = stepper.settings.batch.micro
    if micro is not None and micro > stepper.share:
        say(f"batch.micro is {micro}, but a process has {stepper.share} sequences a step: all are computed at once")
    if stepper.world.main and stepper.device.type == "cpu":
        warn_if_crowded(say)


def _explained(error: DivergedError, folder: Path, rank: int, saved: Checkpoint | None) -> NotFiniteError:
    """Write the step's samples to a file; the error that says where it is and what there is to resume from."""
    path = folder / f"not-finite-step-{error.step.number:08d}-process-{rank}.safetensors"
    write_atomically(path, save_safetensors(error.step.samples.tensors()))
    kept = "no checkpoint was written yet" if saved is None else f"the last checkpoint is {saved.folder.name}"
    return NotFiniteError(f"{error}; the samples are in {path}, {kept}")


def _export(task: Task, folder: Path, saved: Checkpoint | None, best: int | None) -> Path:
    chosen = saved if best is None else checkpoint_at(folder / "checkpoints", best)
    assert chosen is not None
    return write_export(task.write_model, folder, chosen, folder / "model")
