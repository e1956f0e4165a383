"""Targets and items in groups: a mean over all hides who is served and what is shown."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

_LENGTHS = (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_DECILES = 10


def history_lengths(lengths: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Rows of targets by the number of events before each, int `[M]`: (name, bool `[M]`)."""
    groups = [(f"{low + 1:,} to {high:,}", (lengths > low) & (lengths <= high)) for low, high in pairwise(_LENGTHS)]
    return [*groups, (f"over {_LENGTHS[-1]:,}", lengths > _LENGTHS[-1])]


def item_popularity(items: np.ndarray, popularity: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Rows of targets by how often their items occur in training.

    head, middle and tail are the most, the next and the least popular items, each with a third of the events.
    """
    by_rank = np.argsort(-popularity[1:], kind="stable") + 1
    before = np.cumsum(popularity[by_rank]) - popularity[by_rank]
    third = np.zeros(len(popularity), dtype=np.int64)
    third[by_rank] = np.minimum(3 * before // max(1, popularity.sum()), 2)
    third[popularity == 0] = 3
    names = ("head", "middle", "tail", "never in training")
    return [(name, third[items] == group) for group, name in enumerate(names)]


def popularity_bias(popularity: np.ndarray, recommended: dict[int, np.ndarray]) -> dict[str, Any]:
    """Items in ten groups of equal number, the most popular first: each group's share of events and of top-k lists."""
    by_rank = np.argsort(-popularity[1:], kind="stable") + 1
    groups = np.array_split(by_rank, min(_DECILES, len(by_rank)))

    def shares(counts: np.ndarray) -> list[float]:
        return [float(counts[group].sum() / max(1, counts.sum())) for group in groups]

    return {
        "items_in_group": [len(group) for group in groups],
        "share_of_events": shares(popularity),
        "share_of_recommendations": {f"@{k}": shares(counts) for k, counts in recommended.items()},
    }
