"""Recommendations: the k best items for each user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prism.models import PrismForRecommendation
from prism.recommend.events import Catalogue
from prism.recommend.ranking import SCORES_AT_ONCE


class Recommended(NamedTuple):
    """One recommended item."""

    item: Any
    """The item's id, as in the events."""
    score: float


@dataclass(frozen=True)
class Recommendations:
    """The best items for n users, best first.

    `rows` int64 (rows of the catalogue) and `scores` float32, both `[n, k]`, are for further computation; row 0 where fewer
    than k items were left. `recommendations[i]` and iteration give user i's items with their ids.
    """

    rows: np.ndarray
    scores: np.ndarray
    catalogue: Catalogue

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Recommended]:
        found = self.rows[index] > 0
        names = self.catalogue.names(self.rows[index][found])
        return [Recommended(*pair) for pair in zip(names, self.scores[index][found].tolist(), strict=True)]

    def __iter__(self) -> Iterator[list[Recommended]]:
        return (self[index] for index in range(len(self)))

    @property
    def items(self) -> list[list[Any]]:
        """The ids without the scores, a list for each user."""
        return [[item for item, _ in row] for row in self]

    def __repr__(self) -> str:
        shown = [f"  {', '.join(f'{item} ({score:.3f})' for item, score in self[i])}" for i in range(min(5, len(self)))]
        more = [f"  … and {len(self) - 5:,} more"] if len(self) > 5 else []
        return "\n".join([f"Recommendations for {len(self):,}, best first:", *shown, *more])


def best_items(
    model: PrismForRecommendation,
    catalogue: Catalogue,
    hidden: Tensor,
    events: Tensor,
    excluded: list[np.ndarray],
    k: int,
) -> Recommendations:
    """Score all items and return the k best for each of n users.

    Args:
        hidden: `[n, D]`, the model's output after each user's last event.
        events: `[n]`, number of events of each user; a user without events gets the most popular items.
        excluded: for each user, rows of the catalogue to leave out.
    """
    width = min(k, model.config.num_items)
    rows, scores = np.zeros((len(hidden), width), dtype=np.int64), np.zeros((len(hidden), width), dtype=np.float32)
    step = max(1, SCORES_AT_ONCE // (model.config.num_items + 1))
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        all_scores = item_scores(model, hidden[part], events[part])
        allowed = torch.ones_like(all_scores, dtype=torch.bool)
        allowed.scatter_(1, torch.from_numpy(_padded(excluded[part])).to(hidden.device), False)
        allowed[:, 0] = False
        best = top_k(all_scores, allowed, k)
        rows[part], scores[part] = best.cpu().numpy(), all_scores.gather(1, best).cpu().numpy()
    return Recommendations(rows, scores, catalogue)


def item_scores(model: PrismForRecommendation, hidden: Tensor, events: Tensor) -> Tensor:
    """Scores of all items, `[n, N + 1]`, for `hidden` `[n, D]`; by popularity for users without events."""
    scores = model.scores(hidden)
    if bool((events > 0).all()):
        return scores
    if not bool(model.item_counts.any()):
        raise ValueError(
            "a user without events gets the most popular items, but the model has no item counts: call describe_items"
        )
    counts = model.item_counts.float()
    return torch.where((events > 0)[:, None], scores, counts.log1p() - counts.sum().log1p())


def top_k(scores: Tensor, candidate_mask: Tensor, k: int) -> Tensor:
    """The k best items of each row, best first, int64 `[B, k]`; 0 where fewer than k candidates have a score above -inf."""
    usable = (scores > -torch.inf).logical_and_(candidate_mask)
    best = torch.where(usable, scores, -torch.inf).topk(min(k, scores.shape[1] - 1), dim=1)
    return best.indices * (best.values > -torch.inf)


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as `[n, longest]`, padded with 0."""
    lengths = np.array([len(row) for row in rows])
    filled = np.zeros((len(rows), lengths.max(initial=0)), dtype=np.int64)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = np.concatenate([*rows, np.zeros(0, dtype=np.int64)])
    return filled
