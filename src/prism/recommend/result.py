"""What was recommended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prism.data.interactions import Catalogue


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
