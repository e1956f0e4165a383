"""The recommender's service without HTTP: store, writer and engine put together."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from prism.messages import say
from prism.models.loading import stable_fingerprint
from prism.recommend import Recommender
from prism.recommend.events import Catalogue
from prism.serve.metrics import Metrics
from prism.serve.rec.engine import MOST_USERS, Engine
from prism.serve.rec.new_items import Follower, NewItems, reply
from prism.serve.rec.schemas import ItemDescription, ItemsStored
from prism.serve.rec.settings import RecSettings, open_store
from prism.serve.rec.store import Store, StoreError, Submission
from prism.serve.rec.users import Users
from prism.serve.rec.writer import Writer

HIDDEN_SECONDS = 5.0
"""How long another process may still recommend an item after it was hidden."""
REPLACE_SECONDS = 60.0
"""How long a request waits for the engine to use a larger recommender."""


@dataclass(frozen=True)
class UserFacts:
    """What is known about a user."""

    events: int
    state_events: int
    """Events that the state has read."""
    updated: float | None
    state_bytes: int


class RecService:
    """A recommender with its users.

    Args:
        name: the run, as the operator calls it.
        store: open.
    """

    def __init__(
        self, recommender: Recommender, name: str, store: Store, settings: RecSettings, metrics: Metrics
    ) -> None:
        if not bool(recommender.model.item_counts.any()):
            raise ValueError(f"the model in {name} has no item counts, so users without events cannot be served")
        self.name, self.store, self.metrics = name, store, metrics
        claim_store(store, identity(recommender), name, settings.rebuild)
        number = store.model_number(identity(recommender), name)
        capacity = max(2 * MOST_USERS, settings.state_memory // recommender.start(1).nbytes)
        self.users = Users(recommender, store, number, capacity, settings.max_length)
        self.engine = Engine(self.users, self._hidden_rows)
        self._hidden: tuple[float, list[int]] = (0.0, [])
        self._names: tuple[Catalogue, list[tuple[str, int]]] | None = None
        self.new_items = NewItems(recommender, store)
        self._growing = threading.Lock()
        self._follower = Follower(self.follow_items) if self.new_items.possible else None
        if (larger := self.new_items.refresh()) is not None:
            self._use(larger)
        self.writer = Writer(store, self.knows, self.engine.fresh)
        self.unknown = metrics.counter("unknown_items", "Events with an item that the model does not know.")
        metrics.gauge("users_in_memory", "Users whose state is in memory.", lambda: len(self.users))
        metrics.gauge("state_bytes", "Bytes of one user's state.", lambda: self.users.state_bytes)

    @property
    def recommender(self) -> Recommender:
        """The model with the items that it knows now. The engine's thread replaces it by one with more items."""
        return self.users.recommender

    def start(self) -> None:
        """Start the threads."""
        self.engine.start()
        self.writer.start()
        if self._follower is not None:
            self._follower.start()

    def stop(self) -> None:
        """Finish what waits, store all states, close the store."""
        if self._follower is not None:
            self._follower.stop()
        self.writer.stop()
        self.engine.stop()
        self.store.close()

    async def append(self, submission: Submission) -> int:
        """Store the events of a request; returns the number of rows when they are durable."""
        count = await self.writer.append(submission)
        self.metrics.add(count)
        return count

    def knows(self, item: str) -> bool:
        """Whether the model knows an item; counts it if not."""
        if self.row(item) > 0:
            return True
        self.unknown.inc()
        return False

    def row(self, item: str) -> int:
        """The item's row of the catalogue; less than 1 for an item that the model does not know."""
        return int(self.recommender.catalogue.rows([item])[0])

    def _hidden_rows(self) -> list[int]:
        """Rows of items that must not be recommended, read from the store every few seconds: any process may change them."""
        if time.monotonic() > self._hidden[0]:
            rows = self.recommender.catalogue.index(self.store.hidden_items(), unknown="skip")
            self._hidden = (time.monotonic() + HIDDEN_SECONDS, rows.tolist())
        return self._hidden[1]

    def put_items(self, items: Sequence[ItemDescription]) -> ItemsStored:
        """Store descriptions of items. Those that the model can score are known when this returns."""
        labels = [(one.ItemId, one.model_dump_json(include={"Labels"})) for one in items]
        given = [pair for pair, one in zip(labels, items, strict=True) if one.Labels]
        self.store.put_items([(one.ItemId, one.IsHidden, one.model_dump_json()) for one in items], given)
        with self._growing:
            self._replace(self.new_items.refresh())
            known, scored, message = reply(self.new_items, labels)
        return ItemsStored(RowAffected=len(items), Known=known, Scored=scored, Message=message)

    def follow_items(self) -> None:
        """Take over items that other processes have stored."""
        with self._growing:
            if (larger := self.new_items.refresh()) is not None:
                self._replace(larger)

    def _replace(self, larger: Recommender | None) -> None:
        """Have the engine use a larger recommender, and read the hidden items again, between two batches of questions."""
        done = threading.Event()

        def replace() -> None:
            if larger is not None:
                self._use(larger)
            self._hidden = (0.0, [])
            done.set()

        self.engine.call(replace)
        done.wait(REPLACE_SECONDS)

    def _use(self, larger: Recommender) -> None:
        self.users.use(larger, self.new_items.number, list(self.new_items.added))

    def user(self, name: str) -> tuple[int, UserFacts] | None:
        """A user's uid and facts; None for a user without events."""
        account = self.store.accounts([name]).get(name)
        if account is None:
            return None
        uid, events = account
        if (entry := self.users.peek(uid)) is not None:
            facts = UserFacts(events, entry.number, entry.updated or None, self.users.state_bytes)
        elif (row := self.store.states([uid], self.users.model).get(uid)) is not None:
            facts = UserFacts(events, row.number, row.updated, len(row.state))
        else:
            facts = UserFacts(events, 0, None, 0)
        return uid, facts

    def delete(self, name: str) -> int:
        """Delete a user with all events and states; returns the number of events."""
        uid, events = self.store.delete_user(name)
        if uid is not None:
            self.engine.call(lambda: self.users.forget(uid))
        return events

    def _sorted_names(self, catalogue: Catalogue) -> list[tuple[str, int]]:
        """Items by id as text, with their rows."""
        found = self._names
        if found is None or found[0] is not catalogue:
            names = sorted((str(item), row) for row, item in enumerate(catalogue.items, 1))
            self._names = found = (catalogue, names)
        return found[1]

    def find_items(self, prefix: str, most: int) -> list[tuple[str, int]]:
        """Items whose id starts with `prefix`, in order, with their counts in training; the most popular ones for ""."""
        recommender = self.recommender  # one, while the engine may change to another
        counts, catalogue = recommender.model.item_counts, recommender.catalogue
        if not prefix:
            best = counts[1:].topk(min(most, len(counts) - 1)).indices + 1
            names = catalogue.names(best.tolist())
            return [(str(name), int(counts[row])) for name, row in zip(names, best.tolist(), strict=True)]
        by_name = self._sorted_names(catalogue)
        start = bisect_left(by_name, (prefix, 0))
        found = islice(by_name, start, start + most)
        return [(name, int(counts[row])) for name, row in found if name.startswith(prefix)]

    def about(self) -> dict[str, Any]:
        """The model in a few figures."""
        model = self.recommender.model
        return {
            "name": self.name,
            "layers": str(model.config.layers),
            "items": len(self.recommender.catalogue),
            "parameters": sum(x.numel() for x in model.parameters()),
            "state_bytes": self.users.state_bytes,
        }

    def not_ready(self) -> str | None:
        """Why requests cannot be answered now; None if they can."""
        try:
            self.store.totals()
        except StoreError as error:
            return str(error)
        return None


def open_service(run: Path, device: str, settings: RecSettings) -> RecService:
    """The service of a run, with its store opened; ValueError says what does not fit."""
    recommender = Recommender.load(run, device=device)
    store = open_store(settings.store, settings.wait, say)
    return RecService(recommender, str(run), store, settings, Metrics("events"))


def identity(recommender: Recommender) -> str:
    """Hash of what a state depends on: configuration, weights and the items' ids."""
    digest = hashlib.sha256(json.dumps(stable_fingerprint(recommender.model), sort_keys=True).encode())
    digest.update(recommender.catalogue.to_bytes())
    return digest.hexdigest()


def claim_store(store: Store, model: str, name: str, rebuild: bool) -> None:
    """Make this the store's model.

    A store whose states belong to another model is refused with a ValueError that names both, unless `rebuild`: then a user's
    history is read again when it is first needed.
    """
    found = json.loads(store.fact("model") or "null")
    if found is not None and found["identity"] != model and not rebuild and (users := store.totals().users):
        raise ValueError(
            f"the states of {users:,} users in the store {store.name} belong to the model {found['name']} "
            f"({found['identity'][:12]}), not to {name} ({model[:12]}): add --rebuild to read their histories again "
            "with the new model while it serves, or give another --store"
        )
    if found != {"identity": model, "name": name}:
        store.set_fact("model", json.dumps({"identity": model, "name": name}))
