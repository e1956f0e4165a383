"""Users in memory: their states, brought up to date from the event log, most recently used first; the rest is on disk.

A state is a function of the events, the model and the items that it knows. What is in memory or in the store may be older
than the log (another process stored events, or this one was killed): `bring` reads what is missing, for many users in one step
of the memory. Users who had events of an item before it became known are read from the start.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prism.recommend import Recommender
from prism.recommend.events import Histories
from prism.recommend.reading import advance, encode, without_events
from prism.serve.rec.pool import StatePool
from prism.serve.rec.seen import NONE_SEEN, add_seen, pack_seen, unpack_seen
from prism.serve.rec.store import Account, Logged, StateRow, Store

MICROSECOND = 1e-6


@dataclass
class Entry:
    """A user in memory."""

    row: int
    """Of the pool."""
    number: int = 0
    """Of the last event that the state has read."""
    updated: float = 0.0
    seen: np.ndarray = None  # type: ignore[assignment]  # set below: arrays are no defaults
    dirty: bool = False
    """Whether the store has an older state, or none."""
    items: int = 0
    """Number of the last description of an item that was known when the state was made or checked."""

    def __post_init__(self) -> None:
        if self.seen is None:
            self.seen = NONE_SEEN


@dataclass
class Present:
    """Users as they are now, n of them."""

    hidden: Tensor
    """`[n, D]`."""
    events: Tensor
    """int64 `[n]`, events that the model knows."""
    seen: list[np.ndarray]
    """Rows of the catalogue."""


class UserMemory:
    """States of users. Only one thread may use it, except for `peek`.

    Args:
        load: reads states by uid, from the store or a cache in front of it.
        save: takes states that are to be stored; it must not wait for the store.
        capacity: number of users in memory.
        max_length: events that a model with a growing state reads again. None: as many as in training. 0: all.
    """

    def __init__(
        self,
        recommender: Recommender,
        store: Store,
        load: Callable[[Sequence[int]], dict[int, StateRow]],
        save: Callable[[list[StateRow]], None],
        capacity: int,
        max_length: int | None = None,
    ) -> None:
        self.recommender, self.store, self.load, self.save = recommender, store, load, save
        self.capacity = capacity
        self.items = 0
        """Number of the last description of an item that the recommender has."""
        self._added: list[tuple[int, str]] = []
        self._gaps = recommender.model.config.time_gaps
        self.rereads = not recommender.model.config.constant_state
        """A model whose state grows with every event keeps none: it reads the last events again."""
        self.max_length = recommender.model.config.max_length if max_length is None else max_length
        self.pool = None if self.rereads else StatePool(recommender.start(1), capacity)
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self._free = list(range(capacity))

    def use(self, larger: Recommender, number: int, added: list[tuple[int, str]]) -> None:
        """Replace the recommender by one with more items, whose states are the same.

        Args:
            number: of the last description that it has.
            added: all items that were not in training: number of the description, id; by number.
        """
        self.items, self._added, self.recommender = number, added, larger

    @property
    def state_bytes(self) -> int:
        """Bytes of one user's state."""
        return 0 if self.pool is None else self.pool.row_bytes

    def peek(self, uid: int) -> Entry | None:
        """A user in memory, or None; nothing is loaded. May be called from any thread."""
        return self.entries.get(uid)

    @torch.no_grad()
    def bring(self, names: Sequence[str]) -> Present:
        """Users with all their events read. A user that the store does not know has none."""
        accounts = self.store.accounts(names)
        self._load({account.uid: account.events for account in accounts.values()})
        self._start_again([account.uid for account in accounts.values()])
        self._catch_up(list(accounts.values()))
        entries = [self.entries[accounts[name].uid] if name in accounts else None for name in names]
        seen = [NONE_SEEN if entry is None else entry.seen for entry in entries]
        if self.pool is None:
            logs = [self._last(accounts[name].uid) if name in accounts else [] for name in names]
            return self._read_again([self._known(log) for log in logs], seen)
        model = self.recommender.model
        hidden = without_events(model, len(names))
        events = torch.zeros(len(names), dtype=torch.int64, device=hidden.device)
        if there := [place for place, entry in enumerate(entries) if entry is not None]:
            rows = [entry.row for entry in entries if entry is not None]
            hidden[there], events[there] = self.pool.hidden(rows), self.pool.events(rows)
        return Present(hidden, events, seen)

    @torch.no_grad()
    def sessions(self, histories: Sequence[tuple[Sequence[str], Sequence[float]]]) -> Present:
        """Users who are nothing but a history of items and times; nothing is kept of them."""
        logs = [
            [Logged(0, "", item, int(at * 1e6), None) for item, at in zip(items, times, strict=True)]
            for items, times in histories
        ]
        known = [self._known(log) for log in logs]
        seen = [add_seen(NONE_SEEN, rows) for rows, _ in known]
        if self.pool is None:
            return self._read_again(known, seen)
        states = self.recommender.start(len(known))
        hidden, events = states.hidden.clone(), states.events.clone()
        for places in _alike([len(rows) for rows, _ in known]):
            moved = advance(self.recommender.model, states.index_select(places), _histories([known[i] for i in places]))
            hidden[places], events[places] = moved.hidden, moved.events
        return Present(hidden, events, seen)

    def _load(self, events: dict[int, int]) -> None:
        """Put users into memory: their states in the store, or the state before the first event.

        Args:
            events: uid → number of events in the log. A state that has read more belongs to a log that was replaced. One of
                a process that knows more items is not used either: this process knows them within a second.
        """
        for uid in events.keys() & self.entries.keys():
            self.entries.move_to_end(uid)
        missing = sorted(events.keys() - self.entries.keys())
        if not missing:
            return
        stored = self.load(missing)
        self._make_room(len(missing), set(events))
        added = {uid: Entry(self._free.pop(), items=self.items) for uid in missing}
        usable = {
            uid: row
            for uid, row in stored.items()
            if len(row.state) == self.state_bytes and row.number <= events[uid] and row.items <= self.items
        }
        for uid, row in usable.items():
            entry = added[uid]
            entry.number, entry.updated, entry.seen = row.number, row.updated, unpack_seen(row.seen)
            entry.items = row.items
        if self.pool is not None:
            if usable:
                self.pool.unpack([added[uid].row for uid in usable], [row.state for row in usable.values()])
            for uid in added.keys() - usable.keys():
                self.pool.clear(added[uid].row)
        self.entries.update(added)

    def _make_room(self, wanted: int, keep: set[int]) -> None:
        """Remove the users who were not needed for the longest time; states that are not stored are, first."""
        if wanted <= len(self._free):
            return
        least = max(wanted - len(self._free), self.capacity // 16)
        removed = [uid for uid in self.entries if uid not in keep][:least]
        self.flush([uid for uid in removed if self.entries[uid].dirty])
        self._free += [self.entries.pop(uid).row for uid in removed]

    def flush(self, uids: Sequence[int] | None = None, most: int = 64) -> int:
        """Hand states that are not stored to `save`; returns how many.

        Args:
            uids: whose; None: of those who were changed, the ones not used for the longest time, at most `most`.
        """
        if uids is None:
            uids = [uid for uid, entry in self.entries.items() if entry.dirty][:most]
        chosen = [(uid, self.entries[uid]) for uid in uids]
        if not chosen:
            return 0
        packed = [b""] * len(chosen) if self.pool is None else self.pool.pack([entry.row for _, entry in chosen])
        items = len(self.recommender.catalogue)
        self.save(
            [
                StateRow(uid, entry.number, entry.updated, state, pack_seen(entry.seen, items), entry.items)
                for (uid, entry), state in zip(chosen, packed, strict=True)
            ]
        )
        for _, entry in chosen:
            entry.dirty = False
        return len(chosen)

    def forget(self, uid: int) -> None:
        """Drop a user who was deleted."""
        if (entry := self.entries.pop(uid, None)) is not None:
            self._free.append(entry.row)

    def _start_again(self, uids: Sequence[int]) -> None:
        """Reset the states of those users that have skipped an event of an item which is known by now."""
        older: dict[int, list[int]] = {}
        for uid in uids:
            if (items := self.entries[uid].items) < self.items:
                older.setdefault(items, []).append(uid)
        for items, behind in older.items():
            later = [item for _, item in self._added[bisect_right(self._added, items, key=lambda one: one[0]) :]]
            first = self.store.first_events(behind, later) if later else {}
            for uid in behind:
                entry = self.entries[uid]
                entry.items = self.items
                if first.get(uid, entry.number + 1) <= entry.number:
                    entry.number, entry.seen = 0, NONE_SEEN
                    if self.pool is not None:
                        self.pool.clear(entry.row)

    def _catch_up(self, accounts: Sequence[Account]) -> None:
        """Read the events that the states of these users lack."""
        behind = list(dict.fromkeys(a.uid for a in accounts if self.entries[a.uid].number < a.events))
        if not behind:
            return
        logs = self.store.events_after(behind, [self.entries[uid].number for uid in behind])
        known = [self._known(log) for log in logs]
        if self.pool is not None:
            for places in _alike([len(rows) for rows, _ in known]):
                pool_rows = [self.entries[behind[place]].row for place in places]
                histories = _histories([known[place] for place in places])
                self.pool.write(pool_rows, advance(self.recommender.model, self.pool.read(pool_rows), histories))
        now = time.time()
        for uid, log, (rows, _) in zip(behind, logs, known, strict=True):
            entry = self.entries[uid]
            if log:
                entry.number, entry.updated, entry.dirty = log[-1].number, now, True
                entry.seen = add_seen(entry.seen, rows)

    def _known(self, log: Sequence[Logged]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the catalogue and times in seconds, of the events whose item the model knows."""
        rows = self.recommender.catalogue.rows([event.item for event in log])
        times = np.array([event.time for event in log], dtype=np.float64) * MICROSECOND
        return rows[rows > 0], times[rows > 0]

    def _last(self, uid: int) -> list[Logged]:
        """The last events of a user that a model without a state reads again, oldest first: `max_length` known ones.

        With time gaps there is one more, which is not read: the gap of the first one is the time since then.
        """
        wanted = most = self.max_length + self._gaps if self.max_length else max(1, self.entries[uid].number)
        while True:
            log = self.store.last_events(uid, most)[::-1]
            if len(log) < most or len(self._known(log)[0]) >= wanted:
                return log
            most *= 2

    def _read_again(self, known: Sequence[tuple[np.ndarray, np.ndarray]], seen: list[np.ndarray]) -> Present:
        """Users whose last events are read from the start."""
        histories = _histories(known)
        model = self.recommender.model
        events = torch.from_numpy(histories.lengths).to(self.recommender.device)
        return Present(encode(model, histories, self.max_length), events, seen)


def _histories(known: Sequence[tuple[np.ndarray, np.ndarray]]) -> Histories:
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows, _ in known], dtype=np.int64)])
    items = np.concatenate([np.zeros(0, dtype=np.int64), *(rows for rows, _ in known)])
    return Histories(offsets, items, np.concatenate([np.zeros(0), *(times for _, times in known)]))


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Places grouped by similar lengths, short ones first: padding one event to thousands would waste the time of both."""
    groups: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        if length:
            groups.setdefault((length - 1).bit_length() // 2, []).append(place)
    return [groups[size] for size in sorted(groups)]
