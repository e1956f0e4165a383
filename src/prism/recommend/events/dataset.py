"""Dataset: prepared events as arrays and JSON in a folder. recipe.py makes one from a table of events and caches it.

    folder/
      events.safetensors       offsets, items, times: the Histories
      items.json               the items' own ids, and their features
      users.json               the users' own ids
      vectors.safetensors      vectors that were given for the items, if any
      manifest.json            what was read and what was dropped, and one digest of events, items and users

The folder is written atomically, and opening it needs no polars.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from prism.files import commit_folder, fresh_folder, json_bytes, read_json, sha256
from prism.recommend.events.histories import Histories
from prism.recommend.events.ids import Catalogue, Users

FORMAT = 1
EVENTS, ITEMS, USERS, MANIFEST = "events.safetensors", "items.json", "users.json", "manifest.json"
VECTORS = "vectors.safetensors"
TRAINING = "training.json"
"""File of a model folder: what the model was trained on."""


@dataclass(frozen=True)
class Dataset:
    """Events as arrays. `manifest` says where they come from: recipe, counts, notes."""

    histories: Histories
    catalogue: Catalogue
    users: Users
    manifest: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.histories.profiles is None and self.users.profiles is not None:
            object.__setattr__(self, "histories", replace(self.histories, profiles=self.users.profiles))

    @property
    def num_items(self) -> int:
        return len(self.catalogue)

    @property
    def digest(self) -> str:
        """One hash of events, items and users. A resumed run must find it unchanged."""
        stored = self.manifest.get("digest")
        if stored is not None:
            return str(stored)
        return _digest({name: hashlib.sha256(content).hexdigest() for name, content in self._contents().items()})

    def summary(self) -> list[str]:
        """What it holds and what was dropped, one sentence a line."""
        found = {"duplicates": 0, "duplicates_dropped": 0, "events_dropped": 0, **self.manifest.get("counts", {})}
        lines = [f"{len(self.histories.items):,} events of {len(self.users):,} users with {self.num_items:,} items"]
        if found["duplicates"]:
            what = "dropped" if found["duplicates_dropped"] else "kept"
            lines.append(f"{found['duplicates']:,} events repeat an earlier one and are {what}")
        if found["events_dropped"]:
            without = f"{found['users_dropped']:,} users and {found['items_dropped']:,} items with too few events"
            lines.append(f"{found['events_dropped']:,} events are dropped with {without}")
        return [*lines, *self.manifest.get("notes", [])]

    def save(self, folder: Path) -> Dataset:
        """Write a folder that must not exist yet, and return the dataset as `open_dataset` would."""
        if folder.exists():
            raise ValueError(f"{folder} exists already: give a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = fresh_folder(folder.with_name(f".{folder.name}.partial"))
        for name, content in self._contents().items():
            (partial / name).write_bytes(content)
        return self.commit(partial, folder)

    def commit(self, partial: Path, folder: Path) -> Dataset:
        """Complete a folder that holds the three files of events, items and users, and give it its name."""
        if self.catalogue.vectors:
            save_file({name: np.ascontiguousarray(x) for name, x in self.catalogue.vectors.items()}, partial / VECTORS)
        digest = _digest({name: sha256(partial / name) for name in (EVENTS, ITEMS, USERS)})
        manifest = {"format": FORMAT, **self.manifest, "digest": digest}
        (partial / MANIFEST).write_bytes(json_bytes(manifest))
        commit_folder(partial, folder)
        return Dataset(self.histories, self.catalogue, self.users, manifest, folder)

    def _contents(self) -> dict[str, bytes]:
        return {
            EVENTS: self.histories.to_bytes(),
            ITEMS: self.catalogue.to_bytes(),
            USERS: self.users.to_bytes(),
        }


def open_dataset(folder: Path, verify: bool = True) -> Dataset:
    """Open a folder that `Dataset.save` or `prepare_dataset` wrote; `verify` compares the contents with their digest."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    missing = [name for name in (MANIFEST, EVENTS, ITEMS, USERS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not a folder of prepared events: it has no {', '.join(missing)}")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{folder / MANIFEST} is not a manifest of prepared events in format {FORMAT}")
    if verify:
        found = {name: sha256(folder / name) for name in (EVENTS, ITEMS, USERS)}
        if _digest(found) != manifest["digest"]:
            raise ValueError(
                f"the prepared events in {folder} are damaged: remove the folder and they are prepared again"
            )
    histories, catalogue = Histories.load(folder / EVENTS), Catalogue.load(folder / ITEMS)
    if catalogue.vector_marks:
        catalogue = _with_vectors(catalogue, folder / VECTORS)
    return Dataset(histories, catalogue, Users.load(folder / USERS), manifest, folder)


def _with_vectors(catalogue: Catalogue, path: Path) -> Catalogue:
    """The catalogue with its vectors, which must be those that it was written with."""
    try:
        full = Catalogue(catalogue.items, catalogue.features, load_file(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if full.vector_marks != catalogue.vector_marks:
        raise ValueError(f"{path} is damaged: remove its folder and the events are prepared again")
    return full


def reindex_items(dataset: Dataset, catalogue: Catalogue) -> Dataset:
    """The dataset's events with the item rows of another catalogue. Events of items that it lacks are dropped and counted."""
    known = catalogue.rows(dataset.catalogue.items)
    items = np.concatenate([[-1], known])[dataset.histories.items]
    kept = items > 0
    if not kept.any():
        raise ValueError("no event is of an item that the model knows: give events of the items it was trained on")
    before = np.concatenate([[0], np.cumsum(kept)])
    times, profiles = dataset.histories.times, dataset.histories.profiles
    histories = Histories(
        before[dataset.histories.offsets], items[kept], None if times is None else times[kept], profiles
    )
    lost = {"events_of_unknown_items": int((~kept).sum()), "unknown_items": int((known < 0).sum())}
    notes = [*dataset.manifest.get("notes", [])]
    if lost["unknown_items"]:
        notes.append(
            f"{lost['events_of_unknown_items']:,} events of {lost['unknown_items']:,} items that the model does not know "
            "are dropped"
        )
    counts = {**dataset.manifest.get("counts", {}), **lost, "events": int(kept.sum()), "items": len(catalogue)}
    manifest = {**dataset.manifest, "counts": counts, "notes": notes}
    manifest.pop("digest", None)
    return Dataset(histories, catalogue, dataset.users, manifest)


def _digest(hashes: dict[str, str]) -> str:
    """One hash of the files' hashes."""
    lines = [f"{name} {found}" for name, found in sorted(hashes.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
