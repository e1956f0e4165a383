"""A prepared log: arrays and JSON in a folder. recipe.py makes one from a log, and finds it again.

    log/
      events.safetensors       offsets, items, times: the Histories
      items.json               the items' own ids, and their features
      users.json               the users' own ids
      manifest.json            what was read and what was dropped, and one digest for all of it

The folder appears whole or not at all, and opening it needs no polars.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism.data.interactions.histories import Histories
from prism.data.interactions.ids import Catalogue, Users
from prism.files import commit_folder, fresh_folder, json_bytes, read_json

FORMAT = 1
EVENTS, ITEMS, USERS, MANIFEST = "events.safetensors", "items.json", "users.json", "manifest.json"


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


def _digest(contents: dict[str, bytes]) -> str:
    lines = [f"{name} {hashlib.sha256(content).hexdigest()}" for name, content in sorted(contents.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
