"""EASE: the linear model of all items on all others, in closed form (Steck 2019, arXiv:1905.03375).

With X the 0/1 matrix of users and items, P = (XᵀX + λ I)⁻¹ and B = I - P / diag(P), whose diagonal is 0: no item is
explained by itself. A user with the row x has the scores x B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism.recommend.baselines.base import Baseline, SetsOfItems
from prism.recommend.baselines.neighbours import AT_ONCE, together
from prism.recommend.events.histories import Histories

MOST_ITEMS = 25_000
"""The inverse of more items in float64 would take more than 5 GB, and minutes."""


class Ease(Baseline):
    """EASE; the inverse is computed in float64, scores in float32.

    Args:
        regularization: λ. Larger for more events per item.
    """

    name = "ease"

    def __init__(self, regularization: float = 500.0) -> None:
        self.regularization = regularization

    def fit(self, train: Histories, num_items: int, seed: int = 0) -> None:
        if num_items > MOST_ITEMS:
            raise ValueError(
                f"ease inverts a matrix of all items and has at most {MOST_ITEMS:,}, got {num_items:,}: leave it out"
            )
        sets = SetsOfItems.of(train, num_items)
        step = max(1, AT_ONCE // max(num_items + 1, sets.count))
        gram = torch.empty(num_items + 1, num_items + 1, dtype=torch.float64)
        for first in range(0, num_items + 1, step):
            last = min(first + step, num_items + 1)
            gram[first:last] = together(sets, first, last)
        gram.diagonal().add_(self.regularization)
        gram[0, 0] = 1.0  # no item: a column of zeros
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        weights = inverse.div_(-inverse.diagonal().clone())
        weights.fill_diagonal_(0.0)
        self.weights = weights.float()

    def score(self, sets: SetsOfItems) -> Tensor:
        return sets.dense() @ self.weights
