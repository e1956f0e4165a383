"""Files that are either complete or absent, whatever happens to the machine while they are written.

The recipe is always the same: write under a temporary name, sync, rename, sync the folder. A reader therefore never meets
half a file, and what a killed writer leaves behind has a name that nobody reads and the next writer removes.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import lzma
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

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


# Files that may be compressed: `a.csv`, `a.csv.gz` and `a.csv.xz` are read alike.

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


# Manifests: size and SHA-256 of files in a folder, in a file that is hashed itself, so that damage is noticed.

MANIFEST = "manifest.json"
Entries = dict[str, dict[str, Any]]


def entry(path: Path) -> dict[str, Any]:
    """What a manifest says of one file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(folder: Path, files: Entries) -> None:
    """Write the manifest of a folder; `files` are entries by file name relative to it."""
    write_json(folder / MANIFEST, _signed(files))


def seal_weights(folder: Path) -> None:
    """Write a manifest of a model folder's weights, for `check_weights`.

    Only of the weights: configuration, tokenizer and README are for people to edit.
    """
    write_manifest(folder, entries(folder, sorted(folder.glob("*.safetensors"))))


def check_weights(folder: Path) -> None:
    """Refuse a model folder whose weights differ from its manifest; a folder without one is not checked."""
    if not (folder / MANIFEST).exists():
        return
    damage = find_damage(folder)
    if damage is not None:
        raise ValueError(
            f"the model in {folder} is damaged: {damage}; export or copy it again, or remove {MANIFEST} if the change "
            "is meant"
        )


def entries(folder: Path, paths: Iterable[Path]) -> Entries:
    """Entries of files in a folder, by name relative to it."""
    return {path.relative_to(folder).as_posix(): entry(path) for path in paths}


def find_damage(folder: Path) -> str | None:
    """The first file that is missing or differs in size or SHA-256 from the manifest, in words; None if all is well."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_json(path)
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if manifest != _signed(manifest["files"]) or path.read_bytes() != json_bytes(manifest):
        return f"{MANIFEST} does not have its SHA-256"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != digest:
            return f"{name} does not have its SHA-256"
    return None


def _signed(files: Entries) -> dict[str, Any]:
    """The manifest's content: it vouches for the files, and a hash in it for the manifest."""
    files = dict(sorted(files.items()))
    return {"files": files, "sha256": hashlib.sha256(json_bytes(files)).hexdigest()}


# The state of something that goes on later, as one safetensors file that says what it is.


def check_state_target(path: Path, name: str) -> None:
    """Refuse a place for a state file before the work; `name` is the argument that gave it."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{name} must be a file name that ends in .safetensors, got {path}")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save the state in")
    check_target(path, folder=False, name=name)


def write_state(path: Path, format: str, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """The file is written whole or not at all. `format` is what `read_state` will ask for."""
    held = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}  # clones share nothing
    write_atomically(path, save(held, {"format": format, **about}))


def read_state(path: Path, format: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on the CPU, and what was said about them."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no state file {path}")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a saved state: {error}") from error
    if about.get("format") != format:
        raise ValueError(f"{path} is not a saved state of the kind {format!r}")
    return tensors, about


def default_cache() -> Path:
    """`$PRISM_CACHE`, or `prism` in the user's cache folder."""
    given = os.environ.get("PRISM_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prism"


def not_there(source: str) -> str:
    """The sentence for a missing source; of a relative one, it says relative to what."""
    relative = not Path(source).expanduser().is_absolute()
    return f"there is no file or folder {source}" + (f" in {Path.cwd()}" if relative else "")
