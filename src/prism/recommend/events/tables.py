"""Files of events as tables of text: the values of columns, nothing converted yet.

What a file is follows from its ending and its first line:

- csv, tsv: separated by , or tab or ; or | or ::, with or without a line of names;
- inter: RecBole's, tabs and names such as user_id:token;
- parquet;
- lines: "user item" or "user item item …", as often as a user likes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from prism.files import inner_suffix, open_bytes

# Which columns of a table are the user, the item and the time: named, by position, or found by their usual names.

AUTO = "auto"
_USUAL = {
    "user": ("user", "user_id", "userid", "uid", "visitor_id", "visitorid", "customer_id", "reviewerid", "session_id"),
    "item": ("item", "item_id", "itemid", "iid", "movie_id", "movieid", "product_id", "parent_asin", "asin", "isbn"),
    "time": ("time", "timestamp", "datetime", "date", "ts", "unixreviewtime", "unix_timestamp", "event_time"),
}


@dataclass(frozen=True)
class Columns:
    """The columns that matter; all others are left alone.

    A table without a line of names has its columns at "0", "1", …: user, item and time are then given as such numbers.
    With "auto" it must have 2 columns (user, item) or 4 (user, item, rating, time), as rating files do.

    Attributes:
        time: None: the log has no times, and its order is that of the input.
        features: columns that describe the item (a category, a brand), the same in all of an item's rows.
    """

    user: str = AUTO
    item: str = AUTO
    time: str | None = AUTO
    features: tuple[str, ...] = ()

    @property
    def by_position(self) -> bool:
        """Whether every column that is named is named by its number."""
        return bool(self.named) and all(name.isdecimal() for name in self.named)

    @property
    def by_name(self) -> bool:
        return any(not name.isdecimal() for name in self.named)

    @property
    def named(self) -> list[str]:
        return [name for name in (self.user, self.item, self.time, *self.features) if name is not None and name != AUTO]

    def found(self, there: Sequence[str], where: str) -> Columns:
        """The same with every "auto" replaced by a name that the table has; unknown names are refused."""
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
            raise ValueError(f"a column of {where} is asked for twice: {', '.join(chosen)}")
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


def is_line_of_names(cells: Sequence[str]) -> bool:
    """Whether these cells name a user's and an item's column."""
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
            f"{where} has {len(there)} columns without names: say which is the time (0, 1, …), or that there is none"
        )
    return "3" if len(there) == 4 else None


# polars, or a sentence that says how to get it. Only what reads a raw log imports this.

try:
    import polars as pl
except ImportError as error:
    raise ImportError("reading a log of events needs polars: pip install 'prism-sequence[rec]'") from error

__all__ = ["pl"]

Format = Literal["auto", "csv", "tsv", "inter", "parquet", "lines"]
_BY_SUFFIX: dict[str, Format] = {
    ".csv": "csv", ".tsv": "tsv", ".inter": "inter", ".parquet": "parquet", ".pq": "parquet", ".dat": "csv"
}  # fmt: skip
_SEPARATORS = ("\t", "::", ",", ";", "|")
_LOOK_AT = 1000
"""Lines from which the format is told."""
_NO_SEPARATOR = "\x01"


def read_table(path: Path, format: str, columns: Columns) -> tuple[pl.DataFrame, Columns, list[str]]:
    """The columns asked for, as text (parquet: as typed), which they are, and notes on what was guessed."""
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if format == "parquet" or (format == "auto" and inner_suffix(path) in (".parquet", ".pq")):
        return _parquet(path, columns)
    data = _contents(path)
    head = _first_lines(data, path)
    if not head:
        raise ValueError(f"{path} is empty: there is no event in it")
    kind = (_BY_SUFFIX.get(inner_suffix(path)) or _told_by(head, path)) if format == "auto" else format
    if kind != "lines":
        return _separated(data, head, path, kind, columns)
    if columns.named:
        raise ValueError(f"{path} is lines of a user and items: it has no column {columns.named[0]!r}")
    return _lines(data, path)


def _contents(path: Path) -> bytes:
    with open_bytes(path) as file:
        return file.read().removeprefix(b"\xef\xbb\xbf")


def _parquet(path: Path, columns: Columns) -> tuple[pl.DataFrame, Columns, list[str]]:
    try:
        found = columns.found(list(pl.read_parquet_schema(path)), str(path))
        names = [name for name in (found.user, found.item, found.time, *found.features) if name is not None]
        return pl.read_parquet(path, columns=names), found, []
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} is not a parquet file: {_reason(error)}") from error


def _separated(
    data: bytes, head: Sequence[str], path: Path, kind: str, columns: Columns
) -> tuple[pl.DataFrame, Columns, list[str]]:
    separator = "\t" if kind in ("tsv", "inter") else _separator(head[0])
    if separator == "::":
        data, separator = data.replace(b"::", b"\t"), "\t"
        head = [line.replace("::", "\t") for line in head]
    cells = [cell.strip('"') for cell in head[0].split(separator)]
    named = kind == "inter" or columns.by_name or (not columns.by_position and not any(map(_is_number, cells)))
    try:
        table = pl.read_csv(io.BytesIO(data), separator=separator, has_header=named, infer_schema_length=0)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} does not read as a table: {_bad_line(data, separator) or _reason(error)}") from error
    names = _header(data, separator) if named else [str(n) for n in range(table.width)]
    if kind == "inter":
        names = [name.rsplit(":", 1)[0] for name in names]
    found = columns.found(names, str(path))
    wanted = [name for name in (found.user, found.item, found.time, *found.features) if name is not None]
    table = pl.DataFrame([table.to_series(names.index(name)).alias(name) for name in wanted])
    notes = []
    if not named:
        time = "none" if found.time is None else f"column {found.time}"
        notes.append(
            f"{path.name} has no line of names: user is column {found.user}, item {found.item}, time {time} "
            "(counted from 0)"
        )
    return table, found, notes


def _header(data: bytes, separator: str) -> list[str]:
    """Column names as the file has them: with a header, polars renames repeated ones."""
    first = pl.read_csv(io.BytesIO(data), separator=separator, has_header=False, n_rows=1, infer_schema_length=0)
    return [name or "" for name in first.row(0)]


def _lines(data: bytes, path: Path) -> tuple[pl.DataFrame, Columns, list[str]]:
    try:
        lines = pl.read_csv(
            io.BytesIO(data),
            separator=_NO_SEPARATOR,
            has_header=False,
            infer_schema_length=0,
            quote_char=None,
            new_columns=["line"],
        )
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} does not read as lines of text: {_reason(error)}") from error
    words = lines["line"].drop_nulls().str.extract_all(r"\S+")
    notes = []
    if len(words) and is_line_of_names(words[0].to_list()):
        notes.append(f"the first line of {path.name} names its columns and is left out")
        words = words[1:]
    lengths = words.list.len()
    if alone := int((lengths == 1).sum()):
        notes.append(f"{alone} lines of {path.name} name a user and no item")
    words = words.filter(lengths > 1)
    table = pl.DataFrame({"user": words.list.first(), "item": words.list.slice(1)}).explode("item")
    return table, Columns("user", "item", None), notes


def _first_lines(data: bytes, path: Path) -> list[str]:
    """Up to _LOOK_AT lines that are not empty."""
    _check_utf8(data, path)
    lines = data[: 1 << 20].split(b"\n")[:_LOOK_AT]
    if len(lines) > 1 and len(data) > 1 << 20:
        lines.pop()  # it may be cut
    return [line.decode().rstrip("\r") for line in lines if line.strip()]


def _check_utf8(data: bytes, path: Path) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} in line {line}") from error


def _bad_line(data: bytes, separator: str) -> str | None:
    """The first line with more fields than the first one, in words; None if there is none."""
    rows = csv.reader(io.StringIO(data.decode()), delimiter=separator)
    expected = len(next(rows, []))
    try:
        for row in rows:
            if row and len(row) > expected:
                return f"line {rows.line_num} has {len(row)} fields, the first line {expected}"
    except csv.Error as error:
        return f"line {rows.line_num}: {error}"
    return None


def _told_by(head: Sequence[str], path: Path) -> str:
    """The format of a text file without a telling ending."""
    separator = _separator(head[0])
    if separator != " " and len(columns := {line.count(separator) for line in head}) == 1 and columns.pop() > 1:
        return "csv"  # three or more columns
    fields = {len(line.split()) for line in head}
    if len(head) > 1 and len(fields) == 1 and fields.isdisjoint({1, 2}):
        raise ValueError(
            f"every line of {path} has {fields.pop()} fields: a table, or a user and items? Say format csv or lines"
        )
    return "csv" if fields == {1} else "lines"


def _separator(line: str) -> str:
    return max((*_SEPARATORS, " "), key=lambda s: (line.count(s), s != " ")) if line.strip() else ","


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
