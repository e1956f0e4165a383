"""One more token, and one more, without waiting for Python: a step that is captured once and replayed.

On a GPU a step of a small model is hundreds of short kernels, and starting them from Python takes ten times as long as
running them. A memory of fixed size makes every step alike, so that one CUDA graph serves them all: it reads a token and the
states, and writes the new states where the old ones were.

Design choices
- A cache owns its graph: `model(...)` and `generate` look at what cache they are given and need no other switch. Everything
  that is not one plain token a row (prompts, padding, the start of a document) takes the ordinary way, with the same cache.
- Captured is what the model computes, so that replayed and ordinary steps are the same kernels on the same numbers.
- Whether a step can be captured is also seen: its states must come back as they went in, shape for shape. Windows that a
  short prompt has not filled do not, yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prism.models.cache import PrismCache
from prism.nn.state import State

if TYPE_CHECKING:
    from prism.models.language import PrismForCausalLM


class ReplayedCache(PrismCache):
    """A `PrismCache` whose steps of one token a row are replayed.

    Unlike a `PrismCache`'s, its states are written to: take a `copy` of it to keep a place in the text. A model is captured
    with its parameters where they lie in memory; they may change in place, and if they move, a new graph is made. Hooks run
    while capturing only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step: _Step | None = None
        self._refused: Any = None

    def next_logits(self, model: PrismForCausalLM, tokens: Tensor) -> Tensor | None:
        """The logits `[B, 1, vocabulary]` after one more token `[B, 1]` a row, or None where that cannot be replayed."""
        if not model.config.constant_state:
            return None
        kind = _kind(model, tokens, self.states)
        if kind == self._refused:
            return None
        if self._step is None or self._step.kind != kind or self._step.moved():
            self._step = None  # and its memory with it
            self._step = _capture(model, tokens, self.states, kind)
            if self._step is None:
                self._refused = kind
                return None
        logits = self._step(tokens, self.states)
        self.update(self._step.states, 1)
        return logits

    def reset(self) -> None:
        super().reset()
        self._step = None

    def copy(self) -> PrismCache:
        """A plain cache that goes its own way from here."""
        twin = PrismCache()
        twin.update([state.map(torch.clone) for state in self.states], self.tokens)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> PrismCache:
        return self.copy()


def cache_for(model: PrismForCausalLM) -> PrismCache:
    """The cache that goes fastest with this model where it is: one whose steps are replayed, if it lies on one GPU whole."""
    places = {(type(p.data), p.device) for p in model.parameters()}
    on_one_gpu = len(places) == 1 and next(iter(places))[0] is Tensor and next(iter(places))[1].type == "cuda"
    return ReplayedCache() if on_one_gpu and model.config.constant_state else PrismCache()


class _Step:
    """A token and states in memory of their own, and the graph that takes them one token further."""

    def __init__(self, model: PrismForCausalLM, tokens: Tensor, states: list[State], kind: Any) -> None:
        self.kind = kind
        self.model = model
        self.weights = [*model.parameters(), *model.buffers()]
        self.places = [z.data_ptr() for z in self.weights]
        with torch.inference_mode(False):  # written to whatever mode later steps are called in
            self.tokens = tokens.clone()
            self.states = [state.map(torch.clone) for state in states]
        self.logits = tokens  # until there are some
        self.replay: Callable[[], None] = self.run

    def run(self) -> None:
        self.logits, new = _one_token(self.model, self.tokens, self.states)
        for state, after in zip(self.states, new, strict=True):
            for name, value in state.tensors().items():
                value.copy_(after.tensors()[name])

    def moved(self) -> bool:
        return self.places != [z.data_ptr() for z in self.weights]

    def __call__(self, tokens: Tensor, states: list[State]) -> Tensor:
        self.tokens.copy_(tokens)
        if states is not self.states:  # an ordinary step, or a choice among beams, was taken since
            for mine, given in zip(self.states, states, strict=True):
                for name, value in mine.tensors().items():
                    value.copy_(given.tensors()[name])
        self.replay()
        return self.logits.clone()


def _capture(model: PrismForCausalLM, tokens: Tensor, states: list[State], kind: Any) -> _Step | None:
    step = _Step(model, tokens, states, kind)
    if tokens.device.type != "cuda":
        _, new = _one_token(model, tokens, states)
        return step if _layout(new) == _layout(states) else None
    stream = torch.cuda.Stream(tokens.device)
    stream.wait_stream(torch.cuda.current_stream(tokens.device))
    with torch.cuda.stream(stream):  # what is compiled or made on first use must not be captured
        _, new = _one_token(model, step.tokens, step.states)
    torch.cuda.current_stream(tokens.device).wait_stream(stream)
    if _layout(new) != _layout(states):
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step.run()
    except RuntimeError as error:
        warnings.warn(f"a step of this model cannot be replayed, and will be slower: {error}", stacklevel=4)
        return None
    step.replay = graph.replay
    return step


def _one_token(model: PrismForCausalLM, tokens: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
    cache = PrismCache()
    cache.update(states, 0)
    return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True).logits, cache.states


def _kind(model: PrismForCausalLM, tokens: Tensor, states: list[State]) -> Any:
    """What a graph is good for."""
    device = tokens.device.type
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return id(model), tokens.shape, tokens.dtype, tokens.device, precision, _layout(states)


def _layout(states: list[State]) -> list[dict[str, Any]]:
    return [{name: (z.shape, z.dtype, z.device) for name, z in state.tensors().items()} for state in states]
