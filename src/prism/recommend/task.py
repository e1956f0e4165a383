"""The task of `prism train rec` and `Recommender.fit`: predict the next event of a user.

`train_rec` and `fit` start a run. `RecTask` is what the training loop calls. `SampleTable` makes its batches,
`RankingValidation` scores it on held-out events.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prism.engine.sequence_parallel import Context
from prism.messages import did_you_mean, say
from prism.overrides import override, to_plain
from prism.recommend.evaluate import rank_targets
from prism.recommend.events import Dataset, RecBatch, Samples, Split, open_dataset, prepare_dataset
from prism.recommend.events.columns import Columns
from prism.recommend.events.dataset import ITEMS, USERS
from prism.recommend.events.recipe import RecDataSettings, make_dataset
from prism.recommend.export import write_model
from prism.recommend.learner import Learner, build_recommender, make_loss
from prism.recommend.ranking import CUTOFFS, Ranking
from prism.recommend.settings import RecSettings, RecValidationSettings, preset
from prism.recommend.update import LOG, prepare_update, read_new_events, start_update, update_order, update_settings
from prism.train import tensors
from prism.train.callbacks import Report
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World, whole
from prism.train.model import check_stack, read_weights
from prism.train.order import Order, ReplayOrder
from prism.train.run import check_folder
from prism.train.task import ValidationResult
from prism.train.train import RunResult, train

LOGGED = ("HR@10", "NDCG@10", "MRR@10")
METRICS = (*(f"{name}@{k}" for name in ("HR", "NDCG", "MRR") for k in CUTOFFS), "AUC")
SAMPLE_BYTES = 2 << 30
"""Largest table of samples that is kept; with more, each batch is made when it is needed."""
SAMPLES_AT_ONCE = 1 << 15
"""Samples made at once for that table."""


def train_rec(
    settings: RecSettings,
    dataset: Dataset | None = None,
    report: Report | None = None,
    known: Dataset | None = None,
) -> RunResult:
    """Train a recommender, or resume a run. All bad input is refused before anything is written.

    Args:
        dataset: events to train on (with `update`: the new events), instead of those that `settings.data` names.
        report: called with (step, loss) after every step; replaces the progress bar.
        known: with `update`, events that may be those of the old training; used if they are.
    """
    settings.check()
    check_folder(settings.out, settings.resume)
    check_stack(settings.model)
    weights = None if settings.model.weights is None else read_weights(settings.model.weights)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if settings.update is not None:
        update = prepare_update(settings, settings.update, dataset, known)
        task = RecTask(settings, update.dataset, learned=update.learned, marks=update.marks)
        if first:
            start_update(task, update)
    else:
        if dataset is None:
            data = settings.data
            dataset = prepare_dataset(data.recipe(), data.cache, data.verify and first, say)
        task = RecTask(settings, dataset, weights)
    if first:
        say("\n".join(task.dataset.summary()))
    return train(task, report)


def fit(
    events: Any,
    out: Path,
    preset_name: str | None,
    columns: Columns,
    settings: dict[str, Any],
    tables: dict[str, Any] | None = None,
) -> tuple[Path, Dataset, str]:
    """Train on a file or a DataFrame; see `Recommender.fit` for the arguments.

    Args:
        tables: items, users and item_vectors; None for those that are not given.

    Returns:
        The model's folder, the dataset and the device.
    """
    _check_arguments(settings)
    data = settings.get("data", {})
    if "source" in data:
        raise ValueError("data.source is the first argument of fit: leave it out of data")
    tables = {name: table for name, table in (tables or {}).items() if table is not None}
    named = {name: value for name, value in asdict(columns).items() if value != getattr(Columns, name)}
    for name in (named.keys() | tables.keys()) & data.keys():
        value = named.get(name, "…")
        raise ValueError(f"fit got both {name}={value!r} and data[{name!r}]={data[name]!r}: give one of them")
    is_path = isinstance(events, (str, Path))
    named |= {name: str(table) for name, table in tables.items() if isinstance(table, (str, Path))}
    in_memory = {name: table for name, table in tables.items() if name not in named}
    data = {**data, **named, **({"source": str(events)} if is_path else {})}
    chosen = override(preset(preset_name), {**settings, "data": data, "out": str(out)}, "fit")
    check_folder(chosen.out, chosen.resume)
    outcome = train_rec(chosen, dataset := read_dataset(chosen.data, events, in_memory))
    if outcome.model is None:
        raise ValueError(f"training was stopped after step {outcome.step}, before a model was written")
    return outcome.model, dataset, chosen.device


def fit_update(
    base: Path,
    events: Any,
    out: Path,
    settings: dict[str, Any],
    tables: dict[str, Any],
    known: Dataset | None = None,
) -> tuple[Path, Dataset, str]:
    """Continue a recommender with a file or a DataFrame of new events; see `Recommender.update` for the arguments.

    Args:
        base: a run or a saved recommender.
        known: events that may be those of its training; used if they are.

    Returns:
        The model's folder, the dataset of all events and the device.
    """
    _check_arguments(settings)
    data, is_path = settings.get("data", {}), isinstance(events, (str, Path))
    tables = {name: table for name, table in tables.items() if table is not None}
    files = {name: str(table) for name, table in tables.items() if isinstance(table, (str, Path))}
    data = {**data, **files, **({"source": str(events)} if is_path else {})}
    changes = {**settings, "data": data, "out": str(out), "update": str(base.resolve())}
    chosen = override(update_settings(base), changes, "update")
    check_folder(chosen.out, chosen.resume)
    in_memory = {name: table for name, table in tables.items() if name not in files}
    new = read_new_events(chosen, events, in_memory)
    outcome = train_rec(chosen, new, known=known)
    if outcome.model is None:
        raise ValueError(f"training was stopped after step {outcome.step}, before a model was written")
    return outcome.model, open_dataset(out / LOG), chosen.device


def read_dataset(data: RecDataSettings, events: Any, in_memory: dict[str, Any]) -> Dataset:
    """The dataset of a file or a DataFrame and of tables, which is cached if all of them are files."""
    if isinstance(events, (str, Path)) and not in_memory:
        return prepare_dataset(data.recipe(), data.cache)
    if isinstance(events, (str, Path)) and Path(events).expanduser().is_dir():
        raise ValueError(f"{events} is a folder: give {min(in_memory)} as a file, not in memory")
    from prism.recommend.events.features import Tables  # imports polars

    return make_dataset(data.recipe(), events, Tables(**in_memory))


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

    def __init__(
        self,
        given: RecSettings,
        dataset: Dataset,
        weights: dict[str, Tensor] | None = None,
        learned: np.ndarray | None = None,
        marks: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare split, samples and validation.

        Args:
            learned: for an update, events of each user that the model has already learned from, int64 `[U]`.
            marks: further entries of the identity.
        """
        self.given, self.dataset, self.weights, self.marks = given, dataset, weights, marks or {}
        if given.model.time_gaps and dataset.histories.times is None:
            raise ValueError("model.time_gaps needs events with times: name their column with data.time")
        self.split = given.data.split_of(dataset.histories)
        self.counts = self.split.train.counts(dataset.num_items)
        self.loss_function = make_loss(given.loss, dataset.num_items, self.counts)
        samples = Samples(self.split.train, given.data.length, given.data.order)
        order = None if learned is None else update_order(samples, learned, given.replay, given.seed)
        self.table = SampleTable(samples, given.seed, given.model.time_gaps, order=order)
        self.settings = given.for_samples(len(self.table))
        self.validation = RankingValidation(self.split, given.validation, given.data.length)

    def build(self) -> Learner:
        return Learner(build_recommender(self.given, self.dataset.catalogue, self.dataset.users), self.loss_function)

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
            **self.marks,
            **model,
            **{f"data.{name}": value for name, value in split.items()},
            "seed": given.seed,
            "batch.sequences": given.batch.sequences,
            "optimizer.name": given.optimizer.name,
            "events": self.dataset.digest,
            **({} if given.update is None else {"replay": given.replay}),
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
            "dates": self.dataset.manifest.get("dates"),
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
        order: another endless order of the samples.
    """

    def __init__(
        self,
        samples: Samples,
        seed: int,
        gaps: bool,
        limit: int = SAMPLE_BYTES,
        order: Order | ReplayOrder | None = None,
    ) -> None:
        self.samples, self.gaps = samples, gaps
        self.order = Order(len(samples), seed) if order is None else order
        sample_bytes = samples.width * (8 + 8 + 1 + (4 if gaps else 0)) + 8
        self.fits = len(samples) * sample_bytes <= limit
        self._held: RecBatch | None = None

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self.order.sequences

    def targets(self, numbers: np.ndarray) -> int:
        return self.samples.targets(self.order(numbers))

    def batch(self, numbers: np.ndarray, device: torch.device) -> RecBatch:
        rows = self.order(numbers)
        if not self.fits:
            return self._make(rows)
        if self._held is None:
            self._held = self._make_all(device)
        return self._held[torch.from_numpy(rows).to(device, non_blocking=True)]

    def _make_all(self, device: torch.device) -> RecBatch:
        """All samples on the device, made in slices: whole temporary arrays would take several times the memory."""
        held: dict[str, Tensor] = {}
        for start in range(0, len(self.samples), SAMPLES_AT_ONCE):
            rows = np.arange(start, min(start + SAMPLES_AT_ONCE, len(self.samples)))
            for name, part in self._make(rows).tensors().items():
                if not start:
                    held[name] = torch.empty(len(self.samples), *part.shape[1:], dtype=part.dtype, device=device)
                held[name][start : start + len(rows)] = part
        return RecBatch(**{"gaps": None, **held})  # type: ignore[arg-type]  # the fields of a batch by name

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
