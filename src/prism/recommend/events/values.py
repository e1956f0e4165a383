"""Columns of tables as checked values: ids, times, and frames of pandas as frames of polars.

Values are not guessed: a missing or malformed value is refused with a sentence that says where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prism.recommend.events.formats import pl


def codes(values: pl.Series, distinct: pl.Series) -> pl.Series:
    """The index of every value in `distinct`, Int64."""
    return values.replace_strict(distinct, pl.int_range(len(distinct), eager=True), return_dtype=pl.Int64)


def seconds(times: pl.Series) -> np.ndarray:
    """Dates as seconds since 1970; numbers stay as they are."""
    if times.dtype.is_temporal():
        return times.cast(pl.Datetime("us")).dt.timestamp("us").to_numpy() / 1e6
    return times.cast(pl.Float64).to_numpy()


def as_table(source: Any, wanted: Sequence[str], what: str = "the DataFrame") -> pl.DataFrame:
    """Columns of a polars or pandas frame as a polars frame; `what` names it in errors.

    Args:
        wanted: names of the columns. Others are not looked at: they may hold anything.
    """
    names, chosen = frame_columns(source, what), list(dict.fromkeys(wanted))
    if _is_pandas(source):
        return pl.DataFrame([_of_pandas(name, source.iloc[:, names.index(name)]) for name in chosen])
    table: pl.DataFrame = source.select(chosen).collect() if isinstance(source, pl.LazyFrame) else source.select(chosen)
    return table


def frame_columns(source: Any, what: str = "the DataFrame") -> list[str]:
    """The columns of a polars or pandas frame; anything else is refused."""
    if isinstance(source, pl.LazyFrame | pl.DataFrame):
        return source.collect_schema().names()
    if _is_pandas(source):
        names = [str(name) for name in source.columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{what} has more than one column {twice[0]!r}")
        return names
    argument = "events" if what == "the DataFrame" else what
    raise ValueError(f"{argument} must be a path, a polars or a pandas DataFrame, got {type(source).__name__}")


def _is_pandas(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "pandas" and hasattr(source, "columns")


def merged_ids(source: Any, name: str) -> str | None:
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
    if array.dtype.kind == "M" and np.datetime_data(array.dtype)[0] not in ("ms", "us", "ns"):  # polars has no others
        array = array.astype("datetime64[us]")
    if array.dtype.kind in "iufbM":
        return pl.Series(name, array, nan_to_null=True)
    values = [None if lost else value for value, lost in zip(array, column.isna(), strict=True)]
    try:
        return _no_objects(pl.Series(name, values))
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return _as_text(name, values)


def _no_objects(column: pl.Series) -> pl.Series:
    """The column; values of a class that polars does not know (uuid.UUID) become text."""
    return _as_text(column.name, column.to_list()) if column.dtype == pl.Object else column


def _as_text(name: str, values: Sequence[Any]) -> pl.Series:
    return pl.Series(name, [None if value is None else str(value) for value in values], dtype=pl.String)


def ids(column: pl.Series, where: str) -> pl.Series:
    """Ids as integers if all of them are, else as text; missing ones are refused."""
    column = column.fill_nan(None) if column.dtype.is_float() else _no_objects(column)
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


def times(column: pl.Series, where: str) -> pl.Series:
    """Times as numbers or dates; missing and infinite ones are refused."""
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
    unclear = texts.filter(~texts.str.contains(r"^\s*\d{4}"))
    if len(unclear):  # polars takes the day for first
        raise ValueError(
            f"column {texts.name!r} of {where} holds {unclear[0]!r}, which may be read day or month first: write dates as ISO "
            "8601, year first (2024-01-31), or as numbers such as seconds since 1970"
        )
    return dates


def _refuse_missing(column: pl.Series, where: str, advice: str) -> None:
    if lost := column.null_count():
        row = int(column.is_null().arg_max() or 0)
        raise ValueError(
            f"column {column.name!r} of {where} is missing in {lost:,} of {len(column):,} events, first in event "
            f"{row + 1}: {advice}"
        )
