"""A training step reads from the device in one place, `loop.read`; nothing else in it may wait.

On the CPU the step runs on the meta device, whose tensors have no values: whatever would read one fails. On a GPU torch
itself raises where a call waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prism.language.corpus import prepare
from prism.language.model import build_model
from prism.language.task import LanguageTask
from prism.language.tokens import Batch
from prism.overrides import override
from prism.recommend.events import prepare_dataset
from prism.recommend.settings import RecSettings
from prism.recommend.task import RecTask
from prism.train import loop
from prism.train.distributed import World, parallel_forward, spread
from prism.train.optimizer import Optimizers
from prism.train.progress import StopRequest
from prism.train.task import Task
from tests.train.runs import small

LANGUAGE = ("prism*2", "gla+softmax", "mamba2+rwkv7", "mom+sliding_window")
LOSSES: tuple[dict[str, Any], ...] = (
    {"name": "full_softmax"},
    {"name": "sampled_softmax", "negatives": "popularity", "count": 30},
    {"name": "gbce", "count": 30},
    {"name": "bce", "negatives": "in_batch", "count": 30, "own": True},
)


def language_task(root: Path, layers: str, optimizer: str = "adamw") -> LanguageTask:
    """In micro-batches, of which some have document starts and some have none."""
    model = {"layers": layers, "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 2}
    changes = {"model": model, "batch": {"sequences": 4, "micro": 1}, "optimizer": {"name": optimizer}}
    settings = small(root, **changes)
    return LanguageTask(settings, prepare(settings.data.recipe(), settings.data.cache), None, build_model)


def recommender_task(root: Path, loss: dict[str, Any]) -> RecTask:
    changes = {
        "out": str(root / "run"),
        "steps": 24,
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "dropout": 0.1, "time_gaps": True},
        "data": {"cache": str(root / "cache"), "length": 12, "synthetic": {"users": 60, "items": 120, "events": 1500}},
        "batch": {"sequences": 8, "micro": 4},
        "loss": loss,
    }
    settings = override(RecSettings(), changes, "test")
    return RecTask(settings, prepare_dataset(settings.data.recipe(), settings.data.cache, False, lambda _: None))


def stepper(task: Task, device: torch.device, folder: Path) -> Callable[[], Any]:
    """A function that makes the next training step."""
    world = World(device)
    model = spread(task.build, task.initialize, world).train()
    run = loop._Run(task, world, model, folder, lambda *_: None)
    run.forward = parallel_forward(model, world)

    def step() -> Any:
        run.step += 1
        first = (run.step - 1) * task.settings.batch.sequences
        return run.update(task.weight(np.arange(first, first + task.settings.batch.sequences)), StopRequest())

    return step


def without_values(task: Task, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, updates = [], []
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know the meta device
    monkeypatch.setattr(loop, "read", lambda numbers: reads.append(len(numbers)) or [1.0, 0.0, 1.0])
    plain = Optimizers.step
    monkeypatch.setattr(Optimizers, "step", lambda *arguments: updates.append(plain(*arguments)))
    step = stepper(task, torch.device("meta"), folder)
    for _ in range(2):
        step()
    assert reads == [3, 3] and len(updates) == 2


@pytest.mark.parametrize("layers", LANGUAGE)
def test_a_language_step_needs_no_value_but_loss_and_norm(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_values(language_task(tmp_path, layers), tmp_path, monkeypatch)


def test_a_step_with_muon_needs_no_value_but_loss_and_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_values(language_task(tmp_path, "prism", "muon"), tmp_path, monkeypatch)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
def test_a_recommender_step_needs_no_value_but_loss_and_norm(
    loss: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_values(recommender_task(tmp_path, loss), tmp_path, monkeypatch)


def test_a_reset_that_changes_nothing_stays_behind() -> None:
    """Decided on the CPU for each micro-batch, so that the model need not ask the device."""
    x = torch.zeros(3, 4, dtype=torch.long)
    reset = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    batch, cpu = Batch(x, x, reset), torch.device("cpu")
    assert torch.equal(batch.to(cpu).reset, reset)
    assert [batch[row : row + 1].to(cpu).reset is None for row in range(3)] == [True, False, True]


def on_a_gpu(task: Task, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, reads = loop.read, []

    def read(numbers: Sequence[Tensor]) -> list[float]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        reads.append(plain(numbers))
        torch.cuda.set_sync_debug_mode(before)
        return reads[-1]

    monkeypatch.setattr(loop, "read", read)
    step = stepper(task, torch.device("cuda", torch.cuda.current_device()), folder)
    for _ in range(2):  # kernels are compiled, tables moved, optimiser states made
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(reads) == 3 and np.isfinite(reads).all()


@pytest.mark.gpu
@pytest.mark.parametrize("layers", LANGUAGE)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_language_step_does_not_wait_for_a_gpu(
    layers: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(language_task(tmp_path, layers, optimizer), tmp_path, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
def test_a_recommender_step_does_not_wait_for_a_gpu(
    loss: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(recommender_task(tmp_path, loss), tmp_path, monkeypatch)
