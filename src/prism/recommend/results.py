"""Recommendations: the k best items for each user, as lists or as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from prism.recommend.events import Catalogue
from prism.recommend.frames import Library, Source, free_name, ids_column, make_frame


class Recommended(NamedTuple):
    """One recommended item."""

    item: Any
    """The item's id, as in the events."""
    score: float


@dataclass(frozen=True)
class Recommendations:
    """The best items for n users, best first.

    `rows` int64 (rows of the catalogue) and `scores` float32, both `[n, k]`, are for further computation; row 0 where fewer
    than k items were left. `recommendations[i]` and iteration give user i's items with their ids. `frame`, `to_pandas()` and
    `to_polars()` give a table with the columns user, item, rank, score and fallback.
    """

    rows: np.ndarray
    scores: np.ndarray
    catalogue: Catalogue
    users: Sequence[Any] | None = None
    """The users' ids, of length n; None: they are 0 … n-1. Of `similar_items`, the items that were asked for."""
    fallback: np.ndarray | None = None
    """bool `[n]`: who got the most popular items, because the user is unknown or has no events; None: no one."""
    source: Source = field(default_factory=Source)
    """Names of the columns, and the library of `frame`."""
    columns: tuple[str, str] | None = None
    """Names of the first two columns; None: those of the users and the items in the events."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Recommended]:
        found = self.rows[index] > 0
        names = self.source.items(self.catalogue.names(self.rows[index][found]))
        return [Recommended(*pair) for pair in zip(names, self.scores[index][found].tolist(), strict=True)]

    def __iter__(self) -> Iterator[list[Recommended]]:
        return (self[index] for index in range(len(self)))

    @property
    def items(self) -> list[list[Any]]:
        """The ids without the scores, a list for each user."""
        return [[item for item, _ in row] for row in self]

    @property
    def keys(self) -> Sequence[Any]:
        """What the rows are for: the users' ids, or 0 … n-1."""
        return range(len(self)) if self.users is None else self.users

    @property
    def frame(self) -> Any:
        """A DataFrame of the library that the events came from: pandas or polars; polars for files."""
        return self._frame(self.source.library)

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each recommended item: user, item, rank (from 1), score, fallback.

        The first two columns are named as in the events. Ids have the type that they have there.
        """
        return self._frame("pandas")

    def to_polars(self) -> Any:
        """The same as a polars DataFrame."""
        return self._frame("polars")

    def _frame(self, library: Library) -> Any:
        found = self.rows > 0
        lengths = found.sum(1)
        places = np.broadcast_to(np.arange(1, found.shape[1] + 1), found.shape)
        fallback = np.zeros(len(self), dtype=bool) if self.fallback is None else self.fallback
        items = self.catalogue.array
        if "item" in self.source.text:
            items = items.astype(str).astype(object)
        own = self.columns or (self.source.user, self.source.item)
        columns = {
            own[0]: np.repeat(ids_column(self.keys), lengths),
            own[1]: items[self.rows[found] - 1],
            free_name("rank", own): places[found],
            free_name("score", own): self.scores[found],
            free_name("fallback", own): np.repeat(fallback, lengths),
        }
        return make_frame(columns, library)

    def __repr__(self) -> str:
        shown = [f"  {', '.join(f'{item} ({score:.3f})' for item, score in self[i])}" for i in range(min(5, len(self)))]
        more = [f"  … and {len(self) - 5:,} more"] if len(self) > 5 else []
        return "\n".join([f"Recommendations for {len(self):,}, best first:", *shown, *more])
