"""Which columns of a table are the user, the item and the time: named, by position, or found by their usual names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

AUTO = "auto"
_USUAL = {
    "user": ("user", "user_id", "userid", "uid", "visitor_id", "visitorid", "customer_id", "reviewerid", "session_id"),
    "item": ("item", "item_id", "itemid", "iid", "movie_id", "movieid", "product_id", "parent_asin", "asin", "isbn"),
    "time": ("time", "timestamp", "datetime", "date", "ts", "unixreviewtime", "unix_timestamp", "event_time"),
}


@dataclass(frozen=True)
class Columns:
    """The columns that are read; all others are ignored.

    A table without a header has the columns "0", "1", …: give user, item and time as such numbers. With "auto" such a
    table must have 2 columns (user, item) or 4 (user, item, rating, time), as rating files do.

    Attributes:
        time: None: the events have no times and stay in the order of the input.
        features: columns that describe the item (a category, a list of genres). An item has the same value in all of its
            rows.
        user_features: columns that describe the user.
    """

    user: str = AUTO
    item: str = AUTO
    time: str | None = AUTO
    features: tuple[str, ...] = ()
    user_features: tuple[str, ...] = ()

    @property
    def by_position(self) -> bool:
        """Whether columns are named, all of them by number."""
        return bool(self.named) and all(name.isdecimal() for name in self.named)

    @property
    def by_name(self) -> bool:
        """Whether a column is named by something other than a number."""
        return any(not name.isdecimal() for name in self.named)

    @property
    def named(self) -> list[str]:
        """The columns that are not left to "auto"."""
        return [name for name in self.wanted if name != AUTO]

    @property
    def wanted(self) -> list[str]:
        """All columns that are read."""
        names = (self.user, self.item, self.time, *self.features, *self.user_features)
        return [name for name in names if name is not None]

    def found(self, there: Sequence[str], where: str) -> Columns:
        """Replace every "auto" by a column of the table; refuse names that it does not have.

        Args:
            there: the columns of the table.
            where: the file or DataFrame, named in errors.
        """
        positions = list(there) == [str(n) for n in range(len(there))]
        user = self._one("user", self.user, there, where, "0" if positions else None)
        item = self._one("item", self.item, there, where, "1" if positions else None)
        time = self.time
        if time == AUTO:
            time = _rating_file_time(there, where) if positions else _usual("time", there)
        elif time is not None:
            time = self._one("time", time, there, where, None)
        for role in ("features", "user_features"):
            for feature in getattr(self, role):
                find_column(role, feature, there, where)
        chosen = Columns(user, item, time, self.features, self.user_features)
        check_distinct(chosen.wanted, there, where, "user, item, time and features")
        return chosen

    @staticmethod
    def _one(role: str, name: str, there: Sequence[str], where: str, at: str | None) -> str:
        return at if name == AUTO and at is not None and at in there else find_column(role, name, there, where)


@dataclass(frozen=True)
class KeyedColumns:
    """The columns of a table with one row per item or user: its id, and what describes it.

    Attributes:
        role: "item" or "user".
        key: column of the ids; "auto" finds the usual names.
        features: columns that describe the item or user.
    """

    role: str
    key: str = AUTO
    features: tuple[str, ...] = ()
    by_position: ClassVar[bool] = False
    by_name: ClassVar[bool] = True

    @property
    def named(self) -> list[str]:
        return [name for name in self.wanted if name != AUTO]

    @property
    def wanted(self) -> list[str]:
        return [self.key, *self.features]

    def found(self, there: Sequence[str], where: str) -> KeyedColumns:
        """As `Columns.found`."""
        key = (
            self.key if self.key in there else _usual(self.role, there) or self.key
        )  # the events may call it otherwise
        key = find_column(self.role, key, there, where)
        for feature in self.features:
            find_column("features" if self.role == "item" else "user_features", feature, there, where)
        chosen = KeyedColumns(self.role, key, self.features)
        check_distinct(chosen.wanted, there, where, f"the {self.role} and its features")
        return chosen


def find_column(role: str, name: str, there: Sequence[str], where: str) -> str:
    """The column of a role: the one that is named, or with "auto" one with a usual name."""
    if name != AUTO:
        if name not in there:
            raise ValueError(f"{where} has no column {name!r} ({role}); it has {', '.join(there)}: {_way_out(role)}")
        return name
    found = _usual(role, there)
    if found is None:
        raise ValueError(
            f"{where} has no column with a usual name for the {role}; it has {', '.join(there)} (a table without a "
            f"header has 0, 1, …): {_way_out(role)}"
        )
    return found


def check_distinct(chosen: Sequence[str], there: Sequence[str], where: str, roles: str) -> None:
    """Refuse a column that is chosen twice, or that the table has twice."""
    for name in set(chosen) & {name for name in there if there.count(name) > 1}:
        raise ValueError(f"{where} has more than one column {name!r}: rename one of them")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{roles} must be different columns of {where}, got {', '.join(chosen)}")


def is_header(cells: Sequence[str]) -> bool:
    """Whether the cells hold usual names of a user's and an item's column."""
    return _usual("user", cells) is not None and _usual("item", cells) is not None


def _usual(role: str, there: Sequence[str]) -> str | None:
    known = {name.casefold(): name for name in reversed(there)}
    return next((known[name] for name in _USUAL[role] if name in known), None)


def _way_out(role: str) -> str:
    """How to name a column, in Python and on the command line."""
    value = '["NAME"]' if role.endswith("features") else '"NAME"'
    return f"name it with {role}={value} in Python, --data.{role.replace('_', '-')} NAME on the command line"


def _rating_file_time(there: Sequence[str], where: str) -> str | None:
    if len(there) not in (2, 4):
        raise ValueError(
            f"{where} has {len(there)} columns and no header: name the time column (0, 1, …) with time= in Python, "
            "--data.time on the command line, or None if there is none"
        )
    return "3" if len(there) == 4 else None
