"""What results should look like: names and kinds of the columns that the events came from, and their library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prism.recommend.events.columns import AUTO, Columns
from prism.recommend.events.formats import pl
from prism.recommend.events.ids import Ids


def origin(source: Any, columns: Columns, ids: dict[str, Ids]) -> dict[str, Any]:
    """Names of the columns of users and items, those whose ids are text but were read as integers, and the library.

    Args:
        source: a DataFrame or a file. Of a file other than parquet only names that were given are known, and no types.
        columns: as given, with "auto".
        ids: the users and the items, as read.
    """
    if _is_pandas(source):
        names, text = [str(name) for name in source.columns], _pandas_text(source)
    elif (schema := _schema(source)) is not None:
        names, text = list(schema), lambda name: schema[name] in (pl.String, pl.Categorical, pl.Enum)
    else:
        given = {role: name for role in ids if (name := getattr(columns, role)) != AUTO and not name.isdecimal()}
        return {**given, "library": "polars", "text": [], "untyped": True}
    found = {role: getattr(columns.found(names, "the events"), role) for role in ids}
    as_text = [role for role, known in ids.items() if known.array.dtype.kind == "i" and text(found[role])]
    return {**found, "library": "pandas" if _is_pandas(source) else "polars", "text": as_text}


def _is_pandas(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "pandas"


def _pandas_text(frame: Any) -> Callable[[str], bool]:
    """Whether all values of a column are text."""

    def holds_text(name: str) -> bool:
        column = frame.iloc[:, [str(one) for one in frame.columns].index(name)]
        return column.dtype.kind not in "iufbmM" and all(isinstance(value, str) for value in column)

    return holds_text


def _schema(source: Any) -> Any:
    """The columns and types of a polars frame or a parquet file; None for other files."""
    if isinstance(source, pl.LazyFrame | pl.DataFrame):
        return source.collect_schema()
    path = Path(source).expanduser()
    return pl.read_parquet_schema(path) if path.suffix in (".parquet", ".pq") and path.is_file() else None
