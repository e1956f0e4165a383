"""One more token, and one more, without waiting for Python: a step that is captured once and replayed.

On a GPU a step of a small model is hundreds of short kernels, and starting them from Python takes ten times as long as
running them. A memory of fixed size makes every step alike, so that one CUDA graph (captured.py) serves them all.

Design choices
- A cache owns its graph: `model(...)` and `generate` look at what cache they are given and need no other switch. Everything
  that is not one plain token a row (prompts, padding, the start of a document) takes the ordinary way, with the same cache.
- Captured is what the model computes, so that replayed and ordinary steps are the same kernels on the same numbers.
- A capture costs a few steps, so the first steps are ordinary ones: a short answer never pays for a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.models.cache import CachedModel, PrismCache
from prism.models.captured import CapturedStep, capture, choice_of, layout, precision, repeatable

PATIENCE = 3
"""Ordinary steps of one kind before one is captured."""


class ReplayedCache(PrismCache):
    """A `PrismCache` whose steps of one token a row are replayed.

    Unlike a `PrismCache`'s, its states are written to: take a `copy` of it, or its `tensors`, to keep a place in the text. It
    keeps the model that it steps. Models with hooks or switchable adapters are stepped in the ordinary way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step: CapturedStep | None = None
        self._kind: Any = None
        self._waited, self._patience = 0, PATIENCE

    def step(self, model: CachedModel, tokens: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The logits `[B, 1, vocabulary]` after one more token `[B, 1]` a row, and the balance loss; None where an ordinary
        step is to be taken."""
        if tokens.is_cuda and torch.cuda.is_current_stream_capturing():  # by somebody else
            return None
        if self._step is not None and not self._step.serves(model, tokens, self.states):
            self._step, self._kind = None, None  # and its memory with it
            self._patience *= 2  # where this happens again and again, graphs are made ever more seldom
        if self._step is None:
            self._step = self._after_a_while(model, tokens)
        if self._step is None:
            return None
        answers = self._step(tokens, self.states)
        self.update(list(self._step.states), 1)
        return answers

    def _after_a_while(self, model: CachedModel, tokens: Tensor) -> CapturedStep | None:
        """Tried once for steps of a kind."""
        if not repeatable(model):
            self._kind = None
            return None
        about = tokens.shape, tokens.dtype, tokens.device, precision(tokens.device)
        kind = id(model), *about, choice_of(model), layout(self.states)
        self._waited = self._waited + 1 if kind == self._kind else 0
        self._kind = kind
        if self._waited != self._patience:
            return None
        try:
            return capture(model, tokens, self.states)
        except BaseException:  # an interrupt: the next steps may try again
            self._kind = None
            raise

    def tensors(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in super().tensors().items()}

    def copy(self) -> PrismCache:
        """A plain cache that goes its own way from here."""
        twin = PrismCache()
        twin.update([state.map(torch.clone) for state in self.states], self.tokens)
        return twin

    def __copy__(self) -> PrismCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrismCache:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_step": None, "_kind": None}


def cache_for(model: CachedModel) -> PrismCache:
    """The cache that goes fastest with this model where it is: one whose steps are replayed, if it lies on one GPU whole."""
    kinds, devices = {type(p.data) for p in model.parameters()}, {p.device for p in model.parameters()}
    on_one_gpu = kinds == {Tensor} and len(devices) == 1 and next(iter(devices)).type == "cuda"
    return ReplayedCache() if on_one_gpu and model.config.constant_state else PrismCache()
