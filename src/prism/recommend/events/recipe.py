"""Settings of the events: what is read and how, prepared once and kept in a cache folder.

The name of a cached folder is a hash of everything that the arrays depend on.
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
from prism.recommend.events.dataset import MANIFEST, Dataset, open_dataset
from prism.recommend.events.histories import NO_SEQUENCE, Histories
from prism.recommend.events.split import Split, global_time, leave_one_out
from prism.recommend.events.synthetic import synthetic_dataset

VERSION = 2
"""Raise it when the same events would give other arrays: old cache entries are then ignored."""
_FILES = ("items", "item_vectors", "users")
"""Settings that name tables."""


@dataclass(frozen=True)
class Synthetic:
    """Size and seed of the synthetic events, which are used when no source is given; see synthetic.py."""

    users: int = 600
    """Number of users."""
    items: int = 400
    """Number of items to choose from."""
    events: int = 40_000
    """Number of events in total."""
    seed: int = 0
    """Seed of the events."""


@dataclass(frozen=True)
class EventRecipe:
    """Everything that the arrays depend on."""

    source: str | None = None
    """File of events: csv, tsv, parquet, RecBole's .inter, or lines "user item item …" (text also as .gz or .xz).
    Or a folder of parquet parts, which together may be larger than memory, or of prepared events. None: synthetic events
    of users whose interests drift."""
    format: str = "auto"
    """File format: auto, csv, tsv, inter, parquet or lines. auto: from the file name and the first lines."""
    user: str = "auto"
    """Column of the users. auto: found by its usual names."""
    item: str = "auto"
    """Column of the items. auto: found by its usual names."""
    time: str | None = "auto"
    """Column of the times. auto: found by its usual names. None: the events are already in order."""
    features: tuple[str, ...] = ()
    """Columns that describe the item (a category, a list of genres, a vector), of data.items or of the events; the model
    learns an embedding of each value."""
    items: str | None = None
    """Table with one row per item, for columns of data.features: csv, tsv or parquet."""
    item_vectors: str | None = None
    """Vectors of the items, such as those of texts or images: parquet with the item's id and a column of lists, or .npy or
    .safetensors with one row for each row of data.items."""
    users: str | None = None
    """Table with one row per user, for columns of data.user_features: csv, tsv or parquet."""
    user_features: tuple[str, ...] = ()
    """Columns that describe the user (a country, an age group), of data.users or of the events."""
    list_separator: str | None = None
    """Splits texts of features into lists of values: | for Action|Comedy. None: a text is one value."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Keep or drop events that repeat user, item and time of an earlier one."""
    min_user: int = field(default=1, metadata={"min": 1})
    """Drop users with fewer events than this (repeated together with min_item until both hold)."""
    min_item: int = field(default=1, metadata={"min": 1})
    """Drop items with fewer events than this."""
    synthetic: Synthetic = field(default_factory=Synthetic)


@dataclass(frozen=True)
class RecDataSettings(EventRecipe):
    """Where the events come from, what describes items and users, and what is held out."""

    split: Literal["leave_one_out", "global_time"] = "leave_one_out"
    """What is held out.
    leave_one_out: each user's last event for test, the one before for validation.
    global_time: all events after a point in time."""
    valid_from: float | None = None
    """global_time: start of validation, in the unit of the time column. None: where the last fifth of the events begins."""
    test_from: float | None = None
    """global_time: start of the test. None: where the last tenth of the events begins."""
    length: int = field(default=50, metadata={"min": 1})
    """Events per training sample, and most events of a history that are read when ranking."""
    order: Literal["windows", "last"] = "windows"
    """windows: whole histories, cut into samples of that length. last: only the last sample of each user, as in SASRec."""
    cache: Path | None = None
    """Folder for prepared events. None: $PRISM_CACHE, or prism in the user's cache folder."""
    verify: bool = True
    """Check the prepared events against their hash before every run."""

    def recipe(self) -> EventRecipe:
        """The part of the settings that decides which events are read."""
        return EventRecipe(**{part.name: getattr(self, part.name) for part in fields(EventRecipe)})

    def split_of(self, histories: Histories) -> Split:
        """Split histories into what is learned from and what is held out."""
        if self.split == "leave_one_out":
            return leave_one_out(histories)
        return global_time(histories, self.valid_from, self.test_from)


def prepare_dataset(
    recipe: EventRecipe,
    cache: Path | None = None,
    verify: bool = True,
    report: Callable[[str], None] = lambda message: None,
    any_length: bool = False,
) -> Dataset:
    """Open the dataset of a recipe; make it first if it is not in the cache.

    Args:
        cache: folder for prepared datasets.
        verify: compare the cached files with their digest.
        report: called with a message when events are read.
        any_length: accept events of which no user has two.
    """
    source = None if recipe.source is None else Path(recipe.source).expanduser()
    if source is not None and source.is_dir() and not (parts := parquet_parts(source)):
        return open_dataset(source, verify)
    if source is not None and not source.exists():
        raise FileNotFoundError(not_there(str(recipe.source)))
    for table in (recipe.items, recipe.item_vectors, recipe.users):
        if table is not None and not Path(table).expanduser().is_file():
            raise FileNotFoundError(not_there(table))
    cache = check_target((cache or default_cache()) / "logs", folder=True, name="data.cache")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / _key(recipe, source)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            report(f"reading {'synthetic events' if source is None else source} (once)")
            if source is not None and source.is_dir():
                from prism.recommend.events.large import prepare_parts  # imports polars

                prepare_parts(recipe, parts, folder, report, any_length)
            else:
                make_dataset(recipe, source, any_length=any_length).save(folder)
    dataset = open_dataset(folder, verify)
    if not any_length and dataset.histories.lengths.max(initial=0) < 2:  # prepared where any length would do
        raise ValueError(NO_SEQUENCE)
    return dataset


def parquet_parts(folder: Path) -> list[Path]:
    """The parquet files of a folder in the order of their names; none if it holds prepared events."""
    if (folder / MANIFEST).is_file():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in (".parquet", ".pq"))


def make_dataset(recipe: EventRecipe, source: Any, tables: Any = None, any_length: bool = False) -> Dataset:
    """Make the dataset of a recipe without caching it.

    Args:
        source: a file, a polars or pandas DataFrame, or None for synthetic events.
        tables: `features.Tables` that are in memory, instead of the files that the recipe names.
        any_length: accept events of which no user has two.
    """
    came_from: dict[str, Any] = {}
    if source is None:
        made = synthetic_dataset(**asdict(recipe.synthetic))
    else:
        from prism.recommend.events.event_table import k_core, read_events  # imports polars
        from prism.recommend.events.features import describe, sources
        from prism.recommend.events.origin import origin

        given = sources(recipe, tables)
        table = read_events(
            source, given.events, format=recipe.format, duplicates=recipe.duplicates, separator=recipe.list_separator
        )
        made = k_core(table, users=recipe.min_user, items=recipe.min_item).to_dataset(any_length)
        made = describe(made, given, recipe.list_separator)
        came_from = {"origin": origin(source, given.events, {"user": made.users, "item": made.catalogue})}
    manifest = {**made.manifest, **came_from, "recipe": asdict(recipe)}
    return Dataset(made.histories, made.catalogue, made.users, manifest)


def _key(recipe: EventRecipe, source: Path | None) -> str:
    """The cache key: a file is the same as long as its path, size and modification time are."""
    what: dict[str, Any] = asdict(recipe)
    for name in _FILES:
        if what[name] is not None:
            what[name] = _mark(Path(what[name]).expanduser())
    if source is not None:
        what["source"] = [_mark(part) for part in parquet_parts(source)] if source.is_dir() else _mark(source)
        del what["synthetic"]
    return hashlib.sha256(json.dumps([VERSION, what]).encode()).hexdigest()[:20]


def _mark(path: Path) -> list[Any]:
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
