"""Which columns of a table are the user, the item and the time: named, by position, or found by their usual names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        features: columns that describe the item (a category, a brand). An item has the same value in all of its rows.
    """

    user: str = AUTO
    item: str = AUTO
    time: str | None = AUTO
    features: tuple[str, ...] = ()

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
        return [name for name in (self.user, self.item, self.time, *self.features) if name is not None and name != AUTO]

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
        for feature in self.features:
            self._one("features", feature, there, where, None)
        for name in {user, item, time, *self.features} & {name for name in there if there.count(name) > 1}:
            raise ValueError(f"{where} has more than one column {name!r}: rename one of them")
        chosen = [name for name in (user, item, time, *self.features) if name is not None]
        if len(set(chosen)) < len(chosen):
            raise ValueError(
                f"user, item, time and features must be different columns of {where}, got {', '.join(chosen)}"
            )
        return Columns(user, item, time, self.features)

    @staticmethod
    def _one(role: str, name: str, there: Sequence[str], where: str, at: str | None) -> str:
        if name != AUTO:
            if name not in there:
                raise ValueError(
                    f"{where} has no column {name!r} ({role}); it has {', '.join(there)}: {_way_out(role)}"
                )
            return name
        found = at if at in there else _usual(role, there)
        if found is None:
            raise ValueError(
                f"{where} has no column with a usual name for the {role}; it has {', '.join(there)} (a table without a "
                f"header has 0, 1, …): {_way_out(role)}"
            )
        return found


def is_header(cells: Sequence[str]) -> bool:
    """Whether the cells hold usual names of a user's and an item's column."""
    return _usual("user", cells) is not None and _usual("item", cells) is not None


def _usual(role: str, there: Sequence[str]) -> str | None:
    known = {name.casefold(): name for name in reversed(there)}
    return next((known[name] for name in _USUAL[role] if name in known), None)


def _way_out(role: str) -> str:
    """How to name a column, in Python and on the command line."""
    value = '["NAME"]' if role == "features" else '"NAME"'
    return f"name it with {role}={value} in Python, --data.{role} NAME on the command line"


def _rating_file_time(there: Sequence[str], where: str) -> str | None:
    if len(there) not in (2, 4):
        raise ValueError(
            f"{where} has {len(there)} columns and no header: name the time column (0, 1, …) with time= in Python, "
            "--data.time on the command line, or None if there is none"
        )
    return "3" if len(there) == 4 else None
