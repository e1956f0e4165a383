"""Re-rank the best items so that a list is less alike: maximal marginal relevance (MMR).

The next item of a list is the one with the largest

    (1 - λ) · relevance - λ · similarity to the most similar item already in the list

where relevance is the score, scaled to 0 … 1 over the user's candidates, and similarity is the cosine of the items' vectors.
λ = 0 keeps the order of the scores. `by_hand` is this definition; `rerank` computes it for many users together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prism.recommend.filters import Excluded
from prism.recommend.model import PrismForRecommendation
from prism.recommend.top_items import best_items, unit

CANDIDATES = 5
"""Candidates per item of the list: a list of k is chosen from the 5 · k best."""


def by_hand(vectors: np.ndarray, scores: np.ndarray, share: float, k: int) -> list[int]:
    """Places of the k chosen candidates of one user, with unit vectors `[n, D]` and scores `[n]`, best first."""
    relevance = (scores - scores.min()) / max(scores.max() - scores.min(), 1e-12)
    chosen: list[int] = []
    while len(chosen) < min(k, len(scores)):
        left = [place for place in range(len(scores)) if place not in chosen]
        alike = [max((vectors[place] @ vectors[other] for other in chosen), default=0.0) for place in left]
        value = [(1 - share) * relevance[place] - share * similar for place, similar in zip(left, alike, strict=True)]
        chosen.append(left[int(np.argmax(value))])
    return chosen


def diverse_items(
    model: PrismForRecommendation,
    hidden: Tensor,
    events: Tensor,
    excluded: Excluded,
    k: int,
    allowed: np.ndarray | None,
    share: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and scores of the best items, `[n, k]`, as `best_items`; re-ranked if share is not 0."""
    if not share:
        return best_items(model, hidden, events, excluded, k, allowed)
    rows, scores = best_items(model, hidden, events, excluded, CANDIDATES * k, allowed)
    return rerank(model.item_vectors(), rows, scores, share, k)


def rerank(
    vectors: Tensor, rows: np.ndarray, scores: np.ndarray, share: float, k: int, users: int = 1024
) -> tuple[np.ndarray, np.ndarray]:
    """Choose k of the candidates of each user by MMR.

    Args:
        vectors: of all items, `[N + 1, D]`; only the candidates' are read.
        rows: the candidates, best first, `[n, m]`; 0 where there are fewer.
        scores: `[n, m]`, -inf where row is 0.
        share: λ, the weight of the similarity.
        users: users at once.

    Returns:
        Rows and scores, `[n, k]`, in the order chosen; 0 and -inf where no candidate is left.
    """
    k = min(k, rows.shape[1])
    parts = [
        _choose(vectors, rows[at : at + users], scores[at : at + users], share, k) for at in range(0, len(rows), users)
    ]
    order = np.concatenate([*parts, np.zeros((0, k), np.int64)])
    return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)


def _choose(vectors: Tensor, rows: np.ndarray, scores: np.ndarray, share: float, k: int) -> np.ndarray:
    """Places of the chosen candidates, int64 `[n, k]`."""
    candidates = torch.from_numpy(rows).to(vectors.device)
    units = unit(vectors[candidates])  # [n, m, D]
    value = torch.from_numpy(scores).to(units)
    there = candidates > 0
    low = value.masked_fill(~there, torch.inf).amin(1, keepdim=True)
    high = value.masked_fill(~there, -torch.inf).amax(1, keepdim=True)
    relevance = ((value - low) / (high - low).clamp(min=1e-12)).masked_fill(~there, -torch.inf)
    alike = torch.full_like(relevance, -torch.inf)
    free, user = relevance, torch.arange(len(rows), device=vectors.device)
    chosen = []
    for step in range(k):
        marginal = (1 - share) * free - (share * alike if step else 0.0)
        best = marginal.masked_fill(free == -torch.inf, -torch.inf).argmax(1)
        chosen.append(best)
        free = free.index_put((user, best), free.new_tensor(-torch.inf))
        alike = torch.maximum(alike, (units @ units[user, best][:, :, None])[:, :, 0])
    picked = torch.stack(chosen, 1)
    # a user with fewer than k candidates: the rest points to an empty place, which is one of the last
    left = torch.arange(k, device=picked.device) < there.sum(1, keepdim=True)
    return torch.where(left, picked, rows.shape[1] - 1).cpu().numpy()
