"""Files that may be compressed: `a.csv`, `a.csv.gz` and `a.csv.xz` are read alike."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def inner_suffix(path: Path) -> str:
    """The ending that says what is inside: `.jsonl` for both `a.jsonl` and `a.jsonl.gz`."""
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    return inner.suffix.lower()


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """For reading. What turns out to be damaged is named."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} does not decompress: {error}") from error
