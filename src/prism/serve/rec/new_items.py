"""Items that the model was not trained on: described to the service, scored by their features.

Design choices
- States hold rows of the catalogue, so an item must have the same row in every process and after a restart. Descriptions are
  numbered in the store and never change there; the first one of an item that the model can read makes its row and its
  features.
- The larger recommender is always made from the one that was trained, with all items described until now: an item's vector
  does not depend on how many items came at once.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from prism.recommend import Recommender
from prism.recommend.frames import free_name
from prism.recommend.new_items import NO_FEATURES, add_items, feature_names
from prism.serve.rec.store import Store, StoreError

log = logging.getLogger("prism.serve")
FOLLOW_SECONDS = 1.0
"""How often a process looks for items that others have stored."""
MOST_VALUES = 100
"""Most values of one feature of one item: every item gets the room of the longest list."""
LARGEST_FLOAT = 3.4e38
"""Of float32, which vectors are."""


class Kind(NamedTuple):
    """A feature of the model that is a value or a list of values."""

    is_list: bool
    integers: bool
    known: dict[str, Any]
    """The values of training by their text."""


class NewItems:
    """The described items of a store that a recommender scores by their features. One thread at a time may use it.

    Args:
        trained: as it was trained, without new items.
    """

    def __init__(self, trained: Recommender, store: Store) -> None:
        self.trained, self.store = trained, store
        self.number = 0
        """Of the last description that was read."""
        self.added: list[tuple[int, str]] = []
        """The new items in the order of their rows: number of the description, id."""
        self._features: dict[str, dict[str, Any]] = {}
        self._rows = 0  # new items that the last recommender has
        self._vectors: dict[str, int] = dict(trained.model.config.item_vectors)
        self._kinds: dict[str, Kind] = {}
        for name, feature in trained.catalogue.features.items():
            known = {str(value): value for value in feature.values[1:]}
            integers = bool(known) and all(isinstance(value, int) for value in known.values())
            self._kinds[name] = Kind(feature.is_list, integers, known)

    @property
    def possible(self) -> bool:
        """Whether the model has features, so that it can score items that it was not trained on."""
        return bool(self._kinds or self._vectors)

    def __contains__(self, item: str) -> bool:
        return item in self._features

    def refresh(self) -> Recommender | None:
        """Read the descriptions that are new in the store; the larger recommender, or None if there is no new item."""
        if not self.possible:
            return None
        for number, item, labels in self.store.described_after(self.number):
            self.number = number
            if item not in self and not self.was_trained(item):
                try:
                    self._features[item] = self.read(item, labels)
                except ValueError:  # the request has been answered with the reason
                    continue
                self.added.append((number, item))
        if len(self.added) == self._rows:
            return None
        larger = self._grown()
        self._rows = len(self.added)
        return larger

    def was_trained(self, item: str) -> bool:
        """Whether the model was trained on an item."""
        return int(self.trained.catalogue.rows([item])[0]) > 0

    def changed(self, item: str, labels: str) -> bool:
        """Whether a description of an item that is scored by its features gives it other ones."""
        try:
            return json.loads(labels)["Labels"] is not None and self.read(item, labels) != self._features[item]
        except ValueError:
            return True

    def why_not(self, item: str, labels: str) -> str:
        """Why the model cannot score an item with this description."""
        try:
            self.read(item, labels)
        except ValueError as error:
            return str(error)
        return "it is not read yet"

    def read(self, item: str, labels: str) -> dict[str, Any]:
        """The features of an item, `{name: value, list or vector}`; ValueError says why the model cannot score it.

        Args:
            labels: as stored: JSON of an object with the entry `Labels`.
        """
        catalogue = self.trained.catalogue
        if len(catalogue) and isinstance(catalogue.items[0], int) and not _is_integer(item):
            raise ValueError("its id is text, and those of training are integers")
        return features_of(json.loads(labels)["Labels"], self._kinds, self._vectors)

    def names(self) -> str:
        """The features of the model, for messages."""
        return feature_names(self.trained.model, self.trained.catalogue)

    def _grown(self) -> Recommender:
        used = {name for features in self._features.values() for name in features}
        key = free_name("item", [*self._kinds, *self._vectors])
        table: dict[str, list[Any]] = {key: list(self._features)}
        table |= {name: [features.get(name) for features in self._features.values()] for name in sorted(used)}
        model, catalogue = add_items(self.trained.model, self.trained.catalogue, table, key, None)
        catalogue.rows([""])  # prepares the search by id, here and not between two answers
        return Recommender(model, catalogue)


def features_of(labels: Any, kinds: dict[str, Kind], vectors: dict[str, int]) -> dict[str, Any]:
    """Gorse's labels as features of a model: those that it has, with values of the type of training.

    Args:
        vectors: names of the features that are vectors, and their sizes.
    """
    if isinstance(labels, list):
        lists = [name for name, kind in kinds.items() if kind.is_list] or list(vectors)
        if len(lists) != 1:
            raise ValueError("its Labels is a list, but the model does not have exactly one feature of lists")
        labels = {lists[0]: labels}
    if not isinstance(labels, dict):
        raise ValueError("its Labels must be an object of features, or a list of values")
    found: dict[str, Any] = {}
    for name, value in labels.items():
        if value is None or value == []:
            continue
        if name in vectors:
            found[name] = _vector(name, value, vectors[name])
        elif name in kinds:
            kind = kinds[name]
            values = value if isinstance(value, list) else [value]
            if len(values) > (MOST_VALUES if kind.is_list else 1):
                most = f"at most {MOST_VALUES} values" if kind.is_list else "one value"
                raise ValueError(f"its {name} must have {most}, it has {len(values):,}")
            each = [_value(name, one, kind) for one in values]
            found[name] = each if kind.is_list else each[0]
    if not found:
        raise ValueError("its Labels has no feature of the model")
    return found


def _value(name: str, value: Any, kind: Kind) -> Any:
    if isinstance(value, bool):
        value = "true" if value else "false"  # as columns of truth values are read for training
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"its {name} must hold text or numbers")
    if kind.integers and isinstance(value, float) and value.is_integer():
        value = int(value)
    if str(value) in kind.known:
        return kind.known[str(value)]
    if not kind.integers:
        return str(value)
    if not _is_integer(str(value)):
        raise ValueError(f"its {name} must hold integers, as in training")
    return int(value)


def _is_integer(text: str) -> bool:
    """Whether a text is an integer of 64 bits, as it is printed."""
    digits = text.removeprefix("-")
    return digits.isdecimal() and len(digits) < 20 and str(int(text)) == text and -(2**63) <= int(text) < 2**63


def _vector(name: str, value: Any, size: int) -> list[float]:
    numbers = isinstance(value, list) and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value)
    if not numbers or len(value) != size or not all(abs(x) < LARGEST_FLOAT for x in value):
        raise ValueError(f"its {name} is a vector, which Labels must give as a list of {size} finite numbers")
    return [float(x) for x in value]


def reply(new: NewItems, items: Sequence[tuple[str, str]]) -> tuple[int, int, str]:
    """How many of the described items the model was trained on, how many it scores by features, and a message on the rest.

    Args:
        items: ids, and labels as stored.
    """
    trained = sum(new.was_trained(item) for item, _ in items)
    if not new.possible:
        return trained, 0, f"{NO_FEATURES[0].upper()}{NO_FEATURES[1:]}."
    scored = [(item, labels) for item, labels in items if item in new]
    words = [f"Items scored by their features: {len(scored):,}."] if scored else []
    if kept := [item for item, labels in scored if new.changed(item, labels)]:
        words.append(f"An item keeps the features that it was first scored by, such as {kept[0]!r}.")
    rest = [(item, labels) for item, labels in items if item not in new and not new.was_trained(item)]
    if rest:
        words.append(f"Items not scored: {len(rest):,}, such as {rest[0][0]!r}: {new.why_not(*rest[0])}.")
        words.append(f"The model has the features {new.names()}.")
    if trained:
        words.append(f"Items of training, which stay as they are: {trained:,}.")
    return trained, len(scored), " ".join(words)


class Follower:
    """A thread that looks for items that other processes have stored.

    Args:
        refresh: reads them; called every `FOLLOW_SECONDS`.
    """

    def __init__(self, refresh: Callable[[], None]) -> None:
        self.refresh = refresh
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="new items", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(FOLLOW_SECONDS):
            self._look()

    def _look(self) -> None:
        """Refresh; a failure is logged, and made up for the next time."""
        try:
            self.refresh()
        except StoreError as error:
            log.debug("new items not read", extra={"fields": {"reason": str(error)}})
        except Exception:
            log.exception("new items not read")
