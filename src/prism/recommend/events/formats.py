"""File formats: files of events as tables of text, with nothing converted yet.

The format of a file follows from its suffix and its first lines:

- csv, tsv: separated by , or tab or ; or | or ::, with or without a header;
- inter: RecBole's format, tabs and column names such as user_id:token;
- parquet;
- lines: "user item" or "user item item …"; a user may have several lines.

All modules that work on tables take polars from here.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from prism.files import inner_suffix, open_bytes
from prism.messages import install
from prism.recommend.events.columns import Columns, KeyedColumns, is_header

try:
    import polars as pl
except ImportError as error:
    raise ImportError(f"reading a table of events needs polars: {install('rec')}") from error

Format = Literal["auto", "csv", "tsv", "inter", "parquet", "lines"]
_BY_SUFFIX: dict[str, Format] = {
    ".csv": "csv", ".tsv": "tsv", ".inter": "inter", ".parquet": "parquet", ".pq": "parquet", ".dat": "csv"
}  # fmt: skip
_SEPARATORS = ("\t", "::", ",", ";", "|")
_LOOK_AT = 1000
"""Lines that decide the format."""
_NO_SEPARATOR = "\x01"


Wanted = TypeVar("Wanted", Columns, KeyedColumns)


def read_table(path: Path, format: str, columns: Wanted) -> tuple[pl.DataFrame, Wanted, list[str]]:
    """Read the columns asked for, as text (parquet: with their types).

    Returns:
        The table, its columns with every "auto" resolved, and notes on what was guessed.
    """
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
    kind = (_BY_SUFFIX.get(inner_suffix(path)) or _guess_format(head, path)) if format == "auto" else format
    if kind != "lines":
        return _separated(data, head, path, kind, columns)
    if isinstance(columns, KeyedColumns) or columns.named:
        missing = columns.named[0] if columns.named else columns.wanted[0]
        raise ValueError(f"{path} has lines of a user and items, so it has no column {missing!r}")
    return _lines(data, path)


def column_names(path: Path) -> list[str]:
    """The columns of a csv, tsv or parquet file with a header."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if inner_suffix(path) in (".parquet", ".pq"):
            return list(pl.read_parquet_schema(path))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} is not a parquet file: {_reason(error)}") from error
    head = _first_lines(data := _contents(path), path)
    if not head:
        raise ValueError(f"{path} is empty: there is no row in it")
    separator = "\t" if inner_suffix(path) in (".tsv", ".inter") else _separator(head[0])
    names = head[0].split("::") if separator == "::" else _header(data, separator)
    return [name.rsplit(":", 1)[0] for name in names] if inner_suffix(path) == ".inter" else names


def _contents(path: Path) -> bytes:
    with open_bytes(path) as file:
        return file.read().removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")


def _parquet(path: Path, columns: Wanted) -> tuple[pl.DataFrame, Wanted, list[str]]:
    try:
        found = columns.found(list(pl.read_parquet_schema(path)), str(path))
        return pl.read_parquet(path, columns=found.wanted), found, []
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} is not a parquet file: {_reason(error)}") from error


def _separated(
    data: bytes, head: Sequence[str], path: Path, kind: str, columns: Wanted
) -> tuple[pl.DataFrame, Wanted, list[str]]:
    separator = "\t" if kind in ("tsv", "inter") else _separator(head[0])
    if separator == "::":
        data, separator = data.replace(b"::", b"\t"), "\t"
        head = [line.replace("::", "\t") for line in head]
    cells = [cell.strip('"') for cell in head[0].split(separator)]
    named = kind == "inter" or columns.by_name or (not columns.by_position and not any(map(_is_number, cells)))
    try:
        table = pl.read_csv(io.BytesIO(data), has_header=named, **_how(data, separator))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} cannot be read as a table: {_bad_line(data, separator) or _reason(error)}") from error
    names = _header(data, separator) if named else [str(n) for n in range(table.width)]
    table = _without_blank_lines(table)
    if kind == "inter":
        names = [name.rsplit(":", 1)[0] for name in names]
    found = columns.found(names, str(path))
    table = pl.DataFrame([table.to_series(names.index(name)).alias(name) for name in found.wanted])
    notes: list[str] = []
    if not named and isinstance(found, Columns):
        time = "none" if found.time is None else f"column {found.time}"
        notes.append(
            f"{path.name} has no header: user is column {found.user}, item {found.item}, time {time} (counted from 0)"
        )
    return table, found, notes


def _header(data: bytes, separator: str) -> list[str]:
    """Column names as in the file: polars renames repeated ones."""
    first = pl.read_csv(io.BytesIO(data), has_header=False, n_rows=1, **_how(data, separator))
    return [name or "" for name in first.row(0)]


def _how(data: bytes, separator: str) -> dict[str, Any]:
    """Options for polars: all cells are text, and quotes count only where one begins a field.

    polars takes any quote for the start of a quoted part: `12" disc` would join this line and the next ones.
    """
    quoted = data.startswith(b'"') or b'\n"' in data or f'{separator}"'.encode() in data
    return {"separator": separator, "quote_char": '"' if quoted else None, "infer_schema_length": 0}


def _without_blank_lines(table: pl.DataFrame) -> pl.DataFrame:
    """The table without rows that have no cell, or a first one of spaces: polars makes them of blank lines."""
    first, *others = table.get_columns()
    blank = pl.repeat(True, len(first), eager=True)
    for column in others:
        blank &= column.is_null()
    if blank.any():
        blank &= first.is_null() | (first.str.strip_chars() == "")
    return table.filter(~blank) if blank.any() else table


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
        raise ValueError(f"{path} cannot be read as lines of text: {_reason(error)}") from error
    words = lines["line"].drop_nulls().str.extract_all(r"\S+")
    notes = []
    if len(words) and is_header(words[0].to_list()):
        notes.append(f"the first line of {path.name} is a header and is skipped")
        words = words[1:]
    lengths = words.list.len()
    if alone := int((lengths == 1).sum()):
        notes.append(f"{alone} lines of {path.name} have a user and no item")
    words = words.filter(lengths > 1)
    table = pl.DataFrame({"user": words.list.first(), "item": words.list.slice(1)}).explode("item")
    return table, Columns("user", "item", None), notes


def _first_lines(data: bytes, path: Path) -> list[str]:
    """The first lines that are not empty, at most _LOOK_AT."""
    _check_utf8(data, path)
    lines = data[: 1 << 20].split(b"\n")[:_LOOK_AT]
    if len(lines) > 1 and len(data) > 1 << 20:
        lines.pop()  # the last one may be cut
    return [line.decode().rstrip("\r") for line in lines if line.strip()]


def _check_utf8(data: bytes, path: Path) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} in line {line}") from error


def _bad_line(data: bytes, separator: str) -> str | None:
    """Describe the first line that has more fields than the header; None if there is none."""
    rows = csv.reader(io.StringIO(data.decode()), delimiter=separator)
    expected = len(next(rows, []))
    try:
        for row in rows:
            if row and len(row) > expected:
                return f"line {rows.line_num} has {len(row)} fields, the first line {expected}"
    except csv.Error as error:
        return f"line {rows.line_num}: {error}"
    return None


def _guess_format(head: Sequence[str], path: Path) -> str:
    """Guess the format of a text file whose name does not say it."""
    separator = _separator(head[0])
    if separator != " " and len(columns := {line.count(separator) for line in head}) == 1 and columns.pop() > 1:
        return "csv"  # three or more columns
    fields = {len(line.split()) for line in head}
    if len(head) > 1 and len(fields) == 1 and fields.isdisjoint({1, 2}):
        raise ValueError(
            f"every line of {path} has {fields.pop()} fields: a table, or a user and items? Choose format csv or lines"
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
