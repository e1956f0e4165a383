"""What baselines share: their interface, and the sets of items that they work on."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from prism.recommend.events.histories import Histories
from prism.recommend.events.split import Targets


class Baseline(ABC):
    """A baseline; its constructor has the options, `fit` learns from events, and then it is a `Scorer`."""

    name: ClassVar[str]
    num_items: int = 0
    fit_seconds: float = 0.0

    @abstractmethod
    def fit(self, train: Histories, num_items: int, seed: int = 0) -> None:
        """Learn from the events of training; the items are 1 … num_items."""

    @abstractmethod
    def score(self, sets: SetsOfItems) -> Tensor:
        """Scores `[B, N + 1]` of all items, float32, for these users."""

    def scores(self, targets: Targets, histories: Histories, max_length: int) -> Tensor:
        """See `Scorer`. All events before each target are read: `max_length` is for models that read sequences."""
        return self.score(SetsOfItems.before(targets, histories, self.num_items))

    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value:g}" for name, value in self.options().items())
        return f"{self.name}({options})" if options else self.name


class SetsOfItems:
    """The distinct items of B users: pairs of user and item, ascending, int64 `[P]` each; users are rows of the events."""

    def __init__(self, count: int, user_of: np.ndarray, item_of: np.ndarray, users: np.ndarray, num_items: int) -> None:
        self.count, self.users, self.num_items = count, users, num_items
        keys = np.unique(user_of * (num_items + 1) + item_of)
        self.user_of, self.item_of = keys // (num_items + 1), keys % (num_items + 1)

    @classmethod
    def of(cls, histories: Histories, num_items: int) -> SetsOfItems:
        """The items of all users."""
        users = np.arange(len(histories))
        return cls(len(users), np.repeat(users, histories.lengths), histories.items, users, num_items)

    @classmethod
    def before(cls, targets: Targets, histories: Histories, num_items: int) -> SetsOfItems:
        """The items of all events before each target."""
        seen = histories.take(targets.users).head(targets.ends)
        owners = np.repeat(np.arange(len(targets)), seen.lengths)
        return cls(len(targets), owners, seen.items, targets.users, num_items)

    def dense(self) -> Tensor:
        """Zeros and ones, float32 `[B, N + 1]`."""
        found = torch.zeros(self.count, self.num_items + 1)
        found[torch.from_numpy(self.user_of), torch.from_numpy(self.item_of)] = 1.0
        return found
