"""From a recipe to prepared arrays: which log is read and how, made once and found again in a cache folder.

The folder's name is a hash of everything that the arrays depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from prism.files import check_target, default_cache, not_there
from prism.recommend.events.dataset import Prepared, open_prepared
from prism.recommend.events.histories import Histories
from prism.recommend.events.split import Split, global_time, leave_one_out
from prism.recommend.events.synthetic import synthetic_log

VERSION = 2
"""Raise it when the same log would give other arrays: old caches are then no longer found."""


@dataclass(frozen=True)
class Synthetic:
    """Sizes of the log that is made up where none is given; see synthetic.py."""

    users: int = 600
    items: int = 400
    events: int = 40_000
    seed: int = 0


@dataclass(frozen=True)
class LogRecipe:
    """Everything that decides which arrays come out."""

    source: str | None = None
    """A log: csv, tsv, parquet, RecBole's .inter, lines of "user item" or "user item item …" (texts also as .gz and .xz), or
    a folder that was prepared from one. None: a synthetic log of users whose interests drift."""
    format: str = "auto"
    """Of the log, if its name and first line do not tell."""
    user: str = "auto"
    """The column with the users."""
    item: str = "auto"
    """The column with the items."""
    time: str | None = "auto"
    """The column with the times; None: the log is in order as it is."""
    features: tuple[str, ...] = ()
    """Columns that say something of the item (a category, a brand) for the model to know."""
    duplicates: Literal["keep", "drop"] = "keep"
    """What to do with an event that has user, item and time of another."""
    min_user: int = field(default=1, metadata={"min": 1})
    """Leave out users with fewer events than this, and items with fewer than min_item, until both hold."""
    min_item: int = field(default=1, metadata={"min": 1})
    """Leave out items with fewer events than this."""
    synthetic: Synthetic = field(default_factory=Synthetic)


@dataclass(frozen=True)
class RecDataSettings(LogRecipe):
    split: Literal["leave_one_out", "global_time"] = "leave_one_out"
    """What is held out: every user's last event to test and the one before it to validate, or all events after a time."""
    valid_from: float | None = None
    """global_time: validation starts at this moment of the log's clock; None: where the last fifth of the events begins."""
    test_from: float | None = None
    """global_time: the test starts at this moment; None: where the last tenth of the events begins."""
    length: int = field(default=50, metadata={"min": 1})
    """Events in a training sample, and how many of a history are read when it is ranked for."""
    order: Literal["windows", "last"] = "windows"
    """windows: whole histories, cut into stretches of that length; last: only the last stretch of each, as in SASRec."""
    cache: Path | None = None
    """Where prepared logs are kept; None: $PRISM_CACHE, or prism in the user's cache folder."""
    verify: bool = True
    """Compare the prepared log with its hash before every run."""

    def recipe(self) -> LogRecipe:
        """The part that decides which events come out."""
        return LogRecipe(**{part.name: getattr(self, part.name) for part in fields(LogRecipe)})

    def split_of(self, histories: Histories) -> Split:
        """What is learned from and what is held out."""
        if self.split == "leave_one_out":
            return leave_one_out(histories)
        return global_time(histories, self.valid_from, self.test_from)


def prepare_log(
    recipe: LogRecipe,
    cache: Path | None = None,
    verify: bool = True,
    report: Callable[[str], None] = lambda message: None,
) -> Prepared:
    """The arrays of a recipe, made now if no one has made them before.

    Args:
        cache: the folder that keeps them.
        verify: compare what is found there with its digest.
        report: is told when a log is read.
    """
    source = None if recipe.source is None else Path(recipe.source).expanduser()
    if source is not None and source.is_dir():
        return open_prepared(source, verify)
    if source is not None and not source.is_file():
        raise FileNotFoundError(not_there(str(recipe.source)))
    cache = check_target((cache or default_cache()) / "logs", folder=True, name="data.cache")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / _key(recipe, source)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            report(f"reading {'the synthetic log' if source is None else source}, once")
            make_log(recipe, source).save(folder)
    return open_prepared(folder, verify)


def make_log(recipe: LogRecipe, source: Any) -> Prepared:
    """The arrays, made now and kept nowhere; source is a file, a polars or pandas DataFrame, or None: the synthetic log."""
    if source is None:
        made = synthetic_log(**asdict(recipe.synthetic))
    else:
        from prism.recommend.events.read import Columns, read_log
        from prism.recommend.events.table import k_core  # works on polars' tables

        columns = Columns(recipe.user, recipe.item, recipe.time, recipe.features)
        log = read_log(source, columns, format=recipe.format, duplicates=recipe.duplicates)
        made = k_core(log, users=recipe.min_user, items=recipe.min_item).prepare()
    return Prepared(made.histories, made.catalogue, made.users, {**made.manifest, "recipe": asdict(recipe)})


def _key(recipe: LogRecipe, source: Path | None) -> str:
    """A file counts as the same while its place, size and time stay."""
    what: dict[str, Any] = asdict(recipe)
    if source is not None:
        what["source"] = [str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns]
        del what["synthetic"]
    return hashlib.sha256(json.dumps([VERSION, what]).encode()).hexdigest()[:20]
