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
from prism.recommend.events.formats import pl, read_table
from prism.recommend.events.histories import Histories
from prism.recommend.events.ids import Catalogue, Feature, Users


@dataclass(frozen=True)
class EventTable:
    """One row an event, in the order of the input.

    `frame` has the columns user, item, time (if there are times) and one for each feature (`feature_column`). `counts` and
    `notes` say what was found and what was dropped.
    """

    frame: pl.DataFrame
    features: tuple[str, ...] = ()
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

    def to_dataset(self) -> Dataset:
        """Convert to arrays. Users and items are numbered in the order of their ids; the order of the input does not matter."""
        users, items = (self.frame[name].unique().sort() for name in ("user", "item"))
        coded = self.frame.select(
            user=codes(self.frame["user"], users),
            item=codes(self.frame["item"], items) + 1,
            **({"time": pl.col("time")} if self.has_times else {}),
        )
        by_input = coded.sort("user", maintain_order=True)
        ordered = coded.sort("user", "time", maintain_order=True) if self.has_times else by_input
        lengths = np.bincount(ordered["user"].to_numpy(), minlength=len(users))
        if lengths.max(initial=0) < 2:
            raise ValueError("no user has 2 or more events: there is no sequence to learn from")
        histories = Histories(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            items=ordered["item"].to_numpy().astype(np.int64),
            times=_seconds(ordered["time"]) if self.has_times else None,
        )
        features = {name: self._feature(name, items) for name in self.features}
        counts = {"users": len(users), "items": len(items), "events": len(self), **self.counts}
        notes = list(self.notes)
        if self.has_times:
            late = (by_input["time"].diff() < _zero(by_input["time"])) & (by_input["user"].diff() == 0)
            if moved := int(late.sum()):
                notes.append(f"{moved:,} events were earlier than the one above them: the events were sorted by time")
        manifest = {"counts": counts, "notes": notes, "times": self.has_times}
        catalogue = Catalogue(items.to_list(), {name: feature for name, (feature, _) in features.items()})
        for name, (_, several) in features.items():
            if several:
                notes.append(f"{several:,} items have more than one {name}: the first is used")
        return Dataset(histories, catalogue, Users(users.to_list()), manifest)

    def _feature(self, name: str, items: pl.Series) -> tuple[Feature, int]:
        """The first value of each item, and the number of items with several values."""
        known = self.frame.select("item", value=feature_column(name)).drop_nulls()
        per_item = known.group_by("item").agg(pl.col("value").first(), several=pl.col("value").n_unique() > 1)
        values = per_item["value"].unique().sort()
        of_item = np.zeros(len(items) + 1, dtype=np.int64)
        of_item[codes(per_item["item"], items).to_numpy() + 1] = codes(per_item["value"], values).to_numpy() + 1
        return Feature([None, *values.to_list()], of_item), int(per_item["several"].sum())


def read_events(
    source: Any,
    columns: Columns | None = None,
    *,
    format: str = "auto",
    duplicates: Literal["keep", "drop"] = "keep",
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
    """
    if duplicates not in ("keep", "drop"):
        raise ValueError(f"duplicates must be 'keep' or 'drop', got {duplicates!r}")
    columns = Columns() if columns is None else columns
    if isinstance(source, str | Path):
        where = str(source)
        table, found, notes = read_table(Path(source).expanduser(), format, columns)
    else:
        where = "the DataFrame"
        table = _table_of(source)
        found, notes = columns.found(table.columns, where), []
    if found.time is None and columns.time is not None:
        notes.append("no time column: events are taken in the order of the input")
    if not len(table):
        raise ValueError(f"{where} is empty: there is no event in it")
    series = {"user": _ids(table[found.user], where), "item": _ids(table[found.item], where)}
    if found.time is not None:
        series["time"] = _times(table[found.time], where)
    notes += [note for name in (found.user, found.item) if (note := _merged_ids(source, name))]
    series |= {feature_column(name): _labels(table[name], where) for name in found.features}
    frame = pl.DataFrame([values.alias(name) for name, values in series.items()])
    key = [name for name in ("user", "item", "time") if name in series]
    repeats = len(frame) - frame.select(key).n_unique()
    counts = {"rows": len(frame), "duplicates": repeats, "duplicates_dropped": repeats if duplicates == "drop" else 0}
    if duplicates == "drop" and repeats:
        frame = frame.unique(key, keep="first", maintain_order=True)
    return EventTable(frame, found.features, counts, tuple(notes))


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


def feature_column(name: str) -> str:
    """The column of a feature, which may itself be called user, item or time."""
    return f"feature {name}"


def codes(values: pl.Series, distinct: pl.Series) -> pl.Series:
    """The index of every value in `distinct`, Int64."""
    return values.replace_strict(distinct, pl.int_range(len(distinct), eager=True), return_dtype=pl.Int64)


def _seconds(times: pl.Series) -> np.ndarray:
    """Dates as seconds since 1970; numbers stay as they are."""
    if times.dtype.is_temporal():
        return times.cast(pl.Datetime("us")).dt.timestamp("us").to_numpy() / 1e6
    return times.cast(pl.Float64).to_numpy()


def _zero(times: pl.Series) -> pl.Expr | pl.Series:
    return pl.Series([0]).cast(pl.Duration("us")) if times.dtype.is_temporal() else pl.Series([0])


def _table_of(source: Any) -> pl.DataFrame:
    if isinstance(source, pl.LazyFrame):
        return source.collect()
    if isinstance(source, pl.DataFrame):
        return source
    if _is_pandas(source):
        names = [str(name) for name in source.columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the DataFrame has more than one column {twice[0]!r}")
        return pl.DataFrame([_of_pandas(name, source.iloc[:, place]) for place, name in enumerate(names)])
    raise ValueError(f"events must be a path, a polars or a pandas DataFrame, got {type(source).__name__}")


def _is_pandas(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "pandas" and hasattr(source, "columns")


def _merged_ids(source: Any, name: str) -> str | None:
    """A note if a pandas column has an id both as a number and as text: the two become one id."""
    if not _is_pandas(source):
        return None
    column = source.iloc[:, [str(other) for other in source.columns].index(name)]
    if column.dtype != object:
        return None
    kinds = {(isinstance(value, str), str(value)) for value in column}
    both = sorted(text for is_text, text in kinds if is_text and (False, text) in kinds)
    if not both:
        return None
    return (
        f"column {name!r} has {len(both):,} ids both as a number and as text ({both[0]}): each pair is taken as one id"
    )


def _of_pandas(name: str, column: Any) -> pl.Series:
    """Convert a column: numbers through numpy, which needs no pyarrow; text and missing values through a list.

    Mixed values become text, as in a file.
    """
    array = column.to_numpy()
    if array.dtype.kind in "iufbM":
        return pl.Series(name, array, nan_to_null=True)
    values = [None if lost else value for value, lost in zip(array, column.isna(), strict=True)]
    try:
        return pl.Series(name, values)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return pl.Series(name, [None if value is None else str(value) for value in values])


def _ids(column: pl.Series, where: str) -> pl.Series:
    column = column.fill_nan(None) if column.dtype.is_float() else column
    _refuse_missing(column, where, "every event needs a user and an item")
    if column.dtype.is_float():
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() or not (whole == column).all():
            raise ValueError(f"column {column.name!r} of {where} holds fractions: ids must be text or integers")
        return whole
    if column.dtype.is_integer() and not (whole := column.cast(pl.Int64, strict=False)).null_count():
        return whole
    if column.dtype.is_nested():
        raise ValueError(f"column {column.name!r} of {where} holds {column.dtype}: ids must be text or integers")
    texts = column.cast(pl.String)
    numbers = texts.cast(pl.Int64, strict=False)
    are_numbers = not numbers.null_count() and (numbers.cast(pl.String) == texts).all()
    return numbers if are_numbers else texts


def _times(column: pl.Series, where: str) -> pl.Series:
    column = column.fill_nan(None) if column.dtype.is_float() else column
    advice = "give those events a time, remove them, or use the order of the input (time=None)"
    _refuse_missing(column, where, advice)
    if column.dtype == pl.String:
        column = _parsed(column, where)
    if not column.dtype.is_numeric() and column.dtype not in (pl.Date, pl.Datetime):
        raise ValueError(f"column {column.name!r} of {where} holds {column.dtype}, not times")
    if column.dtype.is_float() and not column.is_finite().all():
        raise ValueError(f"column {column.name!r} of {where} holds times that are not finite: {advice}")
    return column


def _parsed(texts: pl.Series, where: str) -> pl.Series:
    """Text as integers, numbers or ISO 8601 dates."""
    for kind in (pl.Int64, pl.Float64):
        numbers = texts.cast(kind, strict=False)
        if not numbers.null_count():
            return numbers
    try:
        dates = texts.str.to_datetime(strict=False)
    except pl.exceptions.PolarsError:  # no date format that polars knows
        dates = pl.Series([None] * len(texts), dtype=pl.Datetime)
    if dates.null_count():
        neither = texts.filter(dates.is_null() & numbers.is_null())
        example = (neither if len(neither) else texts)[0]
        raise ValueError(f"column {texts.name!r} of {where} holds {example!r}, neither a number nor an ISO 8601 time")
    return dates


def _labels(column: pl.Series, where: str) -> pl.Series:
    """Values of a feature: integers stay integers, everything else becomes text."""
    if column.dtype.is_nested():
        raise ValueError(
            f"column {column.name!r} of {where} holds {column.dtype}: a feature must be one value per item"
        )
    return column if column.dtype.is_integer() else column.cast(pl.String)


def _refuse_missing(column: pl.Series, where: str, advice: str) -> None:
    if lost := column.null_count():
        row = int(column.is_null().arg_max() or 0)
        raise ValueError(
            f"column {column.name!r} of {where} is missing in {lost:,} of {len(column):,} events, first in event "
            f"{row + 1}: {advice}"
        )
