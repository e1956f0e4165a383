"""A log made ready once: arrays and JSON in a folder, found again by whoever comes second.

    log/
      events.safetensors       offsets, items, times: the Histories
      items.json               the items' own ids, and their features
      users.json               the users' own ids
      manifest.json            what was read and what was dropped, and one digest for all of it

The folder is found by everything it depends on. It appears whole or not at all, and opening it needs no polars.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from prism.data.files import check_target, commit_folder, fresh_folder, json_bytes, read_json
from prism.data.interactions.histories import Histories
from prism.data.interactions.ids import Catalogue, Users
from prism.data.prepare import default_cache
from prism.data.text import not_there

FORMAT = 1
VERSION = 2
"""Raise it when the same log would give other arrays: old caches are then no longer found."""
EVENTS, ITEMS, USERS, MANIFEST = "events.safetensors", "items.json", "users.json", "manifest.json"


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
    min_user: int = 1
    """Leave out users with fewer events than this, and items with fewer than min_item, until both hold."""
    min_item: int = 1
    """Leave out items with fewer events than this."""
    synthetic: Synthetic = field(default_factory=Synthetic)


@dataclass(frozen=True)
class Prepared:
    """A log as arrays. `manifest` says how it came about: recipe, counts, notes."""

    histories: Histories
    catalogue: Catalogue
    users: Users
    manifest: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def num_items(self) -> int:
        return len(self.catalogue)

    @property
    def digest(self) -> str:
        """One hash for events, items and users: what a resumed run must find unchanged."""
        stored = self.manifest.get("digest")
        return stored if stored is not None else _digest(self._contents())

    def summary(self) -> list[str]:
        """What is in it and what reading it found, a sentence a line."""
        found = {"duplicates": 0, "duplicates_dropped": 0, "events_dropped": 0, **self.manifest.get("counts", {})}
        lines = [f"{len(self.histories.items):,} events of {len(self.users):,} users with {self.num_items:,} items"]
        if found["duplicates"]:
            what = "dropped" if found["duplicates_dropped"] else "kept"
            lines.append(f"{found['duplicates']:,} events repeat an earlier one and are {what}")
        if found["events_dropped"]:
            without = f"{found['users_dropped']:,} users and {found['items_dropped']:,} items with too few events"
            lines.append(f"{found['events_dropped']:,} events are left out with {without}")
        return [*lines, *self.manifest.get("notes", [])]

    def save(self, folder: Path) -> Prepared:
        """Write a folder that must not exist yet; returns what `open_prepared` would."""
        if folder.exists():
            raise ValueError(f"{folder} exists already")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = fresh_folder(folder.with_name(f".{folder.name}.partial"))
        contents = self._contents()
        manifest = {"format": FORMAT, **self.manifest, "digest": _digest(contents)}
        for name, content in {**contents, MANIFEST: json_bytes(manifest)}.items():
            (partial / name).write_bytes(content)
        commit_folder(partial, folder)
        return Prepared(self.histories, self.catalogue, self.users, manifest, folder)

    def _contents(self) -> dict[str, bytes]:
        return {
            EVENTS: self.histories.to_bytes(),
            ITEMS: self.catalogue.to_bytes(),
            USERS: self.users.to_bytes(),
        }


def open_prepared(folder: Path, verify: bool = True) -> Prepared:
    """A folder that `Prepared.save` or `prepare_log` wrote; `verify` compares its contents with their digest."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    missing = [name for name in (MANIFEST, EVENTS, ITEMS, USERS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not a prepared log: it has no {', '.join(missing)}")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{folder / MANIFEST} is not a log's manifest of format {FORMAT}")
    if verify:
        contents = {name: (folder / name).read_bytes() for name in (EVENTS, ITEMS, USERS)}
        if _digest(contents) != manifest["digest"]:
            raise ValueError(f"the prepared log in {folder} is damaged: remove the folder and it is made again")
    histories = Histories.load(folder / EVENTS)
    return Prepared(histories, Catalogue.load(folder / ITEMS), Users.load(folder / USERS), manifest, folder)


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
        from prism.data.interactions.synthetic import synthetic_log

        made = synthetic_log(**asdict(recipe.synthetic))
    else:
        from prism.data.interactions.core import k_core
        from prism.data.interactions.read import Columns, read_log

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


def _digest(contents: dict[str, bytes]) -> str:
    lines = [f"{name} {hashlib.sha256(content).hexdigest()}" for name, content in sorted(contents.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
