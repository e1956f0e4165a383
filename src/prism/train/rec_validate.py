"""How well a recommender ranks what was held out to validate on: among all items, in full precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from prism.data.interactions import Histories, Split, Targets
from prism.evaluate.ranking import CUTOFFS, Ranking
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
        training = learner.training
        learner.eval()
        # Ties count against a model, and half precision would make many.
        with torch.no_grad(), torch.autocast(world.device.type, enabled=False):
            ranking = rank_targets(
                _all_of(learner, build, world).recommender,
                mine,
                self.histories,
                max_length=self.length,
                filter_seen=self.settings.filter_seen,
            )
        learner.train(training)
        shares = world.gather((ranking.ranks, ranking.candidates))
        found = Ranking(*(np.concatenate(part) for part in zip(*shares, strict=True))).metrics()
        shown = {name: found[name] for name in dict.fromkeys([self.settings.metric, *LOGGED])}
        text = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        record = {f"validation_{name}": value for name, value in shown.items()}
        return Verdict(found, found[self.settings.metric], record, text)


def _all_of(learner: Learner, build: Callable[[], nn.Module], world: World) -> Learner:
    """The model itself, or if it is sharded, a whole one with its weights."""
    if world.parallel != "fsdp":
        return learner
    copy = build().to(world.device).eval()
    assert isinstance(copy, Learner)
    sources = tensors.model_tensors(learner)
    for name, target in tensors.model_tensors(copy).items():
        target.copy_(whole(sources[name]))
    return copy


def rank_targets(
    model: Any, targets: Targets, histories: Histories, *, max_length: int, filter_seen: bool = True, batch: int = 512
) -> Ranking:
    """Interim."""
    from prism.data.interactions.samples import contexts
    from prism.evaluate.ranking import candidates, ranks

    device = next(model.parameters()).device
    all_ranks, all_counts = [], []
    for start in range(0, len(targets), batch):
        part = targets.take(slice(start, start + batch))
        rows = contexts(histories, part.users, part.ends, max_length)
        items = torch.from_numpy(rows.items).to(device)
        gaps = None if rows.gaps is None or not model.config.time_gaps else torch.from_numpy(rows.gaps).to(device)
        last = torch.from_numpy(rows.mask.sum(1) - 1).to(device)
        hidden = model(items, gaps=gaps).hidden
        scores = model.scores(hidden[torch.arange(len(last), device=device), last])
        wanted = torch.from_numpy(part.items).to(device)
        exclude = None
        if filter_seen:
            exclude = torch.from_numpy(contexts(histories, part.users, part.ends, int(part.ends.max())).items).to(
                device
            )
        taking = candidates(scores.shape[1] - 1, wanted, exclude)
        all_ranks.append(ranks(scores, wanted, taking_part=taking).cpu().numpy())
        all_counts.append(taking.sum(1).cpu().numpy())
    return Ranking(np.concatenate(all_ranks), np.concatenate(all_counts))
