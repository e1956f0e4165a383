"""Item-kNN: items like those that the user had.

The similarity of items i and j is the cosine of their users, n_ij / (√(n_i n_j) + shrink), where n_ij users had both. Every
item keeps its most similar others, and the score of an item is the sum of its similarities to the items of the history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism.recommend.baselines.base import Baseline, SetsOfItems
from prism.recommend.events.histories import Histories
from prism.recommend.top_items import largest

AT_ONCE = 2**25
"""Most numbers of a dense slice."""


class ItemNeighbours(Baseline):
    """Nearest neighbours of items.

    Args:
        neighbours: most similar items that an item keeps.
        shrink: added to the denominator: similarities that few users support shrink.
    """

    name = "item_knn"

    def __init__(self, neighbours: int = 100, shrink: float = 0.0) -> None:
        self.neighbours, self.shrink = neighbours, shrink

    def fit(self, train: Histories, num_items: int, seed: int = 0) -> None:
        sets = SetsOfItems.of(train, num_items)
        norms = torch.bincount(torch.from_numpy(sets.item_of), minlength=num_items + 1).float().sqrt()
        step = max(1, AT_ONCE // max(num_items + 1, sets.count))
        rows, columns, values = [], [], []
        for first in range(0, num_items + 1, step):
            last = min(first + step, num_items + 1)
            similar = together(sets, first, last) / (norms[first:last, None] * norms + self.shrink).clamp(min=1e-9)
            similar[torch.arange(last - first), torch.arange(first, last)] = 0.0
            best, places = largest(similar, self.neighbours)
            kept = best > 0
            rows.append((torch.arange(first, last)[:, None].expand_as(places))[kept])
            columns.append(places[kept])
            values.append(best[kept])
        index = torch.stack(
            [torch.cat(columns), torch.cat(rows)]
        )  # transposed: from the items of a history to the others
        size = (num_items + 1, num_items + 1)
        self.similar = torch.sparse_coo_tensor(index, torch.cat(values), size, check_invariants=False).coalesce()

    def score(self, sets: SetsOfItems) -> Tensor:
        # An item of the history gives its similarity to every item that has it among its neighbours.
        return torch.sparse.mm(self.similar.t(), sets.dense().T).T.contiguous()


def together(sets: SetsOfItems, first: int, last: int) -> Tensor:
    """How many users had each of the items first … last-1 and each item, float32 `[last - first, N + 1]`."""
    users, items = torch.from_numpy(sets.user_of), torch.from_numpy(sets.item_of)
    had = torch.zeros(sets.count, last - first)
    inside = (items >= first) & (items < last)
    had[users[inside], items[inside] - first] = 1.0
    size = (sets.num_items + 1, sets.count)
    index, ones = torch.stack([items, users]), torch.ones(len(items))
    by_item = torch.sparse_coo_tensor(index, ones, size, check_invariants=False)
    return torch.sparse.mm(by_item.coalesce(), had).T.contiguous()
