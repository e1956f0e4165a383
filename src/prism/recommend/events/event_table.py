"""EventTable: user events as a checked table; how it is read, thinned out (k-core) and turned into arrays.

Values are not guessed: a missing or malformed value is refused with a sentence that says where it is.

Order: a user's events are sorted by time. Events at the same time stay in the order of the input; without times all
events do. (Breaking ties by item id instead raises NDCG on MovieLens by about a fifth: the model learns the ids' order.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prism.recommend.events.columns import Columns
from prism.recommend.events.dataset import Dataset
from prism.recommend.events.features import encode, refuse_vectors
from prism.recommend.events.formats import pl, read_table
from prism.recommend.events.histories import NO_SEQUENCE, Histories
from prism.recommend.events.ids import Catalogue, Users
from prism.recommend.events.values import as_table, codes, frame_columns, ids, merged_ids, seconds, times


@dataclass(frozen=True)
class EventTable:
    """One row an event, in the order of the input.

    `frame` has the columns user, item, time (if there are times) and one for each feature of items and users
    (`feature_column`). `counts` and `notes` say what was found and what was dropped.
    """

    frame: pl.DataFrame
    features: tuple[str, ...] = ()
    user_features: tuple[str, ...] = ()
    separator: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def has_times(self) -> bool:
        return "time" in self.frame.columns

    def keep(self, rows: np.ndarray, dropped: dict[str, int]) -> EventTable:
        """Keep only these rows, bool `[N]`, and add `dropped` to the counts."""
        return replace(self, frame=self.frame.filter(pl.Series(rows)), counts={**self.counts, **dropped})

    def to_dataset(self, any_length: bool = False) -> Dataset:
        """Convert to arrays. Users and items are numbered in the order of their ids; the order of the input does not matter.

        Args:
            any_length: accept events of which no user has two: they may continue histories.
        """
        users, items = (self.frame[name].unique().sort() for name in ("user", "item"))
        coded = self.frame.select(
            user=codes(self.frame["user"], users),
            item=codes(self.frame["item"], items) + 1,
            **({"time": pl.col("time")} if self.has_times else {}),
        )
        by_input = coded.sort("user", maintain_order=True)
        ordered = coded.sort("user", "time", maintain_order=True) if self.has_times else by_input
        lengths = np.bincount(ordered["user"].to_numpy(), minlength=len(users))
        if lengths.max(initial=0) < 2 and not any_length:
            raise ValueError(NO_SEQUENCE)
        histories = Histories(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            items=ordered["item"].to_numpy().astype(np.int64),
            times=seconds(ordered["time"]) if self.has_times else None,
        )
        counts = {"users": len(users), "items": len(items), "events": len(self), **self.counts}
        notes = list(self.notes)
        if self.has_times:
            late = (by_input["time"].diff() < _zero(by_input["time"])) & (by_input["user"].diff() == 0)
            if moved := int(late.sum()):
                notes.append(f"{moved:,} events were earlier than the one above them: the events were sorted by time")
        described = encode(
            self._columns("item"), coded["item"].to_numpy(), len(items) + 1, self.separator, "the events"
        )
        people = encode(
            self._columns("user"), coded["user"].to_numpy(), len(users), self.separator, "the events", "users"
        )
        refuse_vectors(people)
        dates = self.has_times and self.frame["time"].dtype.is_temporal()
        notes += [*described.notes, *people.notes]
        manifest = {"counts": counts, "notes": notes, "times": self.has_times, "dates": dates}
        catalogue = Catalogue(items.to_list(), described.features, described.vectors)
        return Dataset(histories, catalogue, Users(users.to_list(), people.features), manifest)

    def _columns(self, of: str) -> dict[str, pl.Series]:
        names = self.features if of == "item" else self.user_features
        return {name: self.frame[feature_column(name, of)].alias(name) for name in names}


def read_events(
    source: Any,
    columns: Columns | None = None,
    *,
    format: str = "auto",
    duplicates: Literal["keep", "drop"] = "keep",
    separator: str | None = None,
) -> EventTable:
    """Read events from a file or a DataFrame.

    A column of ids that are all integers becomes integers, even if it is written as text. One id such as "007" or beyond 64
    bits keeps the whole column as text.

    Args:
        source: a csv, tsv, parquet or RecBole .inter file, or lines "user item" or "user item item …" (the text formats
            also as .gz or .xz); or a polars or pandas DataFrame.
        columns: the columns of user, item, time and features.
        format: "auto", "csv", "tsv", "inter", "parquet" or "lines".
        duplicates: keep all rows that repeat user, item and time (user and item if there are no times), or drop all but
            the first.
        separator: splits texts of features into lists of values.
    """
    if duplicates not in ("keep", "drop"):
        raise ValueError(f"duplicates must be 'keep' or 'drop', got {duplicates!r}")
    columns = Columns() if columns is None else columns
    if isinstance(source, str | Path):
        where = str(source)
        table, found, notes = read_table(Path(source).expanduser(), format, columns)
    else:
        where = "the DataFrame"
        found, notes = columns.found(frame_columns(source), where), []
        table = as_table(source, found.wanted)
    if found.time is None and columns.time is not None:
        notes.append("no time column: events are taken in the order of the input")
    if not len(table):
        raise ValueError(f"{where} is empty: there is no event in it")
    series = {"user": ids(table[found.user], where), "item": ids(table[found.item], where)}
    if found.time is not None:
        series["time"] = times(table[found.time], where)
    notes += [note for name in (found.user, found.item) if (note := merged_ids(source, name))]
    series |= {feature_column(name): table[name] for name in found.features}
    series |= {feature_column(name, "user"): table[name] for name in found.user_features}
    frame = pl.DataFrame([values.alias(name) for name, values in series.items()])
    key = [name for name in ("user", "item", "time") if name in series]
    repeats = len(frame) - frame.select(key).n_unique()
    counts = {"rows": len(frame), "duplicates": repeats, "duplicates_dropped": repeats if duplicates == "drop" else 0}
    if duplicates == "drop" and repeats:
        frame = frame.unique(key, keep="first", maintain_order=True)
    return EventTable(frame, found.features, found.user_features, separator, counts, tuple(notes))


def k_core(table: EventTable, users: int = 1, items: int = 1) -> EventTable:
    """The k-core: drop users and items with few events until every user has `users` events and every item `items`.

    Repeated events count each.
    """
    for name, least in (("users", users), ("items", items)):
        if least < 1:
            raise ValueError(f"{name} must be at least 1, got {least}")
    coded = [codes(table.frame[name], table.frame[name].unique().sort()).to_numpy() for name in ("user", "item")]
    kept = core_mask(coded[0], coded[1], users, items)
    if not kept.any():
        raise ValueError(
            f"no event is left if each user needs {users} events and each item {items}: lower min_user or min_item"
        )
    before = [len(np.unique(column)) for column in coded]
    after = [len(np.unique(column[kept])) for column in coded]
    return table.keep(
        kept,
        {
            "users_dropped": before[0] - after[0],
            "items_dropped": before[1] - after[1],
            "events_dropped": int((~kept).sum()),
        },
    )


def core_mask(users: np.ndarray, items: np.ndarray, least_user: int, least_item: int) -> np.ndarray:
    """Which events the k-core keeps, bool `[N]`; users and items are small integers `[N]`."""
    kept = np.ones(len(users), dtype=bool)
    while True:
        enough = (np.bincount(users[kept], minlength=users.max() + 1) >= least_user)[users]
        enough &= (np.bincount(items[kept], minlength=items.max() + 1) >= least_item)[items]
        if (enough | ~kept).all():
            return kept
        kept &= enough


def feature_column(name: str, of: str = "item") -> str:
    """The column of a feature of items or users, which may itself be called user, item or time."""
    return f"feature {name}" if of == "item" else f"{of} feature {name}"


def _zero(times: pl.Series) -> pl.Expr | pl.Series:
    return pl.Series([0]).cast(pl.Duration("us")) if times.dtype.is_temporal() else pl.Series([0])
