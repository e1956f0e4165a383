"""Compute a memory through one call: `memory`, and `memory_` for decoding in place.

An *engine* serves one type of update. It has a *path* for each form and backend, which says what it cannot serve. All engines
are registered in registry.py; a type of update from outside the package is added with `register`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prism.engine.autocast import without_autocast
from prism.engine.context import Context
from prism.engine.defaults import BACKENDS, FORMS, resolve
from prism.engine.linear.recurrent import one_token as recurrent_token
from prism.engine.linear.recurrent import recurrent
from prism.engine.update import Update, check_state, wants_gradients

Form = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Path:
    """One way to compute a form."""

    run: Form
    refuses: Callable[[Any], str | None] = lambda update: None
    """Says in one clause why it cannot serve an update; None if it can."""
    automatic: Callable[[Any], bool] = lambda update: True
    """Whether `backend="auto"` may choose it for an update; otherwise it serves only if named."""


@dataclass(frozen=True)
class Cut:
    """How a memory runs over a sequence that is cut into parts, one per process."""

    run: Callable[[Any, Any, str, str, Context], tuple[Any, Any]]
    """(update, state before the first part, form, backend, processes) → the outputs of this part and the state after it."""
    refuses: Callable[[Any], str | None] = lambda update: None
    """Says in one clause why an update cannot be cut; None if it can."""
    shortest: Callable[[Any], int] = lambda update: 1
    """The fewest tokens that a part must have, given an update."""


@dataclass(frozen=True)
class Engine:
    """Computes one type of update."""

    paths: Mapping[tuple[str, str], Path]
    """By (form, backend), best backend first."""
    choose: Callable[[Any], str]
    """The form that `"auto"` stands for, given an update."""
    check_state: Callable[[Any, Any], None] = lambda update, state: None
    """Raises ValueError if a state does not fit an update."""
    autocast: bool = False
    """Whether `torch.autocast` may choose the precision inside. A memory that sums over tokens sets its precision itself."""
    delegate: Callable[[Any, Any, str, str], tuple[Any, Any]] | None = None
    """For an update that only wraps others: calls `memory` on them with the requested form and backend."""
    cut: Cut | None = None
    """How it runs over a sequence that is cut over processes; None: it cannot be cut."""
    forms: tuple[str, ...] = field(init=False)
    """Those of its paths. Computed once, and not on demand: compiled code cannot enter a cached property's lock."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "forms", tuple(dict.fromkeys(form for form, _ in self.paths)))


_engines: dict[type, Engine] = {}


def register(update_type: type, engine: Engine) -> None:
    """Let `memory` compute updates of this type and its subclasses."""
    _engines[update_type] = engine


def engine_of(update_type: type) -> Engine:
    """The engine registered for a type of update, or for its nearest base class."""
    for kind in update_type.__mro__:
        if kind in _engines:
            return _engines[kind]
    known = ", ".join(kind.__name__ for kind in _engines)
    raise ValueError(f"update must be one of {known}; got {update_type.__name__}")


def memory(
    update: Any, state: Any = None, form: str = "auto", backend: str = "auto", context: Context | None = None
) -> tuple[Any, Any]:
    """Run T tokens through a memory.

    Args:
        update: what each token forgets, erases, writes and reads (`prism.Update` for the linear family).
        state: the memory before the first token, `[B, H, K, V]`; None: an empty one.
        form: `"recurrent"`, `"parallel"`, `"chunkwise"`, `"scan"`, or `"auto"`. Networks also have `"serial"`, online
            learning (networks/serial.py).
        backend: `"torch"`, `"triton"`, `"fla"`, or `"auto"`.
        context: the processes over which a sequence is cut. The tokens are then this process's part of it, `state` the
            memory before the first part, and the result is this part's.

    Inside `with prism.engine.using(form=…, backend=…)`, `"auto"` stands for that choice.

    Returns:
        The outputs `[B, T, H, V]` and the memory after the last token. Passing that memory with the next tokens gives the
        same outputs as one call over all tokens.

    >>> import torch
    >>> q, k, w = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 1, 8), torch.randn(1, 5, 2, 1, 4)
    >>> o, state = memory(Update(q, k, w))
    >>> tuple(o.shape), tuple(state.shape)
    ((1, 5, 2, 4), (1, 2, 8, 4))
    """
    engine = engine_of(type(update))
    form, backend = resolve(form, backend)
    if context is not None:
        return _run_part(engine, update, state, form, backend, context)
    if engine.delegate is not None:  # which calls `memory` on an update that has forms
        engine.check_state(update, state)
        return engine.delegate(update, state, form, backend)
    if form != "auto" and form not in engine.forms and form not in FORMS:
        known = dict.fromkeys((*FORMS, *engine.forms))
        raise ValueError(f"unknown form {form!r}: choose from auto, {', '.join(known)}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: choose from auto, {', '.join(BACKENDS)}")
    engine.check_state(update, state)
    run = choose_path(engine, update, form, backend).run
    return run(update, state) if engine.autocast else without_autocast(run, update, state)


def _run_part(engine: Engine, update: Any, state: Any, form: str, backend: str, context: Context) -> tuple[Any, Any]:
    problem = cut_refuses(update)
    if problem is not None or engine.cut is None:
        raise ValueError(f"{type(update).__name__} {problem}: compute the whole sequence in one process")
    shortest = engine.cut.shortest(update)
    if update.tokens < shortest:
        raise ValueError(
            f"this part has {update.tokens} tokens, but one must have at least {shortest}: use fewer parts"
        )
    engine.check_state(update, state)
    run = engine.cut.run
    if engine.autocast:
        return run(update, state, form, backend, context)
    return without_autocast(run, update, state, form, backend, context)


def cut_refuses(update: Any) -> str | None:
    """Why an update cannot run over a sequence that is cut over processes, in one clause; None if it can."""
    cut = engine_of(type(update)).cut
    return "has no map that carries its state over a part at once" if cut is None else cut.refuses(update)


def choose_path(engine: Engine, update: Any, form: str = "auto", backend: str = "auto") -> Path:
    """The path that `memory` runs; ValueError as in `path_taken`."""
    return engine.paths[path_taken(engine, update, form, backend)]


def path_taken(engine: Engine, update: Any, form: str = "auto", backend: str = "auto") -> tuple[str, str]:
    """The first (form, backend) that serves an update; ValueError says why none does, and which backend would."""
    wanted = engine.choose(update) if form == "auto" else form
    if wanted not in engine.forms:
        raise ValueError(
            f"form {wanted!r} cannot serve {type(update).__name__}, which has the forms {', '.join(engine.forms)}"
        )
    reasons = []
    for (name, kind), path in engine.paths.items():
        if name != wanted or backend not in ("auto", kind):
            continue
        if backend == "auto" and not path.automatic(update):
            continue
        reason = path.refuses(update)
        if reason is None:
            return name, kind
        reasons.append(f"backend {kind!r} {reason}")
    serving = [kind for (name, kind), path in engine.paths.items() if name == wanted and path.refuses(update) is None]
    why = "; ".join(reasons) or f"backend {backend!r} has no form {wanted!r}"
    raise ValueError(f"{why}: form {wanted!r} is served here by backend {' or '.join(map(repr, serving)) or 'none'}")


def memory_(update: Update, state: Tensor, backend: str = "auto") -> Tensor:
    """`memory` in its recurrent form, for decode loops: overwrites `state` and returns the outputs `[B, T, H, V]`.

    The decode kernel writes in place. Where it does not serve (on a CPU), the new state is computed and copied into `state`.

    Args:
        state: `[B, H, K, V]`, contiguous, float32 (float64 for float64 tokens). Holds the memory after the last token on
            return. A bfloat16 state is accepted too: it is computed in float32 and rounded to nearest when it is stored.
        backend: `"torch"`, `"triton"` or `"auto"`.

    It has neither reverse- nor forward-mode gradients, and raises ValueError where one is wanted. `memory` has both
    (forward mode with `backend="torch"`).

    >>> import torch
    >>> q, k, w = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 1, 8), torch.randn(1, 1, 2, 1, 4)
    >>> state = torch.zeros(1, 2, 8, 4)
    >>> tuple(memory_(Update(q, k, w), state).shape), bool(state.any())
    ((1, 1, 2, 4), True)
    """
    if type(update) is not Update:
        raise ValueError(
            f"update must be an Update, whose state is one tensor, got {type(update).__name__}: call memory"
        )
    if not isinstance(state, Tensor):
        raise ValueError(f"state must be a tensor to be overwritten, got {type(state).__name__}")
    check_state(update, state)
    accepted = (torch.float64,) if update.state_dtype == torch.float64 else (torch.float32, torch.bfloat16)
    if state.dtype not in accepted or not state.is_contiguous():
        strides = "" if state.is_contiguous() else f" with strides {list(state.stride())}"
        wanted = " or ".join(map(str, accepted))
        raise ValueError(f"state must be contiguous {wanted} to be overwritten, got {state.dtype}{strides}")
    if wants_gradients(*update.tensors, state):
        raise ValueError("memory_ has no gradients: call it under torch.no_grad(), or call memory")
    if path_taken(engine_of(Update), update, *resolve("recurrent", backend))[1] == "triton":
        from prism.engine.kernels import decode
        from prism.engine.kernels.serve import decode_options

        return decode.step_(*update.tensors, update.reset, update.mask, state, *decode_options(update))
    o, new = without_autocast(recurrent, update, state)
    state.copy_(new)
    return o


def one_token(update: Any, state: Any, overwrite: bool = False) -> tuple[Any, Any]:
    """`memory` for one token per row (T = 1), without checks of form and state.

    Args:
        overwrite: whether the state may be updated in place; it then is the one returned.
    """
    engine = engine_of(type(update))
    form, backend = resolve()
    if engine.delegate is not None:
        return engine.delegate(update, state, form, backend)
    if type(update) is Update and not update.w.is_cuda and backend in ("auto", "torch"):
        o, new = recurrent_token(update, state)
        return (o, state.copy_(new)) if overwrite and state is not None else (o, new)
    if overwrite and state is not None and in_place_equivalent(update, form, state):
        return memory_(update, state, backend), state
    run = choose_path(engine, update, form, backend).run
    return run(update, state) if engine.autocast else without_autocast(run, update, state)


def in_place_equivalent(update: Any, form: str, state: Tensor | None = None) -> bool:
    """Whether `memory_` computes what `memory` does in this form, to the bit, and can overwrite the state."""
    form, _ = resolve(form)
    if type(update) is not Update or (state is not None and state.dtype != update.state_dtype):
        return False
    return (engine_of(Update).choose(update) if form == "auto" else form) == "recurrent"
