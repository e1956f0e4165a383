"""From a file or a DataFrame to a EventTable. Nothing is guessed about values: what is not right is refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from prism.recommend.events.table import EventTable, feature_column
from prism.recommend.events.tables import Columns, Format, pl, read_table

__all__ = ["Columns", "EventTable", "Format", "read_events"]


def read_events(
    source: Any,
    columns: Columns | None = None,
    *,
    format: str = "auto",
    duplicates: Literal["keep", "drop"] = "keep",
) -> EventTable:
    """Read a log of events.

    Ids that are all whole numbers become integers, also where they are written as texts ("007" stays a text, and so do
    all of a column with one beyond 64 bits).

    Args:
        source: a csv, tsv, parquet or RecBole .inter file, or lines "user item" or "user item item …" (the text formats
            also as .gz or .xz); or a polars or pandas DataFrame.
        columns: where user, item, time and features are.
        format: "auto", "csv", "tsv", "inter", "parquet" or "lines".
        duplicates: what becomes of rows that repeat user, item and time (user and item in a log without times):
            all are kept, or only the first.
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
        notes.append("no column of times: events are taken in the order of the input")
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
    raise ValueError(f"a log is a path, a polars or a pandas DataFrame, not {type(source).__name__}")


def _is_pandas(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "pandas" and hasattr(source, "columns")


def _merged_ids(source: Any, name: str) -> str | None:
    """A note if a pandas column has the same id as a number and as a text: both become one id."""
    if not _is_pandas(source):
        return None
    column = source.iloc[:, [str(other) for other in source.columns].index(name)]
    if column.dtype != object:
        return None
    kinds = {(isinstance(value, str), str(value)) for value in column}
    both = sorted(text for is_text, text in kinds if is_text and (False, text) in kinds)
    if not both:
        return None
    return f"column {name!r} has {len(both):,} ids both as a number and as a text ({both[0]}): each pair is taken as one id"


def _of_pandas(name: str, column: Any) -> pl.Series:
    """Through numpy, which needs no pyarrow; texts and missing values through a list. Mixed values are texts, as in a file."""
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
            raise ValueError(f"column {column.name!r} of {where} holds fractions: ids are texts or whole numbers")
        return whole
    if column.dtype.is_integer() and not (whole := column.cast(pl.Int64, strict=False)).null_count():
        return whole
    if column.dtype.is_nested():
        raise ValueError(f"column {column.name!r} of {where} holds {column.dtype}: ids are texts or whole numbers")
    texts = column.cast(pl.String)
    numbers = texts.cast(pl.Int64, strict=False)
    are_numbers = not numbers.null_count() and (numbers.cast(pl.String) == texts).all()
    return numbers if are_numbers else texts


def _times(column: pl.Series, where: str) -> pl.Series:
    column = column.fill_nan(None) if column.dtype.is_float() else column
    advice = "give those events a time, leave them out, or take the order of the input (no time column)"
    _refuse_missing(column, where, advice)
    if column.dtype == pl.String:
        column = _parsed(column, where)
    if not column.dtype.is_numeric() and column.dtype not in (pl.Date, pl.Datetime):
        raise ValueError(f"column {column.name!r} of {where} holds {column.dtype}, not times")
    if column.dtype.is_float() and not column.is_finite().all():
        raise ValueError(f"column {column.name!r} of {where} holds times that are not finite: {advice}")
    return column


def _parsed(texts: pl.Series, where: str) -> pl.Series:
    """Whole numbers, numbers, or dates as ISO 8601 writes them."""
    for kind in (pl.Int64, pl.Float64):
        numbers = texts.cast(kind, strict=False)
        if not numbers.null_count():
            return numbers
    try:
        moments = texts.str.to_datetime(strict=False)
    except pl.exceptions.PolarsError:  # no known way of writing dates
        moments = pl.Series([None] * len(texts), dtype=pl.Datetime)
    if moments.null_count():
        neither = texts.filter(moments.is_null() & numbers.is_null())
        example = (neither if len(neither) else texts)[0]
        raise ValueError(f"column {texts.name!r} of {where} holds {example!r}, neither a number nor an ISO 8601 time")
    return moments


def _labels(column: pl.Series, where: str) -> pl.Series:
    """Values of a feature: integers as they are, everything else as text."""
    if column.dtype.is_nested():
        raise ValueError(f"column {column.name!r} of {where} holds {column.dtype}: a feature is one value an item")
    return column if column.dtype.is_integer() else column.cast(pl.String)


def _refuse_missing(column: pl.Series, where: str, advice: str) -> None:
    if lost := column.null_count():
        row = int(column.is_null().arg_max() or 0)
        raise ValueError(
            f"column {column.name!r} of {where} is missing in {lost:,} of {len(column):,} events, first in event "
            f"{row + 1}: {advice}"
        )
