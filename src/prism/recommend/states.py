"""UserStates: the memory of users between their events, and the items they had.

For rules with a memory of fixed size, the memory has the same number of bytes after any number of events. The items that a
user had take 4 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from prism.files import read_state, write_state
from prism.nn.state import State, concatenate
from prism.recommend.seen import SeenItems

FORMAT = "prism user states 1"


@dataclass(frozen=True)
class UserStates:
    """The states of n users, one row of every tensor each. Immutable: `observe` returns new states.

    `Recommender.start` makes them, `Recommender.observe` updates them, `Recommender.recommend(states=…)` reads them.
    """

    layers: tuple[State, ...]
    """States of the model's mixers, n rows each."""
    hidden: Tensor
    """`[n, D]`, output after the last event, from which the next item is scored; zeros before the first event."""
    events: Tensor
    """int64 `[n]`, number of events of each user."""
    last_time: Tensor
    """float64 `[n]`, time of the last event, for models with `time_gaps`; NaN before the first event and for other models."""
    model: dict[str, str]
    """Identity of the model that the states belong to."""
    seen: SeenItems = field(default=None)  # type: ignore[assignment]  # set by __post_init__
    """The items of each user; states made without them know of none."""

    def __post_init__(self) -> None:
        if self.seen is None:
            object.__setattr__(self, "seen", SeenItems.none(len(self.events)))

    def __len__(self) -> int:
        return len(self.events)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def nbytes(self) -> int:
        """Bytes of the memory; `seen.nbytes` are those of the items."""
        return sum(x.nbytes for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the memory by their flat names."""
        layers = {f"layers.{i}.{name}": x for i, state in enumerate(self.layers) for name, x in state.tensors().items()}
        return {**layers, "hidden": self.hidden, "events": self.events, "last_time": self.last_time}

    def index_select(self, rows: Tensor | Sequence[int]) -> UserStates:
        """The states of these users, in this order."""
        picked = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        selected = self._map(lambda x: x.index_select(0, picked))
        return replace(selected, seen=self.seen.index_select(picked.cpu().numpy()))

    def to(self, device: torch.device | str) -> UserStates:
        return self._map(lambda x: x.to(device))

    @staticmethod
    def concatenate(states: Sequence[UserStates]) -> UserStates:
        """Join the users of several states; the inverse of `index_select`."""
        if not states:
            raise ValueError("states must not be empty: there is nothing to concatenate")
        if any(other.model != states[0].model for other in states):
            raise ValueError("states belong to different models: only states of one model can be concatenated")
        return UserStates(
            tuple(concatenate(list(layer)) for layer in zip(*(part.layers for part in states), strict=True)),
            torch.cat([part.hidden for part in states]),
            torch.cat([part.events for part in states]),
            torch.cat([part.last_time for part in states]),
            states[0].model,
            SeenItems.concatenate([part.seen for part in states]),
        )

    def save(self, path: Path | str) -> None:
        """Write one safetensors file, atomically."""
        write_state(Path(path), FORMAT, {**self.tensors(), **self.seen.tensors()}, self.model)

    @classmethod
    def load(cls, path: Path | str, device: torch.device | str = "cpu") -> UserStates:
        """Read a file that `save` wrote. Whether it fits a recommender is checked when it is used with one."""
        tensors, about = read_state(Path(path), FORMAT)
        return cls.unflatten(tensors, {name: value for name, value in about.items() if name != "format"}).to(device)

    @classmethod
    def unflatten(cls, tensors: Mapping[str, Tensor], model: dict[str, str]) -> UserStates:
        """The states with these tensors; the inverse of `tensors`."""
        layers: dict[int, dict[str, Tensor]] = {}
        for key, x in tensors.items():
            if key.startswith("layers."):
                _, layer, name = key.split(".", 2)
                layers.setdefault(int(layer), {})[name] = x
        states = tuple(State.load(layers[i]) for i in sorted(layers))
        seen = SeenItems.load(tensors, len(tensors["events"]))
        return cls(states, tensors["hidden"], tensors["events"], tensors["last_time"], model, seen)

    def _map(self, function: Callable[[Tensor], Tensor]) -> UserStates:
        return replace(
            self,
            layers=tuple(state.map(function) for state in self.layers),
            hidden=function(self.hidden),
            events=function(self.events),
            last_time=function(self.last_time),
        )

    def __repr__(self) -> str:
        counts = {
            "users": len(self),
            "events": int(self.events.sum()),
            "nbytes": self.nbytes,
            "seen": len(self.seen.items),
        }
        return f"UserStates({', '.join(f'{name}={count:,}' for name, count in counts.items())})"
