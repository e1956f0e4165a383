"""Fast decoding on a GPU: capture a step of one token as a CUDA graph, and replay it.

A step of a small model is hundreds of short kernels, and launching them from Python takes ten times as long as running them.
With a memory of fixed size all steps have the same shapes, so one CUDA graph serves them all.

Design choices
- A cache owns its graph: `model(...)` and `generate` look at the type of the cache and need no other switch. Everything that
  is not one plain token per row (prompts, padding, the start of a document) is computed as usual, with the same cache.
- The graph is captured from the model's own forward pass, so replayed and ordinary steps are the same kernels on the same
  numbers.
- A capture costs a few steps, so the first steps are ordinary ones: a short generation never pays for a graph.
- A graph repeats kernels on fixed memory; it does not read the model again. So a captured step remembers what it was
  captured from, and is discarded when that changes: a parameter, buffer or module replaced or moved, a hook that would have
  to run, another precision.

In this file: `CapturedStep`, the capture, and `ReplayedCache`, the cache that uses both.
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
from prism.engine.memory import Choice, resolve
from prism.models.cache import CachedModel, PrismCache
from prism.models.rollback import Inputs
from prism.nn.state import State

PATIENCE = 3
"""Number of ordinary steps with the same shapes before one is captured."""

_capture_lock = threading.Lock()
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs of failed captures, kept alive (see `_capture_graph`)."""


class CapturedStep:
    """A step of one token per row for a fixed batch size, with fixed buffers for the tokens and the states.

    `states` belong to the step, which writes them in place.
    """

    def __init__(self, model: CachedModel, tokens: Tensor, states: list[State], state_dtype: torch.dtype) -> None:
        self.model, self.state_dtype = model, state_dtype
        self.modules = modules = list(model.modules())
        self.registries = compat.registries(modules) or []  # `can_be_captured` has checked that they can be read
        entries = [(registry, name, value) for registry in self.registries for name, value in registry.items()]
        self.holders, self.names, self.contents = zip(*entries, strict=True)
        self.hooks = compat.forward_hooks(modules) or []
        self.attributes = [m.__dict__ for m in modules]
        self.module_states = self.current_module_states()
        self.weights = [*model.parameters(), *model.buffers()]
        self.weight_addresses = self.current_weight_addresses()
        self.precision = precision(tokens.device)
        self.choice = choice_of(model)
        with torch.inference_mode(False), torch.no_grad():  # later steps may write to them in any mode
            self.tokens = tokens.clone()
            self.states = [state.map(_contiguous) for state in states]
        self.outputs: tuple[Tensor, Tensor | None] = tokens, None
        self.replay: Callable[[], None] | None = None

    def run(self) -> None:
        """The step for capture. A graph is never interrupted: most memories are updated in place, the rest is copied."""
        self._run(overwrite=True)

    def run_without_graph(self) -> None:
        """The step without a graph. It may be interrupted, so nothing is written before all is computed."""
        self._run(overwrite=False)

    def _run(self, overwrite: bool) -> None:
        logits, balance, new = self.compute(self.states, overwrite)
        self.outputs = logits, balance
        _copy(new, self.states)

    def compute(self, states: list[State], overwrite: bool) -> tuple[Tensor, Tensor | None, list[State]]:
        """Logits, balance loss and new states, by the model's forward pass."""
        cache = PrismCache(self.state_dtype)
        cache.update([replace(state, overwrite=overwrite) for state in states], 0)
        out: Any = self.model.forward(self.tokens, past_key_values=cache, use_cache=True, return_dict=True)
        return out.logits, out.balance_loss, cache.states

    def has_fixed_layout(self) -> bool:
        """Whether a step returns states of the same shapes and dtypes. Also triggers everything compiled on first use.

        It may overwrite `states`: the first call copies the cache's into them.
        """
        return layout(self.compute(self.states, overwrite=True)[-1]) == layout(self.states)

    def can_serve(self, model: CachedModel, tokens: Tensor, states: list[State]) -> bool:
        """Whether replaying gives what `model` would compute now for these tokens and states."""
        same_tokens = (tokens.shape, tokens.dtype, tokens.device) == (
            self.tokens.shape,
            self.tokens.dtype,
            self.tokens.device,
        )
        if model is not self.model or not same_tokens or precision(tokens.device) != self.precision:
            return False
        if choice_of(model) != self.choice:
            return False
        return (self.holds(states) or layout(states) == layout(self.states)) and not self.outdated()

    def holds(self, states: list[State]) -> bool:
        """Whether these are the step's own states, as the last step left them."""
        return len(states) == len(self.states) and all(map(is_, states, self.states))

    def outdated(self) -> bool:
        """Whether the model has changed since the capture. Weights may have changed in place."""
        same = all(map(is_, map(dict.get, self.holders, self.names), self.contents)) and not any(self.hooks)
        if not same or self.current_module_states() != self.module_states:
            return True
        return self.current_weight_addresses() != self.weight_addresses

    # The next two are called before every step, so they avoid loops in Python.
    def current_module_states(self) -> list[Any]:
        """Of every module: training mode, an overridden `forward` (by accelerate), class, number of entries."""
        modes = map(dict.get, self.attributes, repeat("training"))
        forwards = map(dict.get, self.attributes, repeat("forward"))
        return [*modes, *forwards, *map(type, self.modules), *map(len, self.registries)]

    def current_weight_addresses(self) -> list[Any]:
        """Address, dtype and shape of every parameter and buffer."""
        return [*map(Tensor.data_ptr, self.weights), *map(attrgetter("dtype", "shape"), self.weights)]

    def __call__(self, tokens: Tensor, states: list[State]) -> tuple[Tensor, Tensor | None]:
        """Run the step: logits `[B, 1, vocabulary]` and the balance loss. The new states are in `self.states`."""
        self.tokens.copy_(tokens)
        if not self.holds(states):  # since then there was an ordinary step, or beams were reordered
            _copy(states, self.states)
        (self.replay or self.run_without_graph)()
        logits, balance = self.outputs
        return logits.clone(), None if balance is None else balance.clone()


def can_be_captured(model: CachedModel) -> bool:
    """Whether all steps of the model run the same kernels, as far as can be known without running one.

    That is: no growing states, no hooks, and no adapters of peft, which are switched by flags that a graph does not see.
    """
    if not model.config.constant_state:
        return False
    if os.environ.get("PRISM_CHECK") == "1":  # checks read values, which synchronises
        return False
    modules = list(model.modules())
    hooks = compat.forward_hooks(modules)
    if hooks is None or any(hooks) or compat.registries(modules) is None:  # changes could not be detected
        return False
    return not any(hasattr(m, "_disable_adapters") for m in modules)


def capture(
    model: CachedModel, tokens: Tensor, states: list[State], state_dtype: torch.dtype = torch.float32
) -> CapturedStep | None:
    """Capture a step. None if the states change their layout, and, with a warning, if a CUDA graph cannot contain the step."""
    try:
        step = CapturedStep(model, tokens, states, state_dtype)
        with _autocast_without_cache(tokens.device):
            return step if record(step) else None
    except RuntimeError as error:  # a failed capture raises two errors, of which the first is the cause
        why = error.__context__ or error
        warnings.warn(f"a step of this model cannot be replayed, and will be slower: {why}", stacklevel=2)
        return None


def record(step: CapturedStep) -> bool:
    """Capture the step's graph on a GPU; on other devices the step runs without one. False if its layout is not fixed."""
    device = step.tokens.device
    if device.type != "cuda":
        return step.has_fixed_layout()
    graph = torch.cuda.CUDAGraph()
    with _capture_lock, torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):  # restores the stream also when a capture fails
                if not step.has_fixed_layout():
                    return False
                _capture_graph(graph, stream, step.run)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
    step.replay = graph.replay
    return True


def _capture_graph(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, run: Callable[[], None]) -> None:
    """Capture `run` into the graph, and clean up after a failed capture."""
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    except BaseException:
        # Torch does not clean up after a failed capture. The allocator may still use the graph, so it is kept alive. Random
        # number generators remain in capture mode until another capture ends, so an empty one follows.
        _failed.append(graph)
        again = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
        with suppress(RuntimeError), torch.cuda.stream(stream), again:
            torch.zeros(1, device=stream.device)
        raise


def choice_of(model: CachedModel) -> Choice:
    """The form and backend that a forward pass of the model would use now."""
    return resolve(model.config.form, model.config.backend)


def layout(states: list[State]) -> list[dict[str, Any]]:
    """Shape, dtype and device of every tensor."""
    return [{name: (z.shape, z.dtype, z.device) for name, z in state.tensors().items()} for state in states]


def _copy(sources: list[State], targets: list[State]) -> None:
    """Copy states in place, with one kernel for all tensors of a dtype: a few are large, many are small."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        given = source.tensors()
        for name, buffer in target.tensors().items():
            if given[name] is not buffer:
                buffers, values = by_dtype.setdefault(buffer.dtype, ([], []))
                buffers.append(buffer)
                values.append(given[name])
    for buffers, values in by_dtype.values():
        compat.copy_all(buffers, values)


def _contiguous(z: Tensor) -> Tensor:
    return z.clone(memory_format=torch.contiguous_format)


def precision(device: torch.device) -> torch.dtype | None:
    """Autocast's dtype; None if autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _autocast_without_cache(device: torch.device) -> AbstractContextManager[Any]:
    """The current autocast with weights cast inside the graph: cached casts are freed when the autocast block ends."""
    dtype = precision(device)
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


class ReplayedCache(PrismCache):
    """A `PrismCache` whose steps of one token per row are replayed.

    Unlike a `PrismCache`'s, its states are updated in place: take a `copy`, or its `tensors`, to return to a position later.
    It holds a reference to the model. Models with hooks or switchable adapters take ordinary steps.
    """

    def __init__(self, state_dtype: torch.dtype = torch.float32, *, rollback: int = 0) -> None:
        super().__init__(state_dtype, rollback=rollback)
        self._step: CapturedStep | None = None
        self._kind: Any = None
        self._waited, self._patience = 0, PATIENCE

    def step(self, model: CachedModel, tokens: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Logits `[B, 1, vocabulary]` and balance loss after one more token per row, `[B, 1]`; None if an ordinary step is
        needed."""
        if tokens.is_cuda and torch.cuda.is_current_stream_capturing():  # the caller captures its own graph
            return None
        if self._step is not None and not self._step.can_serve(model, tokens, self.states):
            self._step, self._kind = None, None  # also frees its memory
            self._patience *= 2  # if this happens repeatedly, captures become rare
        if self._step is None:
            self._step = self._capture_after_patience(model, tokens)
        if self._step is None:
            return None
        self.keep_states()  # before they are overwritten
        outputs = self._step(tokens, self.states)
        self.advance(list(self._step.states), [Inputs(tokens)], 1)
        return outputs

    def _capture_after_patience(self, model: CachedModel, tokens: Tensor) -> CapturedStep | None:
        """A captured step after `_patience` ordinary steps of the same kind; None before. One attempt per kind."""
        if not can_be_captured(model):
            self._kind = None
            return None
        about = tokens.shape, tokens.dtype, tokens.device, precision(tokens.device)
        kind = id(model), *about, choice_of(model), layout(self.states)
        self._waited = self._waited + 1 if kind == self._kind else 0
        self._kind = kind
        if self._waited != self._patience:
            return None
        try:
            return capture(model, tokens, self.states, self.state_dtype)
        except BaseException:  # an interrupt: the next steps may try again
            self._kind = None
            raise

    def kept_states(self) -> list[State]:
        kept = [state.map(torch.empty_like) for state in self.states]
        _copy(self.states, kept)
        return kept

    def tensors(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in super().tensors().items()}

    def copy(self) -> PrismCache:
        """An independent `PrismCache` with copies of the states."""
        return self._twin([state.map(torch.clone) for state in self.states])

    def __copy__(self) -> PrismCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrismCache:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_step": None, "_kind": None}


FASTEST: list[tuple[Callable[[CachedModel], bool], type[PrismCache]]] = []
"""Caches for models that are not on a GPU, each with the condition under which it serves (lean.py adds its own)."""


def cache_for(model: CachedModel, state_dtype: torch.dtype = torch.float32) -> PrismCache:
    """The fastest cache for this model: a `ReplayedCache` if all of it is on one GPU and its states have a fixed size, a
    `LeanCache` if it is on the CPU."""
    kinds, devices = {type(p.data) for p in model.parameters()}, {p.device for p in model.parameters()}
    on_one_gpu = kinds == {Tensor} and len(devices) == 1 and next(iter(devices)).type == "cuda"
    if on_one_gpu:
        return (ReplayedCache if model.config.constant_state else PrismCache)(state_dtype)
    return next((kind for serves, kind in FASTEST if serves(model)), PrismCache)(state_dtype)
