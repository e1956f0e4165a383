"""Popular items for everyone: of all training events, or of the last ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prism.recommend.baselines.base import Baseline, SetsOfItems
from prism.recommend.events.histories import Histories


class Popular(Baseline):
    """The score of an item is its number of events; ties count against the target, as everywhere."""

    name = "popular"

    def fit(self, train: Histories, num_items: int, seed: int = 0) -> None:
        self.counts = torch.from_numpy(train.counts(num_items)).float()

    def score(self, sets: SetsOfItems) -> Tensor:
        return self.counts.repeat(sets.count, 1)


class RecentPopular(Popular):
    """The number of events among the last ones.

    Args:
        share: fraction of the training events, the latest by time.
    """

    name = "recent_popular"

    def __init__(self, share: float = 0.1) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"recent_popular: share must be above 0 and at most 1, got {share}")
        self.share = share

    def fit(self, train: Histories, num_items: int, seed: int = 0) -> None:
        if train.times is None:
            raise ValueError(
                "recent_popular needs events with times: leave it out, or name their column with data.time"
            )
        recent = train.items[train.times >= np.quantile(train.times, 1 - self.share, method="lower")]
        # an item without recent events is not worth less than another: all its events break the tie
        tie = train.counts(num_items) / (1 + len(train.items))
        self.counts = torch.from_numpy(np.bincount(recent, minlength=num_items + 1) + tie).float()
