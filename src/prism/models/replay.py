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

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.defaults import Choice, resolve
from prism.models.cache import CachedModel, PrismCache
from prism.nn.state import State

# A step of one token, recorded once: places for the token and the states that stay, and a CUDA graph from the one to
# the next.
#
# A graph repeats kernels on memory; it does not look at the model again. So a step remembers what it was recorded
# from, and says
# when that is no longer so: a parameter, buffer or module replaced or moved, a hook that would have to run, another
# precision.

_one_capture = threading.Lock()
_failed: list[torch.cuda.CUDAGraph] = []


class CapturedStep:
    """One more token a row for the same number of rows, into `states`, which belong to it."""

    def __init__(self, model: CachedModel, tokens: Tensor, states: list[State]) -> None:
        self.model = model
        self.modules = modules = list(model.modules())
        self.registries = compat.registries(modules) or []  # `repeatable` has seen that they can be read
        entries = [(registry, name, value) for registry in self.registries for name, value in registry.items()]
        self.holders, self.names, self.contents = zip(*entries, strict=True)
        self.hooks = compat.forward_hooks(modules) or []
        self.attributes = [m.__dict__ for m in modules]
        self.modes = self.modes_now()
        self.weights = [*model.parameters(), *model.buffers()]
        self.places = self.places_now()
        self.precision = precision(tokens.device)
        self.choice = choice_of(model)
        with torch.inference_mode(False), torch.no_grad():  # written to whatever mode later steps are called in
            self.tokens = tokens.clone()
            self.states = [state.map(_contiguous) for state in states]
        self.answers: tuple[Tensor, Tensor | None] = tokens, None
        self.replay: Callable[[], None] | None = None

    def run(self) -> None:
        """For a graph, which is never interrupted: most memories are written where they lie, all else is copied there."""
        self._take(overwrite=True)

    def run_again(self) -> None:
        """Without a graph: nothing is written before all is computed."""
        self._take(overwrite=False)

    def _take(self, overwrite: bool) -> None:
        logits, balance, new = self.compute(self.states, overwrite)
        self.answers = logits, balance
        _copy(new, self.states)

    def compute(self, states: list[State], overwrite: bool) -> tuple[Tensor, Tensor | None, list[State]]:
        """Logits, balance loss and new states, with the model as it is now."""
        cache = PrismCache()
        cache.update([replace(state, overwrite=overwrite) for state in states], 0)
        out: Any = self.model.forward(self.tokens, past_key_values=cache, use_cache=True, return_dict=True)
        return out.logits, out.balance_loss, cache.states

    def steady(self) -> bool:
        """Whether the states come back as they went in. Also compiles whatever is compiled on first use."""
        copies = [state.map(_contiguous) for state in self.states]
        return layout(self.compute(copies, overwrite=True)[-1]) == layout(self.states)

    def serves(self, model: CachedModel, tokens: Tensor, states: list[State]) -> bool:
        alike = (tokens.shape, tokens.dtype, tokens.device) == (
            self.tokens.shape,
            self.tokens.dtype,
            self.tokens.device,
        )
        if model is not self.model or not alike or precision(tokens.device) != self.precision:
            return False
        if choice_of(model) != self.choice:
            return False
        return (self.holds(states) or layout(states) == layout(self.states)) and not self.outdated()

    def holds(self, states: list[State]) -> bool:
        """Whether these are its own, where the last step left them."""
        return len(states) == len(self.states) and all(map(is_, states, self.states))

    def outdated(self) -> bool:
        """Whether the model is another than the one that was recorded. Numbers may have changed in place."""
        same = all(map(is_, map(dict.get, self.holders, self.names), self.contents)) and not any(self.hooks)
        return not same or self.modes_now() != self.modes or self.places_now() != self.places

    # Asked before every step, so without a loop in Python.
    def modes_now(self) -> list[Any]:
        """Of every module: training or not, a `forward` of its own (from accelerate), its class, how much it holds."""
        own = [*map(dict.get, self.attributes, repeat("training")), *map(dict.get, self.attributes, repeat("forward"))]
        return [*own, *map(type, self.modules), *map(len, self.registries)]

    def places_now(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self.weights), *map(attrgetter("dtype", "shape"), self.weights)]

    def __call__(self, tokens: Tensor, states: list[State]) -> tuple[Tensor, Tensor | None]:
        """Logits `[B, 1, vocabulary]` and the balance loss."""
        self.tokens.copy_(tokens)
        if not self.holds(states):  # an ordinary step, or a choice among beams, was taken since
            _copy(states, self.states)
        (self.replay or self.run_again)()
        logits, balance = self.answers
        return logits.clone(), None if balance is None else balance.clone()


def repeatable(model: CachedModel) -> bool:
    """Whether a step is the same every time, as far as can be told without one: no growing states, no hooks, and no adapters
    of peft's, which are switched by flags that a graph does not see."""
    if not model.config.constant_state:
        return False
    if os.environ.get("PRISM_CHECK") == "1":  # values are looked at, which waits for the device
        return False
    modules = list(model.modules())
    hooks = compat.forward_hooks(modules)
    if hooks is None or any(hooks) or compat.registries(modules) is None:  # what cannot be watched cannot be replayed
        return False
    return not any(hasattr(m, "_disable_adapters") for m in modules)


def capture(model: CachedModel, tokens: Tensor, states: list[State]) -> CapturedStep | None:
    """None where a step's states do not come back as they went in; and, with a warning, where it does something that no graph
    can do."""
    try:
        step = CapturedStep(model, tokens, states)
        with _casting_anew(tokens.device):
            return step if record(step) else None
    except RuntimeError as error:  # of the two errors of a failed capture, the first says why
        why = error.__context__ or error
        warnings.warn(f"a step of this model cannot be replayed, and will be slower: {why}", stacklevel=2)
        return None


def record(step: CapturedStep) -> bool:
    """Make the step's graph, on a GPU; elsewhere it is run again every time. False where its states do not stay alike."""
    device = step.tokens.device
    if device.type != "cuda":
        return step.steady()
    graph = torch.cuda.CUDAGraph()
    with _one_capture, torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):  # leaves the stream as it was also when a capture fails
                if not step.steady():
                    return False
                _record(graph, stream, step.run)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
    step.replay = graph.replay
    return True


def _record(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, run: Callable[[], None]) -> None:
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    except BaseException:
        # Torch does not end what a failed capture began: the allocator may still ask the graph, so it stays, and random
        # numbers believe that they are captured until another capture ends.
        _failed.append(graph)
        again = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
        with suppress(RuntimeError), torch.cuda.stream(stream), again:
            torch.zeros(1, device=stream.device)
        raise


def choice_of(model: CachedModel) -> Choice:
    """The form and backend that a forward pass of the model takes now."""
    return resolve(model.config.form, model.config.backend)


def layout(states: list[State]) -> list[dict[str, Any]]:
    return [{name: (z.shape, z.dtype, z.device) for name, z in state.tensors().items()} for state in states]


def _copy(sources: list[State], targets: list[State]) -> None:
    """In one kernel for all tensors of a kind: beside a few large ones there are many small ones."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        given = source.tensors()
        for name, place in target.tensors().items():
            if given[name] is not place:
                places, values = kinds.setdefault(place.dtype, ([], []))
                places.append(place)
                values.append(given[name])
    for places, values in kinds.values():
        compat.copy_all(places, values)


def _contiguous(z: Tensor) -> Tensor:
    return z.clone(memory_format=torch.contiguous_format)


def precision(device: torch.device) -> torch.dtype | None:
    """Autocast's, where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _casting_anew(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast as it is, but weights are cast in the graph: copies that it keeps are gone when its block ends."""
    dtype = precision(device)
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


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
