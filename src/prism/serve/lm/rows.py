"""The states of many texts as rows of one batch, which texts join and leave between steps.

`FixedRows` computes one of a few fixed numbers of rows, so that a step that was recorded or captured for this number
(`cache_for`) serves until the batch outgrows it. It is for models whose states have a fixed size. `Rows` has as many rows as
there are texts, and is for models whose states grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prism import rules
from prism.models import PrismCache
from prism.models.lean import step
from prism.models.replay import cache_for
from prism.nn.state import State, concatenate

Step = Callable[[Tensor, PrismCache], Tensor]
"""One more token per row: tokens `[B]` and the cache, which is advanced → logits `[B, V]` of the next."""


def model_step(model: Any) -> Step:
    """The step by the model, recorded or captured if the cache can."""
    return lambda tokens, cache: step(model, tokens.to(model.device), cache)


class Rows:
    """Rows without gaps: a text that leaves makes the batch smaller. Works for every rule, also those whose state grows.

    Args:
        step: what computes a token per row.
        growing: for every layer, whether its state grows with the text.
    """

    def __init__(self, step: Step, growing: Sequence[bool]) -> None:
        self.step_function, self.growing = step, growing
        self.texts: list[Any] = []
        """What stands in each row, in the order of `step`'s tokens and logits."""
        self._cache = PrismCache()
        self._joining: list[PrismCache] = []

    def __len__(self) -> int:
        return len(self.texts)

    def join(self, text: Any, cache: PrismCache) -> None:
        """Add a row with the state of a cache of one row. The cache itself is not changed."""
        self.texts.append(text)
        self._joining.append(cache.copy())

    def leave(self, texts: Sequence[Any]) -> None:
        """Remove the rows of these texts."""
        gone = set(map(id, texts))
        held = len(self.texts) - len(self._joining)
        keep = [i for i, text in enumerate(self.texts) if id(text) not in gone]
        self._joining = [self._joining[i - held] for i in keep if i >= held]
        self.texts = [self.texts[i] for i in keep]
        kept = [i for i in keep if i < held]
        if len(kept) < held:
            index = torch.tensor(kept, dtype=torch.long)
            states = [state.index_select(index) for state in self._cache.states] if kept else []
            pairs = zip(states, self.growing, strict=bool(states))
            self._cache.states = [_trimmed(state) if grows else state for state, grows in pairs]

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token per row; returns the logits `[B, V]` of the next, float32 on the CPU."""
        if self._joining:
            groups = [cache.states for cache in (self._cache, *self._joining) if cache.states]
            self._cache.states = [concatenate(list(layer)) for layer in zip(*groups, strict=True)]
            self._joining = []
        return self.step_function(torch.tensor(tokens), self._cache).float().cpu()


class FixedRows:
    """One of a few fixed numbers of rows, of which some are in use. For models whose states have a fixed size.

    Args:
        sizes: numbers of rows, ascending; the batch has the smallest that suffices, and returns to a smaller one when its
            half suffices.
        step: as in `Rows`.
    """

    def __init__(self, model: Any, sizes: Sequence[int], step: Step) -> None:
        self.step_function, self.sizes = step, sizes
        self._cache = cache_for(model)
        self._slots: list[Any] = []

    @property
    def texts(self) -> list[Any]:
        return [text for text in self._slots if text is not None]

    def __len__(self) -> int:
        return len(self.texts)

    @torch.inference_mode()
    def join(self, text: Any, cache: PrismCache) -> None:
        if None not in self._slots:
            self._resize(len(self._slots) + 1, cache)
        slot = self._slots.index(None)
        self._slots[slot] = text
        for held, new in zip(self._cache.states, cache.states, strict=True):
            given = new.tensors()
            for name, rows in held.tensors().items():
                rows[slot].copy_(given[name][0])

    def _resize(self, rows: int, like: PrismCache) -> None:
        """Make room for this many rows: those in use come first, the others hold any state."""
        size = next(size for size in self.sizes if size >= rows)
        used = [slot for slot, text in enumerate(self._slots) if text is not None]
        index = torch.tensor([*used, *[used[0] if used else 0] * (size - len(used))])
        old = self._cache.states if used else like.states
        self._cache.states = [state.index_select(index) for state in old]
        self._slots = [self._slots[slot] for slot in used] + [None] * (size - len(used))

    @torch.inference_mode()
    def leave(self, texts: Sequence[Any]) -> None:
        gone = set(map(id, texts))
        self._slots = [None if id(text) in gone else text for text in self._slots]
        smaller = [size for size in self.sizes if len(self) <= size // 2]
        if len(self) and smaller and smaller[0] < len(self._slots):
            self._resize(smaller[0], self._cache)

    def step(self, tokens: Sequence[int]) -> Tensor:
        used = [slot for slot, text in enumerate(self._slots) if text is not None]
        batch = torch.zeros(len(self._slots), dtype=torch.long)
        batch[used] = torch.tensor(tokens)
        return self.step_function(batch, self._cache).float().cpu()[used]


def rows_for(model: Any, capacity: int, by: Step | None = None) -> Rows | FixedRows:
    """Rows for up to this many texts, of the kind that fits the model.

    On a GPU there is one number of rows, because a step costs about the same for any, and a captured graph much memory.
    """
    by = model_step(model) if by is None else by
    if not model.config.constant_state:
        return Rows(by, [not rules.get(layer.rule).constant_state for layer in model.config.layer_plan])
    sizes = [capacity] if model.device.type == "cuda" else [*(n for n in (4, 8, 16, 32) if n < capacity), capacity]
    return FixedRows(model, sizes, by)


def _trimmed(state: State) -> State:
    """A cache of attention that is as long as its longest row: slots at the front that no row uses are cut off."""
    memory = state.memory
    unused = memory["k"].shape[1] - int(memory["length"].max())
    return replace(state, memory={**memory, "k": memory["k"][:, unused:], "v": memory["v"][:, unused:]})
