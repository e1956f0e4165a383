"""Fast decoding on a CPU: record a step of one token per row, and replay its operations without the Python around them.

A step of a small model is hundreds of operations of a microsecond each, with ten times as much Python between them. With a
memory of fixed size all steps run the same operations, so one tape (engine/tape) serves them all. Models whose steps cannot
be recorded take ordinary steps: attention caches that grow, hooks, rules that look at values.

Design choices
- As with CUDA graphs (replay.py) the cache owns its step, and everything that is not one plain token per row is computed as
  usual, with the same cache.
- Every such token is replayed, from the first one on. So whether a text was interrupted, saved and resumed between two tokens
  does not change a bit of it.
- A tape contains prepared weights, so it is discarded also when a weight changed in place.
- A step reads one set of state buffers and writes another, and they change roles. An interrupted step has changed nothing.
- A new tape is compared with the ordinary step that it was recorded from.
"""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from prism import rules
from prism.engine import using
from prism.engine.tape.program import PreparedWeights, Program
from prism.engine.tape.record import CannotRecordError, record
from prism.engine.tape.rewrite import shortened
from prism.models.cache import CachedModel, PrismCache
from prism.models.replay import (
    FASTEST,
    CapturedStep,
    ReplayedCache,
    can_be_captured,
    choice_of,
    layout,
    precision,
)
from prism.models.rollback import Inputs
from prism.nn.state import State

KEPT = 8
"""Steps that a cache keeps: for 1, 2, 4 … rows, the latest."""
MOST_ROWS = 64
"""Rows up to which a step is replayed: beyond, torch's threads outweigh the overhead."""

_prepared: weakref.WeakKeyDictionary[Any, tuple[list[Any], weakref.ref[PreparedWeights]]] = weakref.WeakKeyDictionary()
"""The prepared weights of a model, as long as a step uses them, and the weights that they were prepared from."""


class LeanStep(CapturedStep):
    """A step of one token per row as a tape, for up to `rows` rows: those that are not used compute on old states."""

    def __init__(self, model: CachedModel, tokens: Tensor, states: list[State], state_dtype: torch.dtype) -> None:
        used = tokens.shape[0]
        self.rows = room(used)
        tokens, states = _padded(tokens, self.rows), [state.map(lambda z: _padded(z, self.rows)) for state in states]
        super().__init__(model, tokens, states, state_dtype)
        weights = _prepared_weights(model, self.weight_addresses)
        first = self.states
        with torch.inference_mode(False), torch.no_grad():
            second = [state.map(torch.empty_like) for state in first]
        tape = shortened(record(lambda: self._outputs(first), [self.tokens, *_tensors(first)]))
        if layout(self.recorded[2]) != layout(first):
            raise CannotRecordError("its states do not keep their shapes")
        with torch.inference_mode():
            answers = [torch.empty_like(x) for x in self.recorded[:2] if x is not None]
        self.sets, self.turn = (first, second), 0
        self.programs = tuple(
            Program(tape, [self.tokens, *_tensors(old)], [*answers, *_tensors(new)], weights)
            for old, new in ((first, second), (second, first))
        )
        self.outputs = answers[0], answers[1] if len(answers) > 1 else None
        self._verify()
        del self.recorded
        self._look_at(used)

    def _outputs(self, states: list[State]) -> list[Tensor]:
        with using(form=self._form()):
            self.recorded = self.compute(states, overwrite=False)
        logits, balance, new = self.recorded
        return [logits, *([] if balance is None else [balance]), *_tensors(new)]

    def _form(self) -> str:
        """For a few tokens the recurrent form has the fewest operations; `auto` if a rule does not have it."""
        forms = [rules.get(layer.rule).forms for layer in self.model.config.layer_plan]
        return "recurrent" if self.choice[0] == "auto" and all("recurrent" in known for known in forms) else "auto"

    def _verify(self) -> None:
        """Raise CannotRecordError unless the program gives what was recorded, up to rounding."""
        self.programs[0]()
        logits, balance, states = self.recorded
        expected = [logits, *([] if balance is None else [balance]), *_tensors(states)]
        found = [self.outputs[0], *([] if balance is None else [self.outputs[1]]), *_tensors(self.sets[1])]
        if not all(_close(x, y) for x, y in zip(found, expected, strict=True)):
            raise CannotRecordError("its tape gives other results")

    def _look_at(self, used: int) -> None:
        """Make `states` the first rows of the buffers."""
        self.used = used
        self.views = tuple([state.map(lambda z: z[:used]) for state in states] for states in self.sets)
        self.states = self.views[self.turn]

    def current_weight_addresses(self) -> list[Any]:
        """Address and version of every parameter and buffer; the version counts changes in place."""
        return [*map(Tensor.data_ptr, self.weights), *map(attrgetter("_version"), self.weights)]

    def can_serve(self, model: CachedModel, tokens: Tensor, states: list[State]) -> bool:
        if model is not self.model or tokens.dtype != self.tokens.dtype or room(len(tokens)) != self.rows:
            return False
        if precision(tokens.device) is not None or choice_of(model) != self.choice:
            return False
        if self.holds(states):
            fits = len(tokens) == self.used
        else:
            fits = _have_rows(states, len(tokens)) and _row_layout(states) == _row_layout(self.states)
        return fits and not self.outdated()

    def __call__(self, tokens: Tensor, states: list[State]) -> tuple[Tensor, Tensor | None]:
        used = tokens.shape[0]
        self.tokens[:used].copy_(tokens)
        if not self.holds(states):
            self._look_at(used)
            for source, target in zip(_tensors(states), _tensors(self.states), strict=True):
                target.copy_(source)
        self.programs[self.turn]()
        self.turn = 1 - self.turn
        self.states = self.views[self.turn]
        logits, balance = self.outputs
        return logits[:used].clone(), None if balance is None else balance.clone()


def room(rows: int) -> int:
    """The power of two that has room for so many rows: rows come and go without a new tape each time."""
    return 1 << (rows - 1).bit_length()


def _padded(x: Tensor, rows: int) -> Tensor:
    """x `[B, …]` with its last row repeated up to `rows`."""
    return x if len(x) == rows else torch.cat([x, x[-1:].expand(rows - len(x), *x.shape[1:])])


def _tensors(states: list[State]) -> list[Tensor]:
    """All tensors of the states, by name: the order of a dict may differ."""
    return [x for state in states for _, x in sorted(state.tensors().items())]


def _row_layout(states: list[State]) -> list[dict[str, Any]]:
    """Shape without the batch, and dtype, of every tensor."""
    return [{name: (z.shape[1:], z.dtype, z.device) for name, z in state.tensors().items()} for state in states]


def _have_rows(states: list[State], rows: int) -> bool:
    """Whether every tensor has so many rows. An ordinary step says what is wrong if not."""
    return all(len(z) == rows for state in states for z in state.tensors().values())


def _close(x: Any, y: Tensor) -> bool:
    if not y.is_floating_point():
        return torch.equal(x, y)
    x, y = x.double(), y.double()
    scale = float(y.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if y.numel() else 0.0
    return torch.allclose(x, y, rtol=0.0, atol=1e-3 * max(scale, 1e-3), equal_nan=True)


def _prepared_weights(model: CachedModel, versions: list[Any]) -> PreparedWeights:
    """The weights that all steps of a model share; new ones if the model has changed."""
    known = _prepared.get(model)
    kept = known[1]() if known is not None and known[0] == versions else None
    if kept is None:
        kept = PreparedWeights()
        _prepared[model] = versions, weakref.ref(kept)
    return kept


class LeanCache(ReplayedCache):
    """A `PrismCache` for a CPU, whose steps of one token per row are replayed from a tape.

    As with a `ReplayedCache`, its states are updated in place: take a `copy`, or its `tensors`, to return to a position later.
    """

    def __init__(self, state_dtype: torch.dtype = torch.float32, *, rollback: int = 0) -> None:
        super().__init__(state_dtype, rollback=rollback)
        self._steps: dict[Any, LeanStep | None] = {}

    def step(self, model: CachedModel, tokens: Tensor) -> tuple[Tensor, Tensor | None] | None:
        step = self._current(model, tokens)
        if step is None:
            return None
        self.keep_states()  # before they are overwritten
        outputs = step(tokens, self.states)
        self._step = step
        if self.rolls_back:
            self.advance(list(step.states), [Inputs(tokens)], 1)
        else:
            self.states = list(step.states)
            self.tokens += 1
        return outputs

    def _current(self, model: CachedModel, tokens: Tensor) -> LeanStep | None:
        """The step that serves these tokens; None if an ordinary one must."""
        if isinstance(self._step, LeanStep) and self._step.can_serve(model, tokens, self.states):
            return self._step
        if tokens.device.type != "cpu" or precision(tokens.device) is not None or len(tokens) > MOST_ROWS:
            return None
        if not _have_rows(self.states, len(tokens)):
            return None
        about = room(len(tokens)), tokens.dtype, self.state_dtype, choice_of(model), _row_layout(self.states)
        kind = repr((id(model), about))
        step = self._steps.get(kind)
        if step is None and kind in self._steps:  # it could not be recorded
            return None
        if step is None or not step.can_serve(model, tokens, self.states):
            self._steps.pop(kind, None)
            step = _recorded(model, tokens, self.states, self.state_dtype)
        self._steps[kind] = step
        while len(self._steps) > KEPT:
            self._steps.pop(next(iter(self._steps)))
        return step

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_steps": {}}


def _recorded(model: CachedModel, tokens: Tensor, states: list[State], state_dtype: torch.dtype) -> LeanStep | None:
    """A new step; None if the model's steps cannot be recorded."""
    if not can_be_captured(model):
        return None
    try:
        return LeanStep(model, tokens, states, state_dtype)
    except CannotRecordError:
        return None


def _serves(model: CachedModel) -> bool:
    """Whether all of a model is ordinary tensors on the CPU, with states of fixed size."""
    weights = [*model.parameters(), *model.buffers()]
    plain = all(type(w.data) is Tensor and w.device.type == "cpu" and not w.is_inference() for w in weights)
    return plain and bool(model.config.constant_state)


def step(model: CachedModel, tokens: Tensor, cache: PrismCache) -> Tensor:
    """Logits `[B, V]` after one more token per row, tokens `[B]`; the cache then holds the states after it.

    With a cache of `cache_for(model)`, which has read a prompt, this is the fastest way to the next token. Rows may come and
    go between two steps, by `cache.batch_select_indices` or with other `cache.states`.
    """
    ids = tokens[:, None]
    with torch.inference_mode():
        answers = None
        if isinstance(cache, ReplayedCache) and cache.states and not cache.unread:
            answers = cache.step(model, ids)
        if answers is None:
            out = model.forward(ids, past_key_values=cache, use_cache=True, return_dict=True)
            answers = out.logits, None
        return answers[0][:, -1]


FASTEST.append((_serves, LeanCache))
