"""The items that are expected most."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prism.data.interactions import Catalogue
from prism.evaluate.ranking import SCORES_AT_ONCE, top_k
from prism.models import PrismForRecommendation
from prism.recommend.result import Recommendations


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
