"""Files that may be compressed: `a.csv`, `a.csv.gz` and `a.csv.xz` are read alike."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path
from typing import IO, Any

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def inner_suffix(path: Path) -> str:
    """The ending that says what is inside: `.jsonl` for both `a.jsonl` and `a.jsonl.gz`."""
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    return inner.suffix.lower()


def open_bytes(path: Path) -> IO[bytes]:
    file: IO[bytes] = _OPENERS.get(path.suffix, open)(path, "rb")
    return file
