"""Which items may be recommended: those of a list, those with a feature, and not those that a user had or does not want."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism.messages import did_you_mean
from prism.recommend.events import Catalogue, Feature
from prism.recommend.events.ids import as_list, is_list


@dataclass(frozen=True)
class Excluded:
    """Items to leave out, as P pairs of a user 0 … users-1 and an item, both int64 `[P]`; ascending by user."""

    users: int
    user_of: np.ndarray
    item_of: np.ndarray

    @classmethod
    def none(cls, users: int) -> Excluded:
        return cls(users, np.zeros(0, np.int64), np.zeros(0, np.int64))

    @classmethod
    def rows(cls, rows: Sequence[np.ndarray]) -> Excluded:
        """From an array of items for each user."""
        lengths = np.array([len(row) for row in rows], np.int64)
        items = np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)
        return cls(len(rows), np.repeat(np.arange(len(rows)), lengths), items)

    def __or__(self, other: Excluded) -> Excluded:
        """What either leaves out."""
        users, items = np.concatenate([self.user_of, other.user_of]), np.concatenate([self.item_of, other.item_of])
        order = np.argsort(users, kind="stable")
        return Excluded(self.users, users[order], items[order])

    def user(self, user: int) -> np.ndarray:
        """The items that one user does not get."""
        first, last = np.searchsorted(self.user_of, [user, user + 1])
        return self.item_of[first:last]

    def part(self, first: int, last: int) -> Excluded:
        """Users first … last-1, counted from 0."""
        start, stop = np.searchsorted(self.user_of, [first, last])
        return Excluded(last - first, self.user_of[start:stop] - first, self.item_of[start:stop])

    def of(self, chosen: np.ndarray) -> Excluded:
        """The users that a bool `[users]` chooses, numbered anew."""
        kept = chosen[self.user_of]
        return Excluded(int(chosen.sum()), (np.cumsum(chosen) - 1)[self.user_of[kept]], self.item_of[kept])

    def among(self, choice: np.ndarray) -> Excluded:
        """Items as places in `choice` (ascending); those that are not in it need not be left out."""
        places = np.searchsorted(choice, self.item_of)
        found = choice[np.minimum(places, len(choice) - 1)] == self.item_of
        return Excluded(self.users, self.user_of[found], places[found])

    def by_item(self) -> ExcludedByItem:
        order = np.argsort(self.item_of, kind="stable")
        return ExcludedByItem(self.user_of[order], self.item_of[order])


@dataclass(frozen=True)
class ExcludedByItem:
    """The same pairs, ascending by item."""

    user_of: np.ndarray
    item_of: np.ndarray

    def items_between(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of items first … last-1: users and items."""
        start, stop = np.searchsorted(self.item_of, [first, last])
        return self.user_of[start:stop], self.item_of[start:stop]


def unwanted_items(catalogue: Catalogue, users: int, exclude: Sequence[Any] | None) -> Excluded:
    """What `exclude` names: for each user a list of ids or one id; ids that the catalogue does not have are ignored."""
    if exclude is None:
        return Excluded.none(users)
    if len(exclude) != users:
        raise ValueError(f"exclude must have one list of items for each of the {users} rows, got {len(exclude)}")
    return Excluded.rows([catalogue.index(as_list(items), unknown="skip") for items in exclude])


def allowed_items(
    catalogue: Catalogue, allowed: Iterable[Any] | None, where: Mapping[str, Any] | None
) -> np.ndarray | None:
    """Rows of the catalogue that may be recommended, ascending; None: all.

    Args:
        allowed: ids of items. Those that the catalogue does not have are ignored: a list of what is in stock may hold items
            that were never bought.
        where: features and their values, such as `{"genre": "Drama", "year": [1994, 1995]}`: an item must have one of the
            values of every feature.
    """
    if allowed is None and not where:
        return None
    kept = np.ones(len(catalogue) + 1, dtype=bool)
    kept[0] = False
    if allowed is not None:
        if not is_list(allowed):
            raise ValueError(f"allowed must be a list of items, got {allowed!r}")
        rows = catalogue.index(as_list(allowed), unknown="skip")
        if not len(rows):
            raise ValueError("allowed must hold at least one item that the model knows, but it knows none of them")
        kept &= np.isin(np.arange(len(kept)), rows)
    for name, values in (where or {}).items():
        kept &= _with_feature(catalogue, name, values)
    found = np.flatnonzero(kept)
    if not len(found):
        raise ValueError("no item is left: no item is allowed and has all the features of where")
    return found


def _with_feature(catalogue: Catalogue, name: str, values: Any) -> np.ndarray:
    """Which items have one of the values of a feature, bool `[N + 1]`."""
    if name not in catalogue.features:
        known = ", ".join(catalogue.features) or "none; name columns with features= (--data.features) when you train"
        raise ValueError(
            f"where has no feature {name!r}{did_you_mean(name, catalogue.features)}: the items have {known}"
        )
    feature = catalogue.features[name]
    return has_value(feature, [_code(name, feature, value) for value in as_list(values)])


def has_value(feature: Feature, codes: Sequence[int]) -> np.ndarray:
    """Which items have one of these codes of a feature, bool `[N + 1]`."""
    found = np.isin(feature.of_item, list(codes))
    return np.any(found.reshape(len(found), -1), axis=1)  # lists of values have a column for each


def _code(name: str, feature: Feature, value: Any) -> int:
    """The code of a value. A number may be given as text and vice versa, as ids may."""
    texts = [str(known) for known in feature.values]
    if value is None or str(value) not in texts[1:]:
        hint = did_you_mean(str(value), texts[1:])
        raise ValueError(f"no item has the {name} {value!r}{hint}: values are such as {', '.join(texts[1:6])}")
    return texts.index(str(value), 1)
