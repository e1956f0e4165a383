"""Merge datasets: a log continued by new events, users and items, in which old users and items keep their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prism.recommend.events.dataset import Dataset
from prism.recommend.events.histories import Histories
from prism.recommend.events.ids import Catalogue, Feature, Id, Ids, Users


class Merged(NamedTuple):
    """A continued log."""

    dataset: Dataset
    first_new: np.ndarray
    """Position of each user's first new event, int64 `[U]`; the length of the history if there is none."""


def merge(old: Dataset, new: Dataset, drop_repeats: bool = False) -> Merged:
    """The events of both, each user's by time; of simultaneous events, and without times, the old ones come first.

    Args:
        drop_repeats: leave out new events that repeat user, item and time of an old one (user and item without times).
    """
    if (old.histories.times is None) != (new.histories.times is None):
        which = (
            "the new events have no times, but those"
            if new.histories.times is None
            else "the new events have times, those"
        )
        raise ValueError(
            f"{which} of training {'have' if new.histories.times is None else 'have none'}: read both in one way"
        )
    dates = [it.manifest["dates"] for it in (old, new) if it.histories.times is not None and "dates" in it.manifest]
    if dates in ([True, False], [False, True]):
        now, before = ("dates", "numbers") if dates[1] else ("numbers", "dates")
        raise ValueError(
            f"the times of the new events are {now}, those of training {before}: give {before} here too (dates are kept as "
            "seconds since 1970)"
        )
    came_from = old.manifest.get("origin", {})
    catalogue = merge_catalogues(old.catalogue, new.catalogue, came_from)
    users = Users(*_joined(old.users, new.users, came_from))
    old_count, new_count = len(old.histories.items), len(new.histories.items)
    to_user, to_item = users.rows(list(new.users.ids)), catalogue.rows(list(new.catalogue.ids))
    who = np.concatenate(
        [
            np.repeat(np.arange(len(old.users)), old.histories.lengths),
            np.repeat(to_user, new.histories.lengths),
        ]
    )
    what = np.concatenate([old.histories.items, np.concatenate([[0], to_item])[new.histories.items]])
    when = None
    if old.histories.times is not None and new.histories.times is not None:
        when = np.concatenate([old.histories.times, new.histories.times])
    is_new = np.arange(old_count + new_count) >= old_count
    repeats = _repeats(who, what, when, is_new)
    notes = [*new.manifest.get("notes", [])]
    if when is not None and old_count and new_count and when[old_count:].max() < when[:old_count].min():
        notes.append("all new events are earlier than all events of training: are their times in the same unit?")
    if repeats.any():
        notes.append(
            f"{int(repeats.sum()):,} new events repeat an old one and are {'dropped' if drop_repeats else 'kept'}"
        )
    if drop_repeats:
        who, what, is_new = who[~repeats], what[~repeats], is_new[~repeats]
        when = None if when is None else when[~repeats]
    order = np.argsort(who, kind="stable") if when is None else np.lexsort((when, who))
    lengths = np.bincount(who, minlength=len(users))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    histories = Histories(offsets, what[order], None if when is None else when[order])
    places = np.flatnonzero(is_new[order])
    first_new = lengths.copy()
    np.minimum.at(first_new, who[order][places], places - offsets[who[order][places]])
    counts = {"users": len(users), "items": len(catalogue), "events": len(what)}
    added = {"new_users": len(users) - len(old.users), "new_items": len(catalogue) - len(old.catalogue)}
    fresh = f"{added['new_users']:,} new users and {added['new_items']:,} new items"
    notes.append(f"{int(is_new.sum()):,} of the events are new, with {fresh}")
    manifest = {
        "counts": {**counts, **added, "new_events": int(is_new.sum())},
        "notes": notes,
        "times": when is not None,
    }
    if dates:
        manifest["dates"] = dates[0]
    if came_from := came_from or new.manifest.get("origin"):
        manifest["origin"] = came_from
    return Merged(Dataset(histories, catalogue, users, manifest), first_new)


def merge_catalogues(old: Catalogue, new: Catalogue, origin: Mapping[str, Any] | None = None) -> Catalogue:
    """The old items, then those that only `new` has. Old items keep their features, as the model has learned them.

    Args:
        origin: of the old events (origin.py): whether old ids that are integers were text, and become text again if new ids
            are no integers.
    """
    items, features = _joined(old, new, origin or {})
    rows = np.flatnonzero(old.rows(list(new.ids)) < 0) + 1
    vectors = {}
    for name, given in old.vectors.items():
        fresh = new.vectors.get(name, np.zeros((len(new) + 1, given.shape[1]), dtype=np.float32))
        if fresh.shape[1] != given.shape[1]:
            raise ValueError(
                f"the new vectors {name} have {fresh.shape[1]} numbers, those of training {given.shape[1]}"
            )
        vectors[name] = np.concatenate([given, fresh[rows]])
    return Catalogue(items, features, vectors, {} if vectors else old.vector_marks)


def _joined(
    old: Catalogue | Users, new: Catalogue | Users, origin: Mapping[str, Any]
) -> tuple[Sequence[Id], dict[str, Feature]]:
    """Ids of both, the old ones first, and their features."""
    fresh = np.flatnonzero(old.rows(list(new.ids)) < 0)
    were_text = bool(origin.get("untyped")) or old.kind in origin.get("text", ())
    ids = _same_type(old, [new.ids[place] for place in fresh.tolist()], were_text)
    features = {
        name: _continued(name, feature, new.features.get(name), fresh + new.first)
        for name, feature in old.features.items()
    }
    return ids, features


def _same_type(old: Ids, fresh: list[Id], were_text: bool) -> list[Id]:
    """The old and the new ids: all of them text if any of them is.

    Args:
        were_text: whether old integers were text, or in a file that does not say.
    """
    texts = [name for name in fresh if isinstance(name, str)]
    old_are_text = len(old) > 0 and isinstance(old.ids[0], str)
    if old_are_text or (texts and were_text):
        return [str(name) for name in [*old.ids, *fresh]]
    if texts and len(old):
        raise ValueError(
            f"the new events have the {old.kind} {texts[0]!r}, but the {old.kind}s of training are integers: give the same ids"
        )
    return [*old.ids, *fresh]


def _continued(name: str, old: Feature, new: Feature | None, rows: np.ndarray) -> Feature:
    """A feature of the old rows, then of these rows of `new`; new values come after the old ones."""
    codes = np.zeros((len(rows), 1), dtype=np.int64)
    values = list(old.values)
    if new is not None:
        known = {value: code for code, value in enumerate(values)}
        for value in new.values[1:]:
            if value not in known:
                known[value] = len(values)
                values.append(value)
        mapped = np.array([0, *(known[value] for value in new.values[1:])], dtype=np.int64)
        codes = mapped[new.of_item[rows]].reshape(len(rows), new.width)
    if not old.is_list:
        if codes.shape[1] > 1:
            raise ValueError(
                f"the new items have lists of {name}, those of training one value each: give one value each"
            )
        return Feature(values, np.concatenate([old.of_item, codes[:, 0]]))
    width = max(old.width, codes.shape[1])
    parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in (old.of_item, codes)]
    return Feature(values, np.concatenate(parts))


def _repeats(who: np.ndarray, what: np.ndarray, when: np.ndarray | None, is_new: np.ndarray) -> np.ndarray:
    """Which new events repeat an old one, bool `[N]`."""
    keys = [what, who] if when is None else [when, what, who]
    order = np.lexsort([is_new, *keys])
    same = np.ones(len(order) - 1, dtype=bool)
    for key in keys:
        same &= key[order][1:] == key[order][:-1]
    group = np.concatenate([[0], np.cumsum(~same)])
    has_old = np.zeros(int(group[-1]) + 1, dtype=bool)
    has_old[group[~is_new[order]]] = True
    repeats = np.zeros(len(order), dtype=bool)
    repeats[order] = has_old[group] & is_new[order]
    return repeats
