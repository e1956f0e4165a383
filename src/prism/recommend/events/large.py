"""Prepare a log that is larger than memory: a folder of parquet parts becomes the files of a Dataset, in bounded memory.

The files are, byte by byte, those of `make_dataset` on all parts at once (a test compares). Memory is needed for the ids of
users and items and for one block of events, whatever the number of events:

1. polars' streaming engine finds the distinct users and items, and the number of events of each user;
2. the parts are read in order, a batch at a time. Ids become rows, and every event is appended to the file of its bucket: a
   range of users with few enough events;
3. each bucket is sorted in memory (by user, then time, then the order of the input) and appended to one sorted file;
4. rare users and items are left out, if asked (the k-core), and the arrays are written as one safetensors file.

The parts' order is that of their names. Temporary files, 16 bytes an event and as much again, lie next to the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.files import fresh_folder
from prism.recommend.events.columns import Columns
from prism.recommend.events.dataset import EVENTS, ITEMS, USERS, Dataset
from prism.recommend.events.features import Described, Origin, describe, encode, refuse_vectors, sources
from prism.recommend.events.formats import pl
from prism.recommend.events.histories import NO_SEQUENCE, Histories
from prism.recommend.events.ids import Catalogue, Feature, Users
from prism.recommend.events.values import ids, seconds, times

if TYPE_CHECKING:
    from prism.recommend.events.recipe import EventRecipe  # which imports this module when it meets a folder of parts

BATCH = 1 << 20
"""Events read at once."""
BUCKET = 1 << 22
"""Events sorted at once; a user with more is sorted alone."""
MOST_BUCKETS = 400
"""Files open at a time."""


def prepare_parts(
    recipe: EventRecipe,
    parts: list[Path],
    folder: Path,
    report: Callable[[str], None] = lambda message: None,
    any_length: bool = False,
) -> None:
    """Write the folder of a Dataset from the parquet parts of a log.

    Args:
        folder: the folder to write; it must not exist.
        report: called with messages about the progress.
        any_length: accept events of which no user has two.
    """
    work = fresh_folder(folder.with_name(f".{folder.name}.partial"))
    log = _Log(recipe, parts, work, report)
    dataset = log.prepare(any_length)
    for left in work.glob("*.raw"):
        left.unlink()
    dataset.commit(work, folder)


class _Log:
    """A log in parts, on its way to sorted arrays in the folder `work`."""

    def __init__(self, recipe: EventRecipe, parts: list[Path], work: Path, report: Callable[[str], None]) -> None:
        self.recipe, self.work, self.report = recipe, work, report
        self.where = str(parts[0].parent)
        self.origin: Origin = sources(recipe)
        try:
            self.table = pl.scan_parquet(parts)
            names = self.table.collect_schema().names()
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"{self.where} cannot be read as parquet parts: {_reason(error)}") from error
        self.columns: Columns = self.origin.events.found(names, self.where)
        self.has_times = self.columns.time is not None
        fields = [("user", "<i4"), ("item", "<i4"), *([("time", "<f8")] if self.has_times else [])]
        self.dtype = np.dtype(fields)
        self.notes: list[str] = []
        if not self.has_times and recipe.time is not None:
            self.notes.append("no time column: events are taken in the order of the input")

    def prepare(self, any_length: bool) -> Dataset:
        """All steps; the arrays lie in the folder afterwards."""
        try:
            users, items = (self._distinct(name) for name in (self.columns.user, self.columns.item))
            rows = int(users.counts.sum())
            if not rows:
                raise ValueError(f"{self.where} is empty: there is no event in it")
            self.report(f"{rows:,} events of {len(users.names):,} users with {len(items.names):,} items")
            described, people = self._scatter(users, items, rows)
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"{self.where} cannot be read as parquet parts: {_reason(error)}") from error
        lengths, repeats = self._sort(users.counts)
        counts = {"rows": rows, "duplicates": repeats}
        counts["duplicates_dropped"] = repeats if self.recipe.duplicates == "drop" else 0
        kept_users, kept_items, lengths, dropped = self._core(lengths, len(items.names))
        catalogue = Catalogue(
            [items.names[row] for row in kept_items.tolist()],
            {name: _taken(feature, np.append(0, kept_items + 1)) for name, feature in described.features.items()},
            {name: x[np.append(0, kept_items + 1)] for name, x in described.vectors.items()},
        )
        features = {name: _taken(feature, kept_users) for name, feature in people.features.items()}
        who = Users([users.names[row] for row in kept_users.tolist()], features)
        counts = {"users": len(who), "items": len(catalogue), "events": int(lengths.sum()), **counts, **dropped}
        notes = [*self.notes, *described.notes, *people.notes]
        manifest = {"counts": counts, "notes": notes, "times": self.has_times, "dates": self.dates}
        manifest["recipe"] = asdict(self.recipe)
        if lengths.max(initial=0) < 2 and not any_length:
            raise ValueError(NO_SEQUENCE)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._write_events(offsets, kept_items)
        blank = Dataset(Histories(np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)), catalogue, who, manifest)
        whole = describe(blank, self.origin, self.recipe.list_separator)
        (self.work / ITEMS).write_bytes(whole.catalogue.to_bytes())
        (self.work / USERS).write_bytes(whole.users.to_bytes())
        return whole

    def _distinct(self, column: str) -> _Codes:
        """The distinct ids of a column in their order, with the number of events of each."""
        found = self.table.group_by(pl.col(column)).len().collect(engine="streaming")
        values = ids(found[column], self.where)
        order = values.arg_sort()
        return _Codes(found[column][order], values[order].to_list(), found["len"][order].to_numpy().astype(np.int64))

    def _scatter(self, users: _Codes, items: _Codes, rows: int) -> tuple[Described, Described]:
        """Append every event to the file of its bucket; returns the features of items and users."""
        self.bounds = bucket_bounds(users.counts)
        files = [self._raw(f"bucket-{number}").open("wb") for number in range(len(self.bounds) - 1)]
        firsts = {"item": _Firsts(self.columns.features), "user": _Firsts(self.columns.user_features)}
        done = kinds = 0
        try:
            for batch in self._batches():
                events = np.empty(len(batch), dtype=self.dtype)
                events["user"], events["item"] = (
                    users.rows(batch[self.columns.user]),
                    items.rows(batch[self.columns.item]),
                )
                if self.columns.time is not None:
                    read = times(batch[self.columns.time], self.where)
                    kinds |= 1 if read.dtype.is_temporal() else 2
                    events["time"] = seconds(read)
                firsts["item"].add(batch, events["item"] + 1)
                firsts["user"].add(batch, events["user"])
                bucket = np.searchsorted(self.bounds, events["user"], "right") - 1
                order = np.argsort(bucket, kind="stable")
                edges = np.searchsorted(bucket[order], np.arange(len(files) + 1))
                events = events[order]
                for number in np.unique(bucket).tolist():
                    events[edges[number] : edges[number + 1]].tofile(files[number])
                done = self._progress(done, len(batch), rows)
        finally:
            for file in files:
                file.close()
        if kinds == 3:
            raise ValueError(f"column {self.columns.time!r} of {self.where} holds numbers and dates: use one of them")
        self.dates = kinds == 1
        separator = self.recipe.list_separator
        described = firsts["item"].encoded(len(items.names) + 1, separator, "items")
        people = firsts["user"].encoded(len(users.names), separator, "users")
        refuse_vectors(people)
        return described, people

    def _batches(self) -> Iterator[pl.DataFrame]:
        chosen = self.table.select(list(dict.fromkeys(self.columns.wanted)))
        yield from chosen.collect_batches(chunk_size=BATCH, maintain_order=True, engine="streaming")

    def _progress(self, done: int, more: int, rows: int) -> int:
        """Report every tenth of the events; returns how many are read."""
        if done * 10 // rows < (done + more) * 10 // rows:
            self.report(f"read {done + more:,} of {rows:,} events")
        return done + more

    def _sort(self, counts: np.ndarray) -> tuple[np.ndarray, int]:
        """Sort the buckets into one file of items and one of times; events of each user, and the number of repeated events."""
        lengths, repeats, moved = np.zeros(len(counts), dtype=np.int64), 0, 0
        with self._raw("items").open("wb") as items, self._raw("times").open("wb") as moments:
            for number in range(len(self.bounds) - 1):
                path = self._raw(f"bucket-{number}")
                events = np.fromfile(path, dtype=self.dtype)
                path.unlink()
                by_user = events[np.argsort(events["user"], kind="stable")]
                if self.has_times:
                    same_user = by_user["user"][1:] == by_user["user"][:-1]
                    moved += int((same_user & (by_user["time"][1:] < by_user["time"][:-1])).sum())
                    by_user = by_user[np.lexsort((by_user["time"], by_user["user"]))]
                first = first_of_each(by_user)
                repeats += int((~first).sum())
                if self.recipe.duplicates == "drop":
                    by_user = by_user[first]
                low = self.bounds[number]
                here = np.bincount(by_user["user"] - low, minlength=self.bounds[number + 1] - low)
                lengths[low : self.bounds[number + 1]] = here
                by_user["item"].astype("<i4").tofile(items)
                if self.has_times:
                    by_user["time"].astype("<f8").tofile(moments)
        if moved:
            self.notes.append(f"{moved:,} events were earlier than the one above them: the events were sorted by time")
        return lengths, repeats

    def _core(self, lengths: np.ndarray, num_items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
        """Mark the events of the k-core: kept users and items, the users' kept events, and counts of what is dropped."""
        least_user, least_item = self.recipe.min_user, self.recipe.min_item
        items = np.memmap(self._raw("items"), "<i4", "r")
        histories = Histories(np.concatenate([[0], np.cumsum(lengths)]), items)
        self.kept: np.ndarray | None = None if least_user == least_item == 1 else np.ones(len(items), dtype=bool)
        counts = np.zeros(num_items, dtype=np.int64)
        while True:
            counts[:] = 0
            for first, last in histories.blocks():
                part = slice(histories.offsets[first], histories.offsets[last])
                inside = items[part] if self.kept is None else items[part][self.kept[part]]
                counts += np.bincount(inside, minlength=num_items)
            if self.kept is None or self._thinned(histories, lengths, counts) == lengths.sum():
                break
            lengths = self._kept_lengths(histories)
        users, rows = np.flatnonzero(lengths), np.flatnonzero(counts)
        if not len(users):
            raise ValueError(
                f"no event is left if each user needs {least_user} events and each item {least_item}: "
                "lower min_user or min_item"
            )
        dropped = {
            "users_dropped": len(lengths) - len(users),
            "items_dropped": num_items - len(rows),
            "events_dropped": len(items) - int(lengths.sum()),
        }
        return users, rows, lengths[users], dropped

    def _thinned(self, histories: Histories, lengths: np.ndarray, counts: np.ndarray) -> int:
        """Drop the events of users and items with too few; returns the number of events that are left."""
        assert self.kept is not None
        enough_user, enough_item = lengths >= self.recipe.min_user, counts >= self.recipe.min_item
        left = 0
        for first, last in histories.blocks():
            part = slice(histories.offsets[first], histories.offsets[last])
            self.kept[part] &= enough_item[histories.items[part]]
            self.kept[part] &= np.repeat(enough_user[first:last], histories.lengths[first:last])
            left += int(self.kept[part].sum())
        return left

    def _kept_lengths(self, histories: Histories) -> np.ndarray:
        assert self.kept is not None
        lengths = np.zeros(len(histories), dtype=np.int64)
        for first, last in histories.blocks():
            start, stop = histories.offsets[first], histories.offsets[last]
            before = np.concatenate([[0], np.cumsum(self.kept[start:stop])])
            lengths[first:last] = np.diff(before[histories.offsets[first : last + 1] - start])
        return lengths

    def _write_events(self, offsets: np.ndarray, kept_items: np.ndarray) -> None:
        """Write events.safetensors, in blocks: exactly the bytes of `Histories.to_bytes`."""
        items = np.memmap(self._raw("items"), "<i4", "r")
        renumbered = np.zeros(int(kept_items.max()) + 1, dtype=np.int64)
        renumbered[kept_items] = np.arange(len(kept_items)) + 1
        total = int(offsets[-1])
        sizes = {"items": ("I64", total), "offsets": ("I64", len(offsets))} | (
            {"times": ("F64", total)} if self.has_times else {}
        )
        header, start = {}, 0
        for name, (kind, size) in sizes.items():
            header[name] = {"dtype": kind, "shape": [size], "data_offsets": [start, start + 8 * size]}
            start += 8 * size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (self.work / EVENTS).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in self._blocks(len(items)):
                renumbered[self._chosen(items, part)].tofile(file)
            offsets.astype("<i8").tofile(file)
            if self.has_times:
                moments = np.memmap(self._raw("times"), "<f8", "r")
                for part in self._blocks(len(items)):
                    np.ascontiguousarray(self._chosen(moments, part)).tofile(file)

    def _blocks(self, total: int) -> Iterator[slice]:
        return (slice(start, start + BUCKET) for start in range(0, total, BUCKET))

    def _chosen(self, values: np.ndarray, part: slice) -> np.ndarray:
        return values[part] if self.kept is None else values[part][self.kept[part]]

    def _raw(self, name: str) -> Path:
        return self.work / f"{name}.raw"


class _Codes:
    """Rows of ids: `raw`, as in the table, in the order of `names`, the ids that they stand for."""

    def __init__(self, raw: pl.Series, names: list[Any], counts: np.ndarray) -> None:
        self.names, self.counts = names, counts
        self.kind = pl.Enum(raw) if raw.dtype == pl.String else None
        self.numbers = None if self.kind is not None else raw.cast(pl.Int64).to_numpy()

    def rows(self, column: pl.Series) -> np.ndarray:
        """The row of every id, int."""
        if self.kind is not None:
            return column.cast(self.kind).to_physical().to_numpy()
        assert self.numbers is not None
        return np.searchsorted(self.numbers, column.cast(pl.Int64).to_numpy())


class _Firsts:
    """The first value of each row for some features, gathered batch by batch."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.parts: dict[str, list[pl.DataFrame]] = {name: [] for name in names}
        self.known: dict[str, np.ndarray] = {name: np.zeros(0, dtype=np.int64) for name in names}

    def add(self, batch: pl.DataFrame, rows: np.ndarray) -> None:
        for name, parts in self.parts.items():
            found = pl.DataFrame({"row": rows.astype(np.int64), "value": batch[name]}).drop_nulls()
            found = found.unique("row", keep="first", maintain_order=True)
            fresh = ~np.isin(found["row"].to_numpy(), self.known[name])
            if fresh.any():
                parts.append(found.filter(pl.Series(fresh)))
                self.known[name] = np.union1d(self.known[name], parts[-1]["row"].to_numpy())

    def encoded(self, total: int, separator: str | None, of: str) -> Described:
        whole = Described({}, {}, [])
        for name, parts in self.parts.items():
            found = pl.concat(parts) if parts else pl.DataFrame(schema={"row": pl.Int64, "value": pl.String})
            made = encode({name: found["value"]}, found["row"].to_numpy(), total, separator, "the events", of)
            whole.features.update(made.features)
            whole.vectors.update(made.vectors)
            whole.notes.extend(made.notes)
        return whole


def bucket_bounds(counts: np.ndarray, most: int | None = None) -> np.ndarray:
    """Ranges of users with at most `most` events (or one user): users bounds[b] … bounds[b + 1] - 1 are bucket b."""
    most = max(BUCKET if most is None else most, -(-int(counts.sum()) // MOST_BUCKETS))
    histories = Histories(np.concatenate([[0], np.cumsum(counts)]), np.broadcast_to(np.int64(0), int(counts.sum())))
    return np.array([0, *(last for _, last in histories.blocks(most))])


def first_of_each(events: np.ndarray) -> np.ndarray:
    """Which events, sorted by user, are the first with their user, item and time (without times: user and item), bool `[N]`."""
    order = np.lexsort([events[name] for name in ("item", "time", "user") if name in (events.dtype.names or ())])
    same = np.ones(max(len(events) - 1, 0), dtype=bool)
    for name in events.dtype.names or ():
        same &= events[name][order][1:] == events[name][order][:-1]
    first = np.ones(len(events), dtype=bool)
    first[order[1:][same]] = False
    return first


def _taken(feature: Feature, rows: np.ndarray) -> Feature:
    """The feature of some rows, without the values that none of them has."""
    of_item = feature.of_item[rows]
    used = np.unique(np.append(0, of_item.ravel()))
    renumbered = np.zeros(len(feature.values), dtype=np.int64)
    renumbered[used] = np.arange(len(used))
    of_item = renumbered[of_item]
    if feature.is_list:
        of_item = of_item[:, : max(1, int((of_item > 0).sum(1).max(initial=0)))]
    return Feature([feature.values[code] for code in used], of_item)


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
