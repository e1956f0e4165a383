"""The task of `prism train rec` and `Recommender.fit`: predict the next event of a user.

`train_rec` and `fit` start a run. `RecTask` is what the training loop calls. `SampleTable` makes its batches,
`RankingValidation` scores it on held-out events.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prism.engine.context import Context
from prism.messages import did_you_mean, say
from prism.overrides import override, to_plain
from prism.recommend.evaluate import rank_targets
from prism.recommend.events import Dataset, RecBatch, Samples, Split, prepare_dataset
from prism.recommend.events.columns import Columns
from prism.recommend.events.dataset import ITEMS, USERS
from prism.recommend.events.recipe import make_dataset
from prism.recommend.export import write_model
from prism.recommend.learner import Learner, build_recommender, make_loss
from prism.recommend.ranking import CUTOFFS, Ranking
from prism.recommend.settings import RecSettings, RecValidationSettings, preset
from prism.train import tensors
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World, whole
from prism.train.loop import Report, RunResult, train
from prism.train.model import check_stack, read_weights
from prism.train.order import Order
from prism.train.run import check_folder
from prism.train.task import ValidationResult

LOGGED = ("HR@10", "NDCG@10", "MRR@10")
METRICS = (*(f"{name}@{k}" for name in ("HR", "NDCG", "MRR") for k in CUTOFFS), "AUC")
SAMPLE_BYTES = 2 << 30
"""Largest table of samples that is kept; with more, each batch is made when it is needed."""


def train_rec(settings: RecSettings, dataset: Dataset | None = None, report: Report | None = None) -> RunResult:
    """Train a recommender, or resume a run. All bad input is refused before anything is written.

    Args:
        dataset: events to train on, instead of those that `settings.data` names.
        report: called with (step, loss) after every step; replaces the progress bar.
    """
    settings.check()
    check_folder(settings.out, settings.resume)
    check_stack(settings.model)
    weights = None if settings.model.weights is None else read_weights(settings.model.weights)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if dataset is None:
        data = settings.data
        dataset = prepare_dataset(data.recipe(), data.cache, data.verify and first, say)
    task = RecTask(settings, dataset, weights)
    if first:
        say("\n".join(dataset.summary()))
    return train(task, report)


def fit(
    events: Any, out: Path, preset_name: str | None, columns: Columns, settings: dict[str, Any]
) -> tuple[Path, Dataset, str]:
    """Train on a file or a DataFrame; see `Recommender.fit` for the arguments.

    Returns:
        The model's folder, the dataset and the device.
    """
    _check_arguments(settings)
    data = settings.get("data", {})
    if "source" in data:
        raise ValueError("data.source is the first argument of fit: leave it out of data")
    named_columns = {name: value for name, value in asdict(columns).items() if value != getattr(Columns, name)}
    for name in named_columns.keys() & data.keys():
        raise ValueError(
            f"fit got both {name}={named_columns[name]!r} and data[{name!r}]={data[name]!r}: give one of them"
        )
    is_path = isinstance(events, (str, Path))
    data = {**data, **named_columns, **({"source": str(events)} if is_path else {})}
    chosen = override(preset(preset_name), {**settings, "data": data, "out": str(out)}, "fit")
    check_folder(chosen.out, chosen.resume)
    recipe = chosen.data.recipe()
    dataset = prepare_dataset(recipe, chosen.data.cache) if is_path else make_dataset(recipe, events)
    outcome = train_rec(chosen, dataset)
    if outcome.model is None:
        raise ValueError(f"training was stopped after step {outcome.step}, before a model was written")
    return outcome.model, dataset, chosen.device


def _check_arguments(settings: dict[str, Any]) -> None:
    """Refuse names that are neither columns nor settings; a misspelt column must not be taken for a setting."""
    known = [part.name for part in fields(RecSettings)]
    columns = [part.name for part in fields(Columns)]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"fit has no argument {name}{did_you_mean(name, [*columns, *known], str)}: name columns with "
                f"{', '.join(columns)}; all else are the settings of `prism train rec`"
            )


class RecTask:
    """Next-event prediction as the loop sees it; `prism.train.task.Task` documents the methods."""

    name = "rec"
    unit = "events"

    def __init__(self, given: RecSettings, dataset: Dataset, weights: dict[str, Tensor] | None = None) -> None:
        self.given, self.dataset, self.weights = given, dataset, weights
        if given.model.time_gaps and dataset.histories.times is None:
            raise ValueError("model.time_gaps needs events with times: name their column with data.time")
        self.split = given.data.split_of(dataset.histories)
        self.counts = self.split.train.counts(dataset.num_items)
        self.loss_function = make_loss(given.loss, dataset.num_items, self.counts)
        samples = Samples(self.split.train, given.data.length, given.data.order)
        self.table = SampleTable(samples, given.seed, given.model.time_gaps)
        self.settings = given.for_samples(len(samples))
        self.validation = RankingValidation(self.split, given.validation, given.data.length)

    def build(self) -> Learner:
        return Learner(build_recommender(self.given, self.dataset.catalogue), self.loss_function)

    def initialize(self, model: nn.Module) -> None:
        assert isinstance(model, Learner)
        model.start(self.given.seed, self.weights, self.counts, self.dataset.catalogue)

    def identity(self) -> dict[str, Any]:
        given = self.given
        model = {f"model.{name}": value for name, value in to_plain(given.model).items()}
        for free in ("weights", "gradient_checkpointing"):
            del model[f"model.{free}"]
        split = {name: getattr(given.data, name) for name in ("split", "valid_from", "test_from", "length", "order")}
        return {
            **model,
            **{f"data.{name}": value for name, value in split.items()},
            "seed": given.seed,
            "batch.sequences": given.batch.sequences,
            "optimizer.name": given.optimizer.name,
            "events": self.dataset.digest,
        }

    def config(self) -> dict[str, Any]:
        histories = self.dataset.histories
        seen = {
            "digest": self.dataset.digest,
            "folder": None if self.dataset.folder is None else str(self.dataset.folder.resolve()),
            "users": len(histories),
            "items": self.dataset.num_items,
            "events": len(histories.items),
            "split": self.split.name,
            "cuts": self.split.cuts,
            **self.split.counts,
            "samples": len(self.table),
            "origin": self.dataset.manifest.get("origin", {}),
        }
        return {"settings": to_plain(self.given), "training_data": seen}

    def files(self) -> dict[str, bytes]:
        return {ITEMS: self.dataset.catalogue.to_bytes(), USERS: self.dataset.users.to_bytes()}

    def share_sequences(self, context: Context) -> None:
        raise ValueError(
            f"parallel.context is {context.size}, but prism train rec cannot share a history between processes: leave it at 1"
        )

    def samples(self, numbers: np.ndarray, device: torch.device) -> RecBatch:
        return self.table.batch(numbers, device)

    def weight(self, numbers: np.ndarray) -> int:
        return self.table.targets(numbers)

    def seen(self, step: int) -> dict[str, float]:
        return {"epoch": step * self.given.batch.sequences / len(self.table)}

    def loss(self, model: nn.Module, samples: RecBatch) -> Tensor:
        loss: Tensor = model(samples)
        return loss

    def validate(self, model: nn.Module, world: World, at_once: int) -> ValidationResult:
        assert isinstance(model, Learner)
        return self.validation.verdict(model, self.build, world)

    def write_model(self, run: Path, checkpoint: Checkpoint, folder: Path) -> None:
        write_model(run, checkpoint, folder)


class SampleTable:
    """Training samples in the endless order, padded once and kept on the device: a batch is then one gather.

    Args:
        gaps: whether batches include the time since the previous event.
        limit: bytes above which batches are made when they are needed.
    """

    def __init__(self, samples: Samples, seed: int, gaps: bool, limit: int = SAMPLE_BYTES) -> None:
        self.samples, self.gaps = samples, gaps
        self.order = Order(len(samples), seed)
        sample_bytes = samples.width * (8 + 8 + 1 + (4 if gaps else 0)) + 8
        self.fits = len(samples) * sample_bytes <= limit
        self._held: RecBatch | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def targets(self, numbers: np.ndarray) -> int:
        return self.samples.targets(self.order(numbers))

    def batch(self, numbers: np.ndarray, device: torch.device) -> RecBatch:
        rows = self.order(numbers)
        if not self.fits:
            return self._make(rows)
        if self._held is None:
            self._held = self._make(np.arange(len(self))).to(device)
        return self._held[torch.from_numpy(rows).to(device, non_blocking=True)]

    def _make(self, rows: np.ndarray) -> RecBatch:
        batch = self.samples.batch(rows)
        return batch if self.gaps else replace(batch, gaps=None)


class RankingValidation:
    """Rank held-out events among all items, in full precision. Processes share the events.

    Args:
        length: most events of a history that are read.
    """

    def __init__(self, split: Split, settings: RecValidationSettings, length: int) -> None:
        if settings.metric not in METRICS:
            raise ValueError(f"validation.metric must be one of {', '.join(METRICS)}, got {settings.metric!r}")
        count = min(settings.sequences or len(split.validation), len(split.validation))
        self.targets = split.validation.take(np.arange(count) * len(split.validation) // count)
        self.histories, self.settings, self.length = split.histories, settings, length

    def verdict(self, learner: Learner, build: Callable[[], nn.Module], world: World) -> ValidationResult:
        mine = self.targets.take(slice(world.rank, None, world.size))
        model = _unsharded(learner, build, world).recommender
        share = np.empty((2, 0), dtype=np.int64)  # for a process without targets
        if len(mine):
            filter_seen = self.settings.filter_seen
            # Ties count against the model, and half precision would create many.
            with torch.autocast(world.device.type, enabled=False):
                ranking = rank_targets(model, mine, self.histories, max_length=self.length, filter_seen=filter_seen)
            share = np.stack([ranking.ranks, ranking.candidates])
        shares = world.gather(share)
        found = Ranking(*np.concatenate(shares, axis=1)).metrics()
        shown = {name: found[name] for name in dict.fromkeys([self.settings.metric, *LOGGED])}
        text = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        record = {f"validation_{name}": value for name, value in shown.items()}
        return ValidationResult(found, found[self.settings.metric], record, text)


def _unsharded(learner: Learner, build: Callable[[], nn.Module], world: World) -> Learner:
    """The model, or a complete copy of it if it is sharded."""
    if world.parallel != "fsdp":
        return learner
    with torch.random.fork_rng(devices=[]):  # validation must not change the random numbers of training
        copy = build().to(world.device).eval()
    assert isinstance(copy, Learner)
    sources = tensors.model_tensors(learner)
    for name, target in tensors.model_tensors(copy).items():
        target.copy_(whole(sources[name]))
    return copy
