"""The run folder: its lock, its stored settings, the checks when a run resumes, and the log of metrics.

runs/lm/
  config.json        the task, its settings, and what a resumed run must match
  tokenizer.json     (a recommender: items.json and users.json)
  log.jsonl
  checkpoints/
  model/             the exported model, for transformers
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from prism.files import check_target, read_json, write_atomically, write_json
from prism.overrides import command_of, override
from prism.train.distributed import World
from prism.train.settings import RunSettings
from prism.train.task import Task
from prism.train.trackers import Trackers

CONFIG = "config.json"
HASHES = ("tokenizer", "tokens", "events", "new events", "base", "chat_template")
"""Entries of an identity that are hashes."""
_PATHS = (
    ("data", "sources"),
    ("data", "source"),
    ("data", "tokenizer"),
    ("data", "cache"),
    ("model", "weights"),
    ("base", "folder"),
    (None, "init"),
    (None, "chat_template"),
)
"""Settings that hold paths, as section and name; without a section they stand at the top."""
S = TypeVar("S", bound=RunSettings)


def stored_config(folder: Path) -> dict[str, Any] | None:
    """The contents of a run's config.json; None if the folder holds no run."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    stored = read_json(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("settings"), dict) or "task" not in stored:
        raise ValueError(f"{path} is not the config.json of a run")
    return stored


def stored_settings(folder: Path, task: str, blank: S) -> S | None:
    """The settings that the run in this folder was last started with, applied to `blank`; None if there is no run."""
    stored = stored_config(folder)
    if stored is None:
        return None
    if stored["task"] != task:
        raise ValueError(
            f"{folder} holds a run of `{command_of(stored['task'])}`, not of `{command_of(task)}`: give another folder"
        )
    return override(blank, stored["settings"], str(folder / CONFIG))


def resumed_settings(folder: Path, task: str, blank: S) -> S | None:
    """`stored_settings` with relative paths rewritten for the current folder, so that they still lead to the same files.

    Paths that no longer exist stay as they are.
    """
    settings, stored = stored_settings(folder, task, blank), stored_config(folder)
    if settings is None or stored is None:
        return None
    start = stored["started_in"]
    changes: dict[str, Any] = {}
    for section, name in _PATHS:
        value = (stored["settings"] if section is None else stored["settings"].get(section, {})).get(name)
        if isinstance(value, (str, list)):
            moved = [_relocated(each, start) for each in value] if isinstance(value, list) else _relocated(value, start)
            (changes if section is None else changes.setdefault(section, {}))[name] = moved
    return override(settings, changes, str(folder / CONFIG))


def _relocated(path: str, start: str) -> str:
    """A path relative to the folder `start`, made relative to the current folder."""
    target = Path(start) / path
    relative = not Path(path).expanduser().is_absolute()
    return os.path.relpath(target) if relative and target.exists() and not Path(start).samefile(".") else path


def check_folder(folder: Path, resume: bool) -> None:
    """Raise ValueError for a folder that this run must not write to."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give another run folder with --out")
    check_target(folder, folder=True, name="out")
    if not folder.exists() or all(path.name.startswith(".") for path in folder.iterdir()):
        return
    if not resume:
        raise ValueError(f"{folder} is not empty and --no-resume was given: give another run folder with --out")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not empty and holds no run: give another run folder with --out")


@contextmanager
def open_run(task: Task, world: World) -> Iterator[Path]:
    """Create or check the run folder, and hold its lock for the duration of the run."""
    folder, resume = task.settings.out, task.settings.resume
    identity = {"task": task.name, **task.identity()}
    lock = FileLock(folder / ".lock", timeout=0)

    def claim() -> None:
        check_folder(folder, resume)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"another process is training in {folder}") from None
        stored = stored_config(folder)
        if stored is not None:
            _check_identity(stored["identity"], identity, folder)
        else:
            store_settings(task, folder)

    try:
        world.on_main(claim)
        yield folder
    finally:
        if world.main:
            lock.release()


def store_settings(task: Task, folder: Path) -> None:
    """Write config.json and the task's files. On resuming, call it after all checks: a refused command changes nothing."""
    for name, content in task.files().items():
        write_atomically(folder / name, content)
    identity = {"task": task.name, **task.identity()}
    write_json(
        folder / CONFIG, {"task": task.name, "started_in": str(Path.cwd()), **task.config(), "identity": identity}
    )


def _check_identity(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if a resumed run would have other weights or samples than before."""
    for name, value in now.items():
        if before.get(name) != value:
            was, now_is = (f"{str(z)[:12]}…" if name in HASHES else z for z in (before.get(name), value))
            what = f"different {name} ({was}; now {now_is})" if name in HASHES else f"{name} {was}, now it is {now_is}"
            raise ValueError(
                f"the run in {folder} was started with {what}: keep it to resume, or give another run folder with --out"
            )


class Log:
    """The log of a run's metrics: one JSON object per line, and optionally trackers.

    It is opened at a step: 0, or the checkpoint that the run resumes from.

    Records after that step are dropped, so that the log reads as if the run had never been interrupted.

    Args:
        trackers: names of trackers, see trackers.py.
    """

    def __init__(self, folder: Path, step: int, trackers: Sequence[str] = ()) -> None:
        self.path = folder / "log.jsonl"
        kept = [record for record in read_log(self.path) if record["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self.path.open("a", encoding="utf-8")
        stored = stored_config(folder) if trackers else None
        self._trackers = Trackers(trackers, folder, step, None if stored is None else stored["settings"])

    def write(self, step: int, **values: Any) -> None:
        """Append a record."""
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"the log {self.path} could not be written ({error.strerror}): the checkpoints are unchanged"
            ) from error
        self._trackers.log(step, values)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:  # a full disk, already reported by `write`
            if error is None:
                raise
        finally:
            self._trackers.close(failed=error is not None)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All complete records; a line truncated by a kill is skipped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
