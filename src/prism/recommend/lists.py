"""What top-k lists hold, beyond hits: coverage, novelty and diversity, for models and baselines alike.

coverage@k    fraction of all items that are in at least one list
novelty@k     mean of -log2(share of the training events) over the items in the lists; an item without events counts as
              one with one event. Rare items are novel.
diversity@k   1 - the mean cosine similarity of two items of a list, averaged over lists; the cosine is that of the users
              who had them in training. 1: no two items of a list have a user in common.
serendipity@k fraction of targets that are in their list, but would not be among the k most popular items
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from prism.recommend.events.histories import Histories
from prism.recommend.ranking import CUTOFFS, Ranking
from prism.recommend.top_items import top_k

DIVERSITY_AT = 10
LISTS, USERS = 2_000, 20_000
"""Most lists and users, evenly spread, that diversity is computed from."""
_AT_ONCE = 2**22


class TopKCounts:
    """Count the items in the top-k lists: int64 `[N + 1]` for every cutoff; and keep some lists for their diversity."""

    def __init__(self, num_items: int, cutoffs: tuple[int, ...] = CUTOFFS, targets: int = LISTS) -> None:
        self.cutoffs = tuple(k for k in cutoffs if k <= num_items) or (num_items,)
        self.counts = {k: np.zeros(num_items + 1, dtype=np.int64) for k in self.cutoffs}
        self._every = max(1, -(-targets // LISTS))
        self._kept: list[np.ndarray] = []

    def add(self, scores: Tensor, candidate_mask: Tensor, rows: np.ndarray | None = None) -> None:
        """Count the lists of a batch; scores and candidate_mask `[B, N + 1]`.

        Args:
            rows: numbers of the targets, int `[B]`, which say whose lists are kept. None: all are.
        """
        lists = top_k(scores, candidate_mask, self.cutoffs[-1]).cpu().numpy()
        for k, counts in self.counts.items():
            np.add.at(counts, lists[:, :k].ravel(), 1)
            counts[0] = 0
        chosen = np.ones(len(lists), dtype=bool) if rows is None else rows % self._every == 0
        self._kept.append(lists[chosen, :DIVERSITY_AT])

    def coverage(self) -> dict[str, float]:
        return {f"coverage@{k}": float((counts[1:] > 0).mean()) for k, counts in self.counts.items()}

    def novelty(self, popularity: np.ndarray) -> dict[str, float]:
        """`popularity`: how often each item occurs in training, `[N + 1]`."""
        information = np.log2(max(1, popularity[1:].sum())) - np.log2(np.maximum(popularity, 1))
        return {f"novelty@{k}": float(counts @ information / max(1, counts.sum())) for k, counts in self.counts.items()}

    def diversity(self, train: Histories, num_items: int) -> dict[str, float]:
        """`train`: the events of training."""
        lists = np.concatenate(self._kept) if self._kept else np.zeros((0, 1), np.int64)
        k = lists.shape[1]
        lists = lists[(lists > 0).all(1)]
        if k < 2 or not len(lists):
            return {}
        return {f"diversity@{k}": float(1 - mean_cosine(lists, train, num_items).mean())}


def serendipity(
    ranking: Ranking, items: np.ndarray, popularity: np.ndarray, cutoffs: tuple[int, ...] = CUTOFFS
) -> dict[str, float]:
    """Hits that the most popular items would have missed; items `[M]` are the targets, popularity is `[N + 1]`."""
    place = np.empty(len(popularity), dtype=np.int64)
    place[np.argsort(-popularity[1:], kind="stable") + 1] = np.arange(1, len(popularity))
    return {f"serendipity@{k}": float(((ranking.ranks <= k) & (place[items] > k)).mean()) for k in cutoffs}


def mean_cosine(lists: np.ndarray, train: Histories, num_items: int) -> np.ndarray:
    """Mean cosine similarity of the pairs of items in each list, `[n, k]` → `[n]`, by the users who had them.

    With the items' unit vectors x, the pairs' cosines add up to (|Σ x|² - the number of items with users) / 2: no pair is
    computed. An item without users has cosine 0 with all others.
    """
    every = max(1, -(-len(train) // USERS))
    users = np.repeat(np.arange(len(train)), train.lengths)
    chosen = users % every == 0
    pairs = np.unique(train.items[chosen] * len(train) + users[chosen])
    item_of, user_of = pairs // len(train), pairs % len(train) // every
    start = np.searchsorted(item_of, np.arange(num_items + 2))
    count, width = np.diff(start), -(-len(train) // every)
    k = lists.shape[1]
    squares = np.empty(len(lists))
    step = max(1, _AT_ONCE // width)
    for first in range(0, len(lists), step):
        part = lists[first : first + step]
        lengths = count[part.ravel()]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(start[part.ravel()] - (ends - lengths), lengths)
        keys = np.repeat(np.repeat(np.arange(len(part)), k), lengths) * width + user_of[places]
        weights = np.repeat(1 / np.sqrt(np.maximum(lengths, 1)), lengths)
        sums = np.bincount(keys, weights, minlength=len(part) * width).reshape(len(part), width)
        squares[first : first + step] = (sums**2).sum(1) - (count[part] > 0).sum(1)
    return squares / (k * (k - 1))
