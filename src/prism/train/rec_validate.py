"""How well a recommender ranks what was held out to validate on: among all items, in full precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from prism.data.interactions import Split
from prism.evaluate.ranking import CUTOFFS, Ranking
from prism.evaluate.recommendation import rank_targets
from prism.train import tensors
from prism.train.distributed import World, whole
from prism.train.rec_model import Learner
from prism.train.rec_settings import RecValidationSettings
from prism.train.task import Verdict

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

    def verdict(self, learner: Learner, build: Callable[[], nn.Module], world: World) -> Verdict:
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
        return Verdict(found, found[self.settings.metric], record, text)


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
