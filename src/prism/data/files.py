"""Files that are either complete or absent, whatever happens to the machine while they are written.

The recipe is always the same: write under a temporary name, sync, rename, sync the folder. A reader therefore never meets
half a file, and what a killed writer leaves behind has a name that nobody reads and the next writer removes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NO_SPACE, NO_PERMISSION = "No space left on device", "there is no permission to"
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    if path.is_dir() and os.name != "posix":  # only POSIX systems can sync a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file holds either what it held before or all of `content`."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def check_target(path: Path, folder: bool, name: str = "output") -> Path:
    """Refuse a place that cannot be written, before anything is computed.

    Args:
        path: a file, or a folder that files go into; neither must exist yet.
        folder: which of the two it is.
        name: the argument that gave it.
    """
    if folder and path.exists() and not path.is_dir():
        raise ValueError(f"{name} must be a folder, and {path} is a file")
    if not folder and path.is_dir():
        raise ValueError(f"{name} must be a file, and {path} is a folder")
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} cannot be written: it is a link to nowhere")
    places = [path.absolute(), *path.absolute().parents]
    above = next(place for place in (places if folder else places[1:]) if place.exists())
    if not above.is_dir():
        raise ValueError(f"{path} cannot be written: {above} is a file")
    try:  # permissions alone do not tell: /proc has them, and takes no file
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {reason(error)}; give another place for {name}") from error
    return path


def reason(error: BaseException) -> str:
    """Why something could not be written, in words: one sentence for one cause, whatever the system calls it."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _SPACE_ERRORS or "No space left" in str(error):
        return NO_SPACE
    if number in _PERMISSION_ERRORS:
        return NO_PERMISSION
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json_bytes(value))


def read_json(path: Path) -> Any:
    """The parsed file; a damaged one is refused by name."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def fresh_folder(path: Path) -> Path:
    """An empty folder under this name; what a killed writer left there is removed."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def commit_folder(partial: Path, final: Path) -> None:
    """Sync everything in `partial`, then give it its final name."""
    _sync_all(partial)
    partial.rename(final)
    sync(final.parent)


def replace_folder(partial: Path, final: Path) -> None:
    """`commit_folder` in place of what may have the name: that keeps it until the new one is whole, and is removed last."""
    _sync_all(partial)
    doomed = _nobodys(final)
    if final.exists():
        final.rename(doomed)
    partial.rename(final)
    sync(final.parent)
    if doomed.exists():
        shutil.rmtree(doomed)


@contextmanager
def whole_folder(final: Path, what: str) -> Iterator[Path]:
    """An empty folder to fill, which replaces `final` when the block ends; if the block fails, nothing is left of it.

    Args:
        what: what the folder holds, for the sentence that says it could not be written.
    """
    partial = fresh_folder(final.with_name(f".{final.name}.partial"))
    try:
        yield partial
        replace_folder(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk every byte is wanted
        why = reason(error)
        if why not in (NO_SPACE, NO_PERMISSION):
            raise
        advice = "free some space" if why == NO_SPACE else "give another place"
        raise OSError(f"{what} could not be written to {final} ({why}): {advice} and try again") from error


def remove_folder(path: Path) -> None:
    """Take the name away first: a removal cut short leaves nothing that looks whole."""
    doomed = _nobodys(path)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _nobodys(path: Path) -> Path:
    """The name of a folder that is being removed; what a removal cut short left there goes."""
    doomed = path.with_name(f".{path.name}.removed")
    if doomed.exists():
        shutil.rmtree(doomed)
    return doomed


def _sync_all(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)
