"""How well a recommender ranks what was held out to validate on: among all items, in full precision."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prism.messages import say
from prism.overrides import to_plain
from prism.recommend.evaluate import rank_targets
from prism.recommend.events import Prepared, RecBatch, Samples, Split, prepare_log
from prism.recommend.events.dataset import ITEMS, USERS
from prism.recommend.export import write_model
from prism.recommend.learner import Learner, build_recommender, make_loss
from prism.recommend.ranking import CUTOFFS, Ranking
from prism.recommend.sample_table import SampleTable
from prism.recommend.settings import RecSettings, RecValidationSettings
from prism.train import tensors
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World, whole
from prism.train.loop import Report, RunResult, train
from prism.train.model import check_stack, read_weights
from prism.train.run import check_folder
from prism.train.task import ValidationResult

LOGGED = ("HR@10", "NDCG@10", "MRR@10")
METRICS = (*(f"{name}@{k}" for name in ("HR", "NDCG", "MRR") for k in CUTOFFS), "AUC")


class RankingValidation:
    """Several processes share the held-out events.

    Args:
        length: how many events of a history are read.
    """

    def __init__(self, split: Split, settings: RecValidationSettings, length: int) -> None:
        if settings.metric not in METRICS:
            raise ValueError(f"validation.metric must be one of {', '.join(METRICS)}, got {settings.metric!r}")
        count = min(settings.sequences or len(split.validation), len(split.validation))
        self.targets = split.validation.take(np.arange(count) * len(split.validation) // count)
        self.histories, self.settings, self.length = split.histories, settings, length

    def verdict(self, learner: Learner, build: Callable[[], nn.Module], world: World) -> ValidationResult:
        mine = self.targets.take(slice(world.rank, None, world.size))
        model = _all_of(learner, build, world).recommender
        share = np.empty((2, 0), dtype=np.int64)  # of a process that has nothing to rank
        if len(mine):
            filter_seen = self.settings.filter_seen
            # Ties count against a model, and half precision would make many.
            with torch.autocast(world.device.type, enabled=False):
                ranking = rank_targets(model, mine, self.histories, max_length=self.length, filter_seen=filter_seen)
            share = np.stack([ranking.ranks, ranking.candidates])
        shares = world.gather(share)
        found = Ranking(*np.concatenate(shares, axis=1)).metrics()
        shown = {name: found[name] for name in dict.fromkeys([self.settings.metric, *LOGGED])}
        text = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        record = {f"validation_{name}": value for name, value in shown.items()}
        return ValidationResult(found, found[self.settings.metric], record, text)


def _all_of(learner: Learner, build: Callable[[], nn.Module], world: World) -> Learner:
    """The model itself, or if it is sharded, a whole one with its weights."""
    if world.parallel != "fsdp":
        return learner
    with torch.random.fork_rng(devices=[]):  # what training draws next must not depend on who looks
        copy = build().to(world.device).eval()
    assert isinstance(copy, Learner)
    sources = tensors.model_tensors(learner)
    for name, target in tensors.model_tensors(copy).items():
        target.copy_(whole(sources[name]))
    return copy


# The task of `prism train rec`: predict the next event of a user.


def train_rec(settings: RecSettings, log: Prepared | None = None, report: Report | None = None) -> RunResult:
    """Train, or go on training, a recommender. All bad input is refused before anything is written.

    Args:
        log: what to learn from, instead of what `settings.data` names.
        report: is told step and loss after every step; there is no bar then.
    """
    settings.check()
    check_folder(settings.out, settings.resume)
    check_stack(settings.model)
    weights = None if settings.model.weights is None else read_weights(settings.model.weights)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if log is None:
        data = settings.data
        log = prepare_log(data.recipe(), data.cache, data.verify and first, say)
    task = RecTask(settings, log, weights)
    if first:
        say("\n".join(log.summary()))
    return train(task, report)


class RecTask:
    """Stretches of histories; see `Task` for what each method means."""

    name = "rec"
    unit = "events"

    def __init__(self, given: RecSettings, log: Prepared, weights: dict[str, Tensor] | None = None) -> None:
        self.given, self.log, self.weights = given, log, weights
        if given.model.time_gaps and log.histories.times is None:
            raise ValueError("model.time_gaps needs a log with times: name their column with data.time")
        self.split = given.data.split_of(log.histories)
        self.counts = self.split.train.counts(log.num_items)
        self.loss_function = make_loss(given.loss, log.num_items, self.counts)
        samples = Samples(self.split.train, given.data.length, given.data.order)
        self.table = SampleTable(samples, given.seed, given.model.time_gaps)
        self.settings = given.for_samples(len(samples))
        self.validation = RankingValidation(self.split, given.validation, given.data.length)

    def build(self) -> Learner:
        return Learner(build_recommender(self.given, self.log.catalogue), self.loss_function)

    def initialize(self, model: nn.Module) -> None:
        assert isinstance(model, Learner)
        model.start(self.given.seed, self.weights, self.counts, self.log.catalogue)

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
            "events": self.log.digest,
        }

    def config(self) -> dict[str, Any]:
        histories = self.log.histories
        seen = {
            "digest": self.log.digest,
            "folder": None if self.log.folder is None else str(self.log.folder.resolve()),
            "users": len(histories),
            "items": self.log.num_items,
            "events": len(histories.items),
            "split": self.split.name,
            "cuts": self.split.cuts,
            **self.split.counts,
            "samples": len(self.table),
        }
        return {"settings": to_plain(self.given), "training_data": seen}

    def files(self) -> dict[str, bytes]:
        return {ITEMS: self.log.catalogue.to_bytes(), USERS: self.log.users.to_bytes()}

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
