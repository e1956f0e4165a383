"""Remove the last tokens from a cache: return to an earlier state, and read the tokens that remain after it again.

A memory of fixed size cannot be inverted. So a cache that records keeps the states of an earlier position and the inputs
since then. `crop` returns to that position; the inputs up to the new end are read with the next call's.

    position     p0 …………… p1 …………… now          p1 - p0 ≥ depth, points older than needed are dropped
    kept         states, inputs from p0 on      so at least the last `depth` tokens can always be removed

Design choices
- The states are kept every `depth` tokens, not after each: up to two more copies of them, and no work for most tokens.
- Tokens to read again are not read at once, but at the front of the next call: it costs a few tokens more, not a call more.
- Attention caches that grow are not copied: an earlier one is the first part of a later one.

In this file: `Inputs` of a call, and `Rollback`, what is kept of the past.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prism.nn.state import State

DEPTH = 8
"""Number of last tokens that can be removed, unless asked for more."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of one forward pass.

    Args:
        tokens: `[B, T]` token ids, or `[B, T, hidden_size]` embeddings.
        mask: `[B, T]` bool, False is padding; None: all tokens are real.
        reset: `[B, T]` bool, True where a document starts; None: nowhere.
    """

    tokens: Tensor
    mask: Tensor | None = None
    reset: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[1]

    @property
    def plain(self) -> bool:
        """Whether all tokens are real and continue their documents."""
        return self.mask is None and self.reset is None

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Inputs with `function` applied to every tensor."""
        return Inputs(**{name: function(value) for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        named = {"tokens": self.tokens, "mask": self.mask, "reset": self.reset}
        return {name: value for name, value in named.items() if value is not None}


def count(inputs: list[Inputs]) -> int:
    """The number of tokens."""
    return sum(map(len, inputs))


def cut(inputs: list[Inputs], start: int, stop: int) -> list[Inputs]:
    """The inputs of tokens `start` … `stop` - 1."""
    parts, begin = [], 0
    for part in inputs:
        first, last = max(start - begin, 0), min(stop - begin, len(part))
        if first < last:
            whole = last - first == len(part)
            parts.append(part if whole else part.map(lambda x, first=first, last=last: x[:, first:last]))  # type: ignore[misc]
        begin += len(part)
    return parts


def join(inputs: list[Inputs], embed: Callable[[Tensor], Tensor]) -> Inputs:
    """All tokens as one call's inputs; as embeddings, if only some are ids."""
    if len(inputs) == 1:
        return inputs[0]
    tokens = [part.tokens for part in inputs]
    if len({x.ndim for x in tokens}) > 1:
        tokens = [embed(x) if x.ndim == 2 else x for x in tokens]
    mask = _flags([part.mask for part in inputs], inputs, True)
    return Inputs(torch.cat(tokens, 1), mask, _flags([part.reset for part in inputs], inputs, False))


def _flags(flags: list[Tensor | None], inputs: list[Inputs], default: bool) -> Tensor | None:
    """Flags `[B, T]` of all tokens; None if no part has any."""
    if all(flag is None for flag in flags):
        return None
    shapes = [part.tokens[:, :, 0] if part.tokens.ndim == 3 else part.tokens for part in inputs]
    full = [
        torch.full_like(x, default, dtype=torch.bool) if f is None else f for f, x in zip(flags, shapes, strict=True)
    ]
    return torch.cat(full, 1)


@dataclass(frozen=True)
class Point:
    """The states after this many tokens."""

    tokens: int
    states: list[State]
    only_appended: bool = True
    """Whether since then nothing was padding or opened a document, so that growing caches still begin with these."""


@dataclass
class Rollback:
    """What a cache keeps to return to an earlier position.

    Args:
        depth: number of last tokens that can always be removed, if there were as many since recording began.
        points: earlier states, oldest first. States are never written in place here.
        inputs: those that the cache's states have read since the first point.
    """

    depth: int = DEPTH
    points: list[Point] = field(default_factory=list)
    inputs: list[Inputs] = field(default_factory=list)

    def due(self, tokens: int) -> bool:
        """Whether to keep the states after `tokens` tokens, before more are read."""
        return not self.points or tokens - self.points[-1].tokens >= self.depth

    def keep(self, tokens: int, states: list[State]) -> None:
        self.points.append(Point(tokens, states))

    def add(self, inputs: list[Inputs], tokens: int, states: list[State], removable: int) -> None:
        """Record that these inputs were read: now there are `tokens` tokens, of which the last `removable` may be removed."""
        self.inputs += [part.map(torch.clone) for part in inputs]  # the caller may reuse its buffers
        needed = tokens - max(removable, self.depth)
        first = next(i for i in reversed(range(len(self.points))) if i == 0 or self.points[i].tokens <= needed)
        self.inputs = cut(self.inputs, self.points[first].tokens - self.points[0].tokens, tokens)
        self.points = self.points[first:]
        plain = all(part.plain for part in inputs)
        self.points = [
            _sharing(point, states) if plain else replace(point, only_appended=False) for point in self.points
        ]

    def back_to(self, tokens: int, unread: list[Inputs]) -> tuple[list[State], list[Inputs]]:
        """The latest states after at most `tokens` tokens, and the inputs from there on. `unread`: those not yet read."""
        start, inputs = self.points[0].tokens, [*self.inputs, *unread]
        self.points = [point for point in self.points if point.tokens <= tokens]
        latest = self.points[-1].tokens
        self.inputs = cut(inputs, 0, latest - start)
        return list(self.points[-1].states), cut(inputs, latest - start, tokens - start)

    def map(self, function: Callable[[Tensor], Tensor]) -> Rollback:
        """With `function` applied to every tensor, for rows that come and go."""
        points = [replace(point, states=[s.map(function) for s in point.states]) for point in self.points]
        return Rollback(self.depth, points, [part.map(function) for part in self.inputs])

    def copy(self) -> Rollback:
        return Rollback(self.depth, list(self.points), list(self.inputs))


def _sharing(point: Point, later: list[State]) -> Point:
    """The point, with growing attention caches as views of the later ones."""
    if not point.states or not point.only_appended:
        return point
    return replace(point, states=[_view(old, new) for old, new in zip(point.states, later, strict=True)])


def _view(old: State, new: State) -> State:
    if not isinstance(old.memory, dict) or old.memory.keys() != {"k", "v", "length"}:
        return old
    slots = old.memory["k"].shape[1]
    if new.memory["k"].shape[1] == slots:  # a window: the oldest tokens were dropped
        return old
    return State({**old.memory, "k": new.memory["k"][:, :slots], "v": new.memory["v"][:, :slots]}, old.carry)
