"""Users in memory: their states, brought up to date from the event log, most recently used first; the rest is in the store.

A state is a function of the events, the model and the items that it knows. What is in memory or in the store may be older
than the log (another process stored events, or this one was killed): `bring` reads what is missing, for many users in one step
of the memory. Users who had events of an item before it became known are read from the start.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from prism.recommend import Recommender, UserStates
from prism.recommend.events import Histories
from prism.recommend.reading import advance, encode, without_events
from prism.serve.rec.store import Account, Logged, StateRow, Store

MICROSECOND = 1e-6
NONE_SEEN = np.zeros(0, dtype=np.int32)
_ROWS, _BITS = b"r", b"b"

Known = tuple[np.ndarray, np.ndarray]
"""Rows of the catalogue and times in seconds, of the events whose item the model knows."""


@dataclass
class User:
    """A user in memory."""

    row: int
    """Of the tensors."""
    number: int = 0
    """Of the last event that the state has read."""
    updated: float = 0.0
    seen: np.ndarray = field(default_factory=lambda: NONE_SEEN)
    """Rows of the catalogue, sorted int32."""
    dirty: bool = False
    """Whether the store has an older state, or none."""
    items: int = 0
    """Number of the last description of an item that was known when the state was made or checked."""


@dataclass
class Present:
    """Users as they are now, n of them."""

    hidden: Tensor
    """`[n, D]`."""
    events: Tensor
    """int64 `[n]`, events that the model knows."""
    seen: list[np.ndarray]
    """Rows of the catalogue."""


class Users:
    """The users who were last active. Only one thread may use it, except for `peek`.

    Their states are the rows of one tensor for every tensor of a state: a batch of users is one gather and one scatter each.

    Args:
        model: the recommender's number in the store.
        capacity: number of users in memory.
        max_length: events that a model with a growing state reads again. None: as many as in training. 0: all.
    """

    def __init__(
        self, recommender: Recommender, store: Store, model: int, capacity: int, max_length: int | None = None
    ) -> None:
        config = recommender.model.config
        self.recommender, self.store, self.model, self.capacity = recommender, store, model, capacity
        self.max_length = config.max_length if max_length is None else max_length
        self.items = 0
        """Number of the last description of an item that the recommender has."""
        self._added: list[tuple[int, str]] = []
        self._gaps = config.time_gaps
        self._users: OrderedDict[int, User] = OrderedDict()
        self._free = list(range(capacity))
        self._evicted: list[StateRow] = []
        blank = recommender.start(1)
        # A model whose state grows with every event keeps none: it reads the last events again.
        self._blank = {name: x[0] for name, x in blank.tensors().items()} if config.constant_state else {}
        self._kind = blank.model
        # Memory that is never written to is never taken from the system.
        self._tensors = {
            name: torch.empty((capacity, *x.shape), dtype=x.dtype, device=x.device) for name, x in self._blank.items()
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of one user's state, whatever the number of events; 0 if none is kept."""
        return sum(x.nbytes for x in self._blank.values())

    def __len__(self) -> int:
        return len(self._users)

    def use(self, larger: Recommender, number: int, added: list[tuple[int, str]]) -> None:
        """Replace the recommender by one with more items, whose states are the same.

        Args:
            number: of the last description that it has.
            added: all items that were not in training: number of the description, id; by number.
        """
        self.items, self._added, self.recommender = number, added, larger

    def peek(self, uid: int) -> User | None:
        """A user in memory, or None; nothing is loaded. May be called from any thread."""
        return self._users.get(uid)

    def forget(self, uid: int) -> None:
        """Drop a user who was deleted."""
        if (user := self._users.pop(uid, None)) is not None:
            self._free.append(user.row)

    @torch.no_grad()
    def bring(self, names: Sequence[str]) -> Present:
        """Users with all their events read. A user that the store does not know has none."""
        found = self.store.accounts(names)
        accounts = list(found.values())
        self._load({account.uid: account.events for account in accounts})
        self._start_again([account.uid for account in accounts])
        self._catch_up(accounts)
        users = [self._users[found[name].uid] if name in found else None for name in names]
        seen = [NONE_SEEN if user is None else user.seen for user in users]
        if not self._tensors:
            logs = [self._last(found[name].uid) if name in found else [] for name in names]
            return self._read_again([self._known(log) for log in logs], seen)
        hidden = without_events(self.recommender.model, len(names))
        events = torch.zeros(len(names), dtype=torch.int64, device=hidden.device)
        if there := [place for place, user in enumerate(users) if user is not None]:
            rows = self._at([user.row for user in users if user is not None])
            hidden[there], events[there] = self._tensors["hidden"][rows], self._tensors["events"][rows]
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
        if not self._tensors:
            return self._read_again(known, seen)
        states = self.recommender.start(len(known))
        hidden, events = states.hidden.clone(), states.events.clone()
        for places in _alike(known):
            moved = advance(self.recommender.model, states.index_select(places), _histories([known[i] for i in places]))
            hidden[places], events[places] = moved.hidden, moved.events
        return Present(hidden, events, seen)

    def flush(self, most: int = 64) -> list[StateRow]:
        """States to be stored: those that had to leave memory, and at most `most` others that the store does not have.

        The users who were not needed for the longest time come first.
        """
        dirty = islice((uid for uid, user in self._users.items() if user.dirty), most)
        rows, self._evicted = self._evicted + self._state_rows(list(dirty)), []
        return rows

    # A user's way into memory, up to date and out of it.

    def _load(self, events: dict[int, int]) -> None:
        """Put users into memory: their states in the store, or the state before the first event.

        Args:
            events: uid → number of events in the log. A state that has read more belongs to a log that was replaced. One of
                a process that knows more items is not used either: this process knows them within a second.
        """
        for uid in events.keys() & self._users.keys():
            self._users.move_to_end(uid)
        missing = sorted(events.keys() - self._users.keys())
        if not missing:
            return
        stored = self.store.states(missing, self.model)
        self._make_room(len(missing), set(events))
        added = {uid: User(row, items=self.items) for uid, row in zip(missing, self._free, strict=False)}
        usable: list[tuple[int, bytes]] = []
        for uid, user in added.items():
            found = stored.get(uid)
            fits = found is not None and len(found.state) == self.state_bytes
            if found is not None and fits and found.number <= events[uid] and found.items <= self.items:
                user.number, user.updated, user.items = found.number, found.updated, found.items
                user.seen = unpack_seen(found.seen)
                usable.append((user.row, found.state))
            else:
                self._clear(user)
        self._unpack([row for row, _ in usable], [state for _, state in usable])
        self._users.update(added)
        del self._free[: len(added)]

    def _start_again(self, uids: Sequence[int]) -> None:
        """Reset the states of those users that have skipped an event of an item which is known by now."""
        older: dict[int, list[int]] = {}
        for uid in uids:
            if (items := self._users[uid].items) < self.items:
                older.setdefault(items, []).append(uid)
        for items, behind in older.items():
            later = [item for _, item in self._added[bisect_right(self._added, items, key=lambda one: one[0]) :]]
            first = self.store.first_events(behind, later) if later else {}
            for uid in behind:
                user = self._users[uid]
                user.items = self.items
                if first.get(uid, user.number + 1) <= user.number:
                    self._clear(user)

    def _catch_up(self, accounts: Sequence[Account]) -> None:
        """Read the events that the states of these users lack."""
        behind = list(dict.fromkeys(a.uid for a in accounts if self._users[a.uid].number < a.events))
        if not behind:
            return
        users = [self._users[uid] for uid in behind]
        logs = self.store.events_after(behind, [user.number for user in users])
        known = [self._known(log) for log in logs]
        now = time.time()
        for places in _alike(known):
            if self._tensors:
                rows = self._at([users[place].row for place in places])
                states = {name: x.index_select(0, rows) for name, x in self._tensors.items()}
                histories = _histories([known[place] for place in places])
                moved = advance(self.recommender.model, UserStates.unflatten(states, self._kind), histories)
                for name, x in moved.tensors().items():
                    self._tensors[name].index_copy_(0, rows, x)
            for place in places:
                if log := logs[place]:
                    user = users[place]
                    user.number, user.updated, user.dirty = log[-1].number, now, True
                    user.seen = add_seen(user.seen, known[place][0])

    def _make_room(self, wanted: int, keep: set[int]) -> None:
        """Remove the users who were not needed for the longest time; `flush` returns the states that are not stored."""
        if wanted <= len(self._free):
            return
        least = max(wanted - len(self._free), self.capacity // 16)
        removed = [uid for uid in self._users if uid not in keep][:least]
        self._evicted += self._state_rows([uid for uid in removed if self._users[uid].dirty])
        self._free += [self._users.pop(uid).row for uid in removed]

    # Events that the model knows.

    def _known(self, log: Sequence[Logged]) -> Known:
        rows = self.recommender.catalogue.rows([event.item for event in log])
        times = np.array([event.time for event in log], dtype=np.float64) * MICROSECOND
        return rows[rows > 0], times[rows > 0]

    def _last(self, uid: int) -> list[Logged]:
        """The last events of a user that a model without a state reads again, oldest first: `max_length` known ones.

        With time gaps there is one more, which is not read: the gap of the first one is the time since then.
        """
        wanted = most = self.max_length + self._gaps if self.max_length else max(1, self._users[uid].number)
        while True:
            log = self.store.last_events(uid, most)[::-1]
            if len(log) < most or len(self._known(log)[0]) >= wanted:
                return log
            most *= 2

    def _read_again(self, known: Sequence[Known], seen: list[np.ndarray]) -> Present:
        """Users whose last events are read from the start."""
        histories = _histories(known)
        events = torch.from_numpy(histories.lengths).to(self.recommender.device)
        return Present(encode(self.recommender.model, histories, self.max_length), events, seen)

    # Rows of the tensors, and the same as bytes: the tensors' rows one after another.

    def _at(self, rows: Sequence[int]) -> Tensor:
        return torch.as_tensor(rows, dtype=torch.int64, device=self.recommender.device)

    def _clear(self, user: User) -> None:
        """Put a user before the first event."""
        user.number, user.seen = 0, NONE_SEEN
        for name, x in self._blank.items():
            self._tensors[name][user.row] = x

    def _state_rows(self, uids: Sequence[int]) -> list[StateRow]:
        """The states of users for the store, which then are no longer dirty."""
        if not uids:
            return []
        users = [self._users[uid] for uid in uids]
        at, items = self._at([user.row for user in users]), len(self.recommender.catalogue)
        columns = [
            x.index_select(0, at).cpu().reshape(len(uids), -1).view(torch.uint8).numpy() for x in self._tensors.values()
        ]
        states = np.concatenate([np.zeros((len(uids), 0), np.uint8), *columns], axis=1)
        for user in users:
            user.dirty = False
        return [
            StateRow(uid, user.number, user.updated, state.tobytes(), pack_seen(user.seen, items), user.items)
            for uid, user, state in zip(uids, users, states, strict=True)
        ]

    def _unpack(self, rows: Sequence[int], states: Sequence[bytes]) -> None:
        """Put states that `_state_rows` returned into these rows."""
        if not rows:
            return
        table = np.frombuffer(b"".join(states), dtype=np.uint8).reshape(len(rows), self.state_bytes)
        at, start = self._at(rows), 0
        for name, x in self._blank.items():
            column = torch.from_numpy(table[:, start : start + x.nbytes].copy()).view(x.dtype)
            self._tensors[name].index_copy_(0, at, column.reshape(len(rows), *x.shape).to(x.device))
            start += x.nbytes


def add_seen(seen: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """`seen`, sorted int32 `[m]`, with rows of the catalogue added."""
    rows = np.unique(rows).astype(np.int32)
    places = np.searchsorted(seen, rows)
    inside = places < len(seen)
    fresh = np.ones(len(rows), dtype=bool)
    fresh[inside] = seen[places[inside]] != rows[inside]
    return np.insert(seen, places[fresh], rows[fresh]) if fresh.any() else seen


def pack_seen(seen: np.ndarray, items: int) -> bytes:
    """As bytes, in the shorter of two forms: the rows, or a bit for every item.

    Args:
        items: number of items of the model.
    """
    if 4 * len(seen) <= items // 8 + 1:
        return _ROWS + seen.astype("<i4").tobytes()
    bits = np.zeros(items + 1, dtype=bool)
    bits[seen] = True
    return _BITS + np.packbits(bits).tobytes()


def unpack_seen(content: bytes) -> np.ndarray:
    """The inverse of `pack_seen`."""
    if content[:1] == _ROWS:
        return np.frombuffer(content, dtype="<i4", offset=1).astype(np.int32)
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8, offset=1))
    return np.flatnonzero(bits).astype(np.int32)


def _histories(known: Sequence[Known]) -> Histories:
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows, _ in known], dtype=np.int64)])
    items = np.concatenate([np.zeros(0, dtype=np.int64), *(rows for rows, _ in known)])
    return Histories(offsets, items, np.concatenate([np.zeros(0), *(times for _, times in known)]))


def _alike(known: Sequence[Known]) -> list[list[int]]:
    """Places grouped by similar lengths, short ones first: padding one event to thousands would waste the time of both."""
    groups: dict[int, list[int]] = {}
    for place, (rows, _) in enumerate(known):
        groups.setdefault((len(rows) - 1).bit_length() // 2 if len(rows) else -1, []).append(place)
    return [groups[size] for size in sorted(groups)]
