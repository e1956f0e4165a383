"""Read documents from files, folders, a dataset hub or the Python standard library.

A document is an iterable of pieces of text, read lazily. A text file is one document, in pieces of about a megabyte that
end with a line; a row of a jsonl or parquet file is one document of one piece. The order is fixed (folders are sorted by
name), so the same files always give the same tokens.
"""

from __future__ import annotations

import codecs
import json
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prism.files import inner_suffix, not_there, open_bytes
from prism.language.tokenizer import check_unicode

Document = Iterable[str]

PIECE_BYTES = 1 << 20
HUB = "hub:"
_ROWS = (".jsonl", ".ndjson", ".parquet")
_IN_FOLDERS = (".txt", ".text", ".md", *_ROWS)
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _NOT_LIBRARY & set(path.relative_to(root).parts[:-1]))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def find_files(sources: Iterable[str], pattern: str | None = None, pattern_flag: str | None = None) -> list[Path]:
    """All files of the sources; folders are searched for text, jsonl and parquet files, or for `pattern` (a glob).

    Args:
        pattern_flag: the flag that gives a pattern, named in the error for a folder without such files.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if not path.exists():
            raise FileNotFoundError(not_there(source))
        if not path.is_dir():
            found.append(path)
            continue
        inside = path.rglob(pattern or "*")
        files = [file for file in inside if file.is_file() and (pattern or inner_suffix(file) in _IN_FOLDERS)]
        if not files:
            raise ValueError(f"the folder {source} holds no {_wanted(path, pattern, pattern_flag)}")
        found += sorted(files, key=lambda file: file.relative_to(path).as_posix())
    return found


def _wanted(folder: Path, pattern: str | None, flag: str | None) -> str:
    """What a folder has no file of, for the message; and how to read the files that it has."""
    if pattern:
        return f"file that matches {pattern!r}"
    endings = Counter(file.suffix for file in folder.rglob("*") if file.is_file() and file.suffix)
    usual = f"file that ends in {', '.join(_IN_FOLDERS)} (or one of these with .gz or .xz)"
    if not endings:
        return usual
    others = f"*{endings.most_common(1)[0][0]}"
    how = f"give the files themselves: {folder / others}" if flag is None else f"give a pattern: {flag} '{others}'"
    return f"{usual}; to read others, {how}"


def documents(path: Path, field: str = "text") -> Iterator[Document]:
    """The documents of one file; `field` is the text column of jsonl and parquet files."""
    if inner_suffix(path) == ".parquet":
        return ([text] for text in _parquet(path, field))
    if inner_suffix(path) in _ROWS:
        return ([text] for text in _jsonl(path, field))
    return iter([_TextFile(path)])


def hub_documents(name: str, field: str = "text") -> Iterator[Document]:
    """The rows of the training split of `hub:owner/dataset` or `hub:owner/dataset:configuration`."""
    from datasets import load_dataset

    repository, _, configuration = name.removeprefix(HUB).partition(":")
    try:
        rows = load_dataset(repository, configuration or None, split="train")
    except Exception as error:  # any error of the network, the hub or the dataset
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the dataset {repository} could not be opened: {reason}") from error
    return ([_text_of(row, field, name)] for row in rows)


class _TextFile:
    """A text file as one document, in pieces that end with a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        pending, position = "", 0
        with open_bytes(self.path) as file:
            while True:
                block = file.read(PIECE_BYTES)
                waiting = len(decoder.getstate()[0])
                try:
                    pending += decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{self.path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset "
                        f"{position - waiting + error.start} does not decode"
                    ) from error
                position += len(block)
                if not block:
                    break
                end = pending.rfind("\n") + 1
                if end:
                    yield pending[:end]
                    pending = pending[end:]
        if pending:
            yield pending


def _jsonl(path: Path, field: str) -> Iterator[str]:
    """The texts of a jsonl file."""
    return (_text_of(row, field, where) for where, row in json_rows(path))


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a jsonl file, each with the words that name it in errors. Empty lines are skipped."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # covers text that is not UTF-8
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            yield f"{path}, line {number}", row


def _parquet(path: Path, field: str) -> Iterator[str]:
    """The texts of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
    if field not in file.schema_arrow.names:
        raise ValueError(f"{path} has no column {field!r}; it has {', '.join(file.schema_arrow.names)}")
    number = 0
    try:
        for batch in file.iter_batches(columns=[field]):
            for row in batch.to_pylist():
                number += 1
                yield _text_of(row, field, f"{path}, row {number}")
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is damaged after row {number}: {error}") from error


def _text_of(row: Any, field: str, where: str) -> str:
    """The text of a row; `where` names the row in errors."""
    if not isinstance(row, dict) or field not in row:
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no text under {field!r} (it has {has})")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{where} has {'nothing' if text is None else type(text).__name__} under {field!r}, not text")
    check_unicode(text, where)
    return text
