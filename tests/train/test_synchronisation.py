"""No part of a training step waits for the device, the optimizer's update included.

On the CPU the step runs on the meta device, whose tensors have no values: reading one raises. On a GPU torch itself
raises where a call waits.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prism.language.corpus import prepare
from prism.language.model import build_model
from prism.language.task import LanguageTask, train_lm
from prism.language.tokens import Batch
from prism.overrides import override
from prism.recommend.events import prepare_dataset
from prism.recommend.settings import RecSettings
from prism.recommend.task import RecTask
from prism.train import loop
from prism.train.callbacks import Tell
from prism.train.distributed import World, spread
from prism.train.loop import HostCopy
from prism.train.optimizer import Optimizers
from prism.train.step import Stepper
from prism.train.task import Task
from tests.train.runs import small
from tests.train.standin import Poisoned

LANGUAGE = ("prism*2", "gla+softmax", "mamba2+rwkv7", "mom+sliding_window")
LOSSES: tuple[dict[str, Any], ...] = (
    {"name": "full_softmax"},
    {"name": "sampled_softmax", "negatives": "popularity", "count": 30},
    {"name": "gbce", "count": 30},
    {"name": "bce", "negatives": "in_batch", "count": 30, "own": True},
)


def language_task(root: Path, layers: str, optimizer: str = "adamw", micro: int = 1) -> LanguageTask:
    """In micro-batches, of which some have document starts and some have none."""
    model = {"layers": layers, "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 2}
    changes = {"model": model, "batch": {"sequences": 4, "micro": micro}, "optimizer": {"name": optimizer}}
    settings = small(root, **changes)
    return LanguageTask(settings, prepare(settings.data.recipe(), settings.data.cache), None, build_model)


def recommender_task(root: Path, loss: dict[str, Any], optimizer: str = "adamw") -> RecTask:
    changes = {
        "out": str(root / "run"),
        "steps": 24,
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "dropout": 0.1, "time_gaps": True},
        "data": {"cache": str(root / "cache"), "length": 12, "synthetic": {"users": 60, "items": 120, "events": 1500}},
        "batch": {"sequences": 8, "micro": 4},
        "loss": loss,
        "optimizer": {"name": optimizer},
    }
    settings = override(RecSettings(), changes, "test")
    return RecTask(settings, prepare_dataset(settings.data.recipe(), settings.data.cache, False, lambda _: None))


def make_loop(task: Task, device: torch.device, *callbacks: loop.Callback) -> tuple[Stepper, loop.Loop]:
    """The steps of a task, ready for the first, without a run folder."""
    world = World(device)
    stepper = Stepper(task, world, spread(task.build, task.initialize, world).train())
    stepper.prepare()
    return stepper, loop.Loop(stepper, callbacks)


def without_values(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three whole steps, the update included, on tensors that have no values: the host reads one step late."""
    seen: list[str] = []

    class NoValues:
        def __init__(self, numbers: Tensor) -> None:
            assert numbers.is_meta and numbers.shape == (4,)
            seen.append("queue")

        def read(self) -> list[float]:
            seen.append("read")
            return [1.0, 0.0, 0.0, 1.0]

    plain = Optimizers.step

    def update(optimizers: Optimizers, factor: float, skip: Tensor | None = None) -> None:
        assert skip is not None and skip.is_meta and skip.shape == ()
        plain(optimizers, factor, skip)
        seen.append("update")

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know the meta device
    adam = sys.modules["torch.optim.adam"]  # torch.optim hides it
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda _: None)  # nor does this
    monkeypatch.setattr(loop, "decides_on_device", lambda _: True)
    monkeypatch.setattr(loop, "HostCopy", NoValues)
    monkeypatch.setattr(Optimizers, "step", update)
    stepper, run = make_loop(task, torch.device("meta"))
    for group in stepper.optimizers.all[0].param_groups:
        group["fused"] = True
    for _ in range(3):
        run.advance()
    assert seen == ["update", "queue", "update", "queue", "read", "update", "queue", "read"]


@pytest.mark.parametrize("layers", LANGUAGE)
def test_a_language_step_needs_no_value_from_the_device(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_values(language_task(tmp_path, layers), monkeypatch)


def test_a_step_with_muon_needs_no_value_from_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_values(language_task(tmp_path, "prism", "muon"), monkeypatch)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
def test_a_recommender_step_needs_no_value_from_the_device(
    loss: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_values(recommender_task(tmp_path, loss), monkeypatch)


def test_a_reset_that_changes_nothing_stays_behind() -> None:
    """Decided on the CPU for each micro-batch, so that the model need not ask the device."""
    x = torch.zeros(3, 4, dtype=torch.long)
    reset = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    batch, cpu = Batch(x, x, reset), torch.device("cpu")
    assert torch.equal(batch.to(cpu).reset, reset)
    assert [batch[row : row + 1].to(cpu).reset is None for row in range(3)] == [True, False, True]


def on_a_gpu(task: Task) -> None:
    """Several whole steps in which torch raises where the host would wait for the device; one has a NaN."""
    losses: list[tuple[int, float]] = []
    report = Tell(lambda *values: losses.append(values))
    stepper, run = make_loop(task, torch.device("cuda", torch.cuda.current_device()), report)
    for _ in range(2):  # kernels are compiled, tables moved, optimizer states made
        run.advance()
    plain = task.loss
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.advance()
        task.loss = lambda *arguments: plain(*arguments) * math.nan
        run.advance()
        task.loss = plain
        run.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.settle()
    assert [number for number, _ in losses] == [1, 2, 3, 4, 5] and run.skipped == 1
    assert [number for number, loss in losses if not math.isfinite(loss)] == [4]
    assert all(bool(parameter.isfinite().all()) for parameter in stepper.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("layers", LANGUAGE)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_language_step_does_not_wait_for_a_gpu(layers: str, optimizer: str, tmp_path: Path) -> None:
    on_a_gpu(language_task(tmp_path, layers, optimizer))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
def test_a_recommender_step_does_not_wait_for_a_gpu(loss: dict[str, Any], optimizer: str, tmp_path: Path) -> None:
    on_a_gpu(recommender_task(tmp_path, loss, optimizer))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gpu_decides_as_the_host_does(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 3 and 4 are not finite: the same losses and weights whether the host reads each step at once or one late."""
    losses, weights = [], []
    for on_device in (False, True):
        monkeypatch.setattr(loop, "decides_on_device", lambda _, on_device=on_device: on_device)
        settings = small(
            tmp_path / str(on_device), device="cuda", steps=8, precision="fp32", optimizer={"name": optimizer}
        )
        reported: list[float] = []
        build = lambda *_: Poisoned("gradient", length=2, first=3)  # noqa: E731
        result = train_lm(settings, build, lambda _, loss, reported=reported: reported.append(loss))
        assert result.skipped == 2 and result.model is not None
        losses.append(reported)
        weights.append(load_file(result.model / "model.safetensors"))
    # An update too many or too few changes weights by the learning rate, 0.01.
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_the_host_queues_a_step_while_the_gpu_is_busy(tmp_path: Path) -> None:
    """Torch's own check does not see every wait (copies from pageable memory, events): here the GPU is still busy."""
    # One micro-batch: CUDA queues about a thousand launches, and then makes the host wait whatever it asks for.
    task = language_task(tmp_path, "prism", micro=4)
    _, run = make_loop(task, torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):  # loads every kernel
        run.advance()
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * 10**9)  # cycles: about two seconds
    run.advance()
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    run.settle()
    assert run.skipped == 0 and run.loss is not None


@pytest.mark.gpu
def test_reading_numbers_does_not_wait_for_later_work() -> None:
    numbers = HostCopy(torch.arange(4, dtype=torch.float64, device="cuda"))
    torch.cuda._sleep(4 * 10**9)
    assert numbers.read() == [0, 1, 2, 3] and not torch.cuda.current_stream().query()
