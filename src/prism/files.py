"""Read and write files safely: atomic writes, compressed input, manifests with hashes, saved states.

Files and folders are either complete or absent, even if the machine stops during a write: write under a temporary name,
sync, rename, sync the parent folder. A reader never sees a partial file. A killed writer leaves only a temporary name,
which no reader opens and the next writer removes.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NO_SPACE, NO_PERMISSION = "No space left on device", "permission denied"
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to disk."""
    if path.is_dir() and os.name != "posix":  # only POSIX systems can sync a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: it holds either its old content or all of the new."""
    partial = path.with_name(f".{path.name}.partial")
    check_parent(path)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(partial)
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # frees the space on a full disk
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # the system names the partial file, or none
        raise
    sync(path.parent)


def check_parent(path: Path) -> None:
    """Raise FileNotFoundError for a file in a folder that does not exist."""
    if not path.parent.exists():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in: create it first")


def check_target(path: Path, folder: bool, name: str = "output") -> Path:
    """Raise ValueError for a path that cannot be written, before anything is computed; returns the path.

    Args:
        path: a file, or a folder to write files into; it need not exist.
        folder: whether the path is a folder.
        name: the argument that gave the path, for the message.
    """
    if folder and path.exists() and not path.is_dir():
        raise ValueError(f"{name} must be a folder, but {path} is a file")
    if not folder and path.is_dir():
        raise ValueError(f"{name} must be a file, but {path} is a folder")
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} cannot be written: it is a broken link")
    candidates = [path.absolute(), *path.absolute().parents]
    above = next(parent for parent in (candidates if folder else candidates[1:]) if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{path} cannot be written: {above} is a file")
    try:  # permission bits are not enough: /proc has them and accepts no file
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {reason(error)}; choose another path for {name}") from error
    return path


def reason(error: BaseException) -> str:
    """Why something could not be written: one phrase per cause, whichever error the system raised for it."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _SPACE_ERRORS or "No space left" in str(error):
        return NO_SPACE
    if number in _PERMISSION_ERRORS:
        return NO_PERMISSION
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def json_bytes(value: Any) -> bytes:
    """A value as indented JSON with a final newline."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(path, json_bytes(value))


def read_json(path: Path) -> Any:
    """Parse a JSON file; ValueError names a damaged one."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def fresh_folder(path: Path) -> Path:
    """Create an empty folder; leftovers of a killed writer are removed."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def commit_folder(partial: Path, final: Path) -> None:
    """Sync everything in `partial`, then rename it to `final`."""
    _sync_all(partial)
    partial.rename(final)
    sync(final.parent)


def replace_folder(partial: Path, final: Path) -> None:
    """`commit_folder` that replaces an existing `final`. The old folder keeps its name until the new one is complete."""
    _sync_all(partial)
    trash = _trash_name(final)
    if final.exists():
        final.rename(trash)
    partial.rename(final)
    sync(final.parent)
    if trash.exists():
        shutil.rmtree(trash)


@contextmanager
def whole_folder(final: Path, what: str) -> Iterator[Path]:
    """Yield an empty folder that replaces `final` when the block ends; if the block fails, it is removed.

    Args:
        what: what the folder holds, for the error message.
    """
    partial = fresh_folder(final.with_name(f".{final.name}.partial"))
    try:
        yield partial
        replace_folder(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)  # free the space on a full disk
        why = reason(error)
        if why not in (NO_SPACE, NO_PERMISSION):
            raise
        advice = "free some space" if why == NO_SPACE else "choose another path"
        raise OSError(f"{what} could not be written to {final} ({why}): {advice} and try again") from error


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so that an interrupted removal leaves nothing that looks complete."""
    trash = _trash_name(path)
    path.rename(trash)
    shutil.rmtree(trash)


def _trash_name(path: Path) -> Path:
    """The temporary name of a folder during its removal; leftovers of an interrupted removal are deleted."""
    trash = path.with_name(f".{path.name}.removed")
    if trash.exists():
        shutil.rmtree(trash)
    return trash


def _sync_all(folder: Path) -> None:
    """Sync a folder and everything in it."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


# Files that may be compressed: `a.csv`, `a.csv.gz` and `a.csv.xz` are read in the same way.

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def inner_suffix(path: Path) -> str:
    """The suffix of the uncompressed file: `.jsonl` for both `a.jsonl` and `a.jsonl.gz`."""
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    return inner.suffix.lower()


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed by its suffix; ValueError names one that does not decompress."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} does not decompress: {error}") from error


# Manifests detect damage: size and SHA-256 of the files in a folder, and a hash of the manifest itself.

MANIFEST = "manifest.json"
Entries = dict[str, dict[str, Any]]


def entry(path: Path) -> dict[str, Any]:
    """The manifest entry of one file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(folder: Path, files: Entries) -> None:
    """Write the manifest of a folder; `files` are entries by file name relative to it."""
    write_json(folder / MANIFEST, _signed(files))


def seal_weights(folder: Path) -> None:
    """Write a manifest of a model folder's weights, for `check_weights`.

    Only weights are listed: configuration, tokenizer and README may be edited.
    """
    write_manifest(folder, entries(folder, sorted(folder.glob("*.safetensors"))))


def check_weights(folder: Path) -> None:
    """Raise ValueError if a model folder's weights differ from its manifest. A folder without one is not checked."""
    if not (folder / MANIFEST).exists():
        return
    damage = find_damage(folder)
    if damage is not None:
        raise ValueError(
            f"the model in {folder} is damaged: {damage}; export or copy it again, or remove {MANIFEST} if the change "
            "is intended"
        )


def entries(folder: Path, paths: Iterable[Path]) -> Entries:
    """Manifest entries of files, by their path relative to the folder."""
    return {path.relative_to(folder).as_posix(): entry(path) for path in paths}


def find_damage(folder: Path) -> str | None:
    """Describe the first file that is missing or differs in size or SHA-256 from the manifest; None if all match."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_json(path)
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if manifest != _signed(manifest["files"]) or path.read_bytes() != json_bytes(manifest):
        return f"{MANIFEST} does not match its SHA-256"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != digest:
            return f"{name} does not match its SHA-256"
    return None


def _signed(files: Entries) -> dict[str, Any]:
    """The manifest's content: the entries of the files, and a hash of these entries."""
    files = dict(sorted(files.items()))
    return {"files": files, "sha256": hashlib.sha256(json_bytes(files)).hexdigest()}


# Saved states: one safetensors file whose metadata names its format. torch is imported only by these functions: commands
# use this module, and `prism --help` must not wait for it.


def check_state_target(path: Path, name: str) -> None:
    """Raise an error for a path that cannot hold a state file; `name` is the argument that gave it."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{name} must be a file name that ends in .safetensors, got {path}")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save the state in")
    check_target(path, folder=False, name=name)


def write_state(path: Path, format: str, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a state file atomically. `format` must be given again to `read_state`; `about` is further metadata."""
    from safetensors.torch import save

    held = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}  # clones share no storage
    write_atomically(path, save(held, {"format": format, **about}))


def read_state(path: Path, format: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state file, on the CPU, and its metadata."""
    from safetensors import SafetensorError, safe_open

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
    """The cache folder: `$PRISM_CACHE`, or `prism` in the user's cache folder."""
    given = os.environ.get("PRISM_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prism"


def not_there(source: str) -> str:
    """The message for a missing source; a relative path is reported with the current folder."""
    relative = not Path(source).expanduser().is_absolute()
    return f"there is no file or folder {source}" + (f" in {Path.cwd()}" if relative else "")
