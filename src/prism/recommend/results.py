"""What was recommended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prism.models import PrismForRecommendation
from prism.recommend.events import Catalogue
from prism.recommend.ranking import SCORES_AT_ONCE, top_k


class Recommended(NamedTuple):
    item: Any
    """The item's own id, as the log has it."""
    score: float


@dataclass(frozen=True)
class Recommendations:
    """The best items for n users, best first.

    `rows` int64 and `scores` float32, both `[n, k]`, are what to go on computing with: rows of the catalogue, 0 where fewer
    than k items were left. `recommendations[i]` and looping give user i's items by their ids.
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
        """Ids alone."""
        return [[item for item, _ in row] for row in self]

    def __repr__(self) -> str:
        shown = [f"  {', '.join(f'{item} ({score:.3f})' for item, score in self[i])}" for i in range(min(5, len(self)))]
        more = [f"  … and {len(self) - 5:,} more"] if len(self) > 5 else []
        return "\n".join([f"Recommendations for {len(self):,}, best first:", *shown, *more])


# The items that are expected most.


def best_items(
    model: PrismForRecommendation,
    catalogue: Catalogue,
    hidden: Tensor,
    events: Tensor,
    excluded: list[np.ndarray],
    k: int,
) -> Recommendations:
    """The k best for each of n users.

    Args:
        hidden: `[n, D]`, what is expected of each.
        events: `[n]`, how many each has had; one without any gets the most popular items.
        excluded: for each, rows of the catalogue that are not wanted.
    """
    if bool((events == 0).any()) and not bool(model.item_counts.any()):
        raise ValueError("a user without events gets the most popular items, but the model was not told their counts")
    counts = model.item_counts.float()
    popularity = counts.log1p() - counts.sum().log1p()
    width = min(k, model.config.num_items)
    rows, scores = np.zeros((len(hidden), width), dtype=np.int64), np.zeros((len(hidden), width), dtype=np.float32)
    step = max(1, SCORES_AT_ONCE // (model.config.num_items + 1))
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        all_scores = model.scores(hidden[part])
        all_scores = torch.where((events[part] > 0)[:, None], all_scores, popularity)
        allowed = torch.ones_like(all_scores, dtype=torch.bool)
        allowed.scatter_(1, torch.from_numpy(_padded(excluded[part])).to(hidden.device), False)
        allowed[:, 0] = False
        best = top_k(all_scores, allowed, k)
        rows[part], scores[part] = best.cpu().numpy(), all_scores.gather(1, best).cpu().numpy()
    return Recommendations(rows, scores, catalogue)


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as `[n, longest]`, filled up with 0."""
    lengths = np.array([len(row) for row in rows])
    filled = np.zeros((len(rows), lengths.max(initial=0)), dtype=np.int64)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = np.concatenate([*rows, np.zeros(0, dtype=np.int64)])
    return filled
