"""Matrix factorisation by the library implicit: ALS (Hu, Koren, Volinsky 2008) and BPR (Rendle and others 2009).

A user of ALS is solved for again from all events before the target, with the items as trained. A user of BPR has the factors of
training; one who was not there gets the most popular items.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prism.messages import missing_extra
from prism.recommend.baselines.base import Baseline, SetsOfItems
from prism.recommend.events.histories import Histories


class AlternatingLeastSquares(Baseline):
    """ALS with confidence alpha for items that the user had, and 1 for all others.

    Args:
        factors: length of the vectors of users and items.
        regularization: of the squares of the vectors.
        alpha: confidence of an item that the user had.
        iterations: passes over users and items.
    """

    name = "als"

    def __init__(
        self, factors: int = 64, regularization: float = 0.1, alpha: float = 10.0, iterations: int = 15
    ) -> None:
        self.factors, self.regularization, self.alpha, self.iterations = factors, regularization, alpha, iterations

    def fit(self, train: Histories, num_items: int, seed: int = 0) -> None:
        with _implicit() as implicit:
            self.model = implicit.als.AlternatingLeastSquares(
                factors=self.factors,
                regularization=self.regularization,
                alpha=self.alpha,
                iterations=self.iterations,
                random_state=seed,
                use_gpu=False,
            )
            self.model.fit(_matrix(SetsOfItems.of(train, num_items)), show_progress=False)

    def score(self, sets: SetsOfItems) -> Tensor:
        with _implicit():
            users = self.model.recalculate_user(np.arange(sets.count), _matrix(sets))
        return torch.from_numpy(users) @ torch.from_numpy(self.model.item_factors).T


class PairwiseRanking(Baseline):
    """BPR: items that a user had score above items that the user had not.

    Args:
        factors: length of the vectors of users and items.
        learning_rate: of the gradient steps.
        regularization: of the squares of the vectors.
        iterations: passes over the events.
    """

    name = "bpr"

    def __init__(
        self, factors: int = 64, learning_rate: float = 0.05, regularization: float = 0.01, iterations: int = 100
    ) -> None:
        self.factors, self.learning_rate = factors, learning_rate
        self.regularization, self.iterations = regularization, iterations

    def fit(self, train: Histories, num_items: int, seed: int = 0) -> None:
        with _implicit() as implicit:
            self.model = implicit.bpr.BayesianPersonalizedRanking(
                factors=self.factors,
                learning_rate=self.learning_rate,
                regularization=self.regularization,
                iterations=self.iterations,
                num_threads=1,  # several would make the result depend on their timing
                random_state=seed,
                use_gpu=False,
            )
            self.model.fit(_matrix(SetsOfItems.of(train, num_items)), show_progress=False)
        self.known = train.lengths > 0
        self.counts = torch.from_numpy(train.counts(num_items)).float()

    def score(self, sets: SetsOfItems) -> Tensor:
        scores = torch.from_numpy(self.model.user_factors[sets.users]) @ torch.from_numpy(self.model.item_factors).T
        return torch.where(torch.from_numpy(self.known[sets.users])[:, None], scores, self.counts)


def _matrix(sets: SetsOfItems) -> Any:
    from scipy.sparse import csr_matrix

    shape = (sets.count, sets.num_items + 1)
    return csr_matrix((np.ones(len(sets.item_of), np.float32), (sets.user_of, sets.item_of)), shape)


@contextmanager
def _implicit() -> Iterator[Any]:
    """The library, with one thread of BLAS: implicit has its own threads, and is many times slower with both."""
    try:
        import implicit.als
        import implicit.bpr
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_extra(error, "baselines") or str(error), name=error.name) from error
    with threadpool_limits(1, "blas"):
        yield implicit
