"""Compute a memory through one call: `memory`, and `memory_` for decoding in place.

An *engine* serves one type of update. For each form it has *implementations*, which say what they cannot serve. Those of this
package are in implementations.py; a type of update from outside is added with `register`.

`using` sets what `"auto"` stands for. The choice belongs to the thread or async task that made it. Compiled code cannot read
such a variable: it follows the block entered last in the process, and is recompiled when that changes. Enter the block outside
compiled code. Another thread (the backward pass on a GPU) does not see the choice, so a model resolves it once per forward pass
and passes it to its layers: recomputed activations take the same form.

Memories compute in the precision of their inputs, whatever `torch.autocast` says. If `backward()` runs inside an autocast
block, the hand-written backward passes (the chunk form with decay per head, the kernels) still keep their precision. Operations
differentiated by PyTorch are cast there: call `backward()` outside the block, as PyTorch advises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prism.engine.inputs import without_autocast
from prism.engine.linear.recurrent import one_token as recurrent_token
from prism.engine.update import Update, check_state, wants_gradients

if TYPE_CHECKING:
    from prism.engine.sequence_parallel import Context, SequenceParallel

FORMS = ("recurrent", "parallel", "chunkwise", "scan")
BACKENDS = ("torch", "triton", "fla")
SPECIAL_FORMS = ("serial",)
"""Forms that only one type of memory has: online learning of a network."""

Form = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Implementation:
    """One way to compute a form."""

    run: Form
    backend: str = "torch"
    refuses: Callable[[Any], str | None] = lambda update: None
    """Says in one clause why it cannot serve an update; None if it can."""
    automatic: Callable[[Any], bool] = lambda update: True
    """Whether `backend="auto"` may choose it for an update; otherwise it serves only if named."""


@dataclass(frozen=True)
class Engine:
    """Computes one type of update."""

    forms: Mapping[str, Sequence[Implementation]]
    """The implementations of each form, best first."""
    choose: Callable[[Any], str]
    """The form that `"auto"` stands for, given an update."""
    check_state: Callable[[Any, Any], None] = lambda update, state: None
    """Raises ValueError if a state does not fit an update."""
    autocast: bool = False
    """Whether `torch.autocast` may choose the precision inside. A memory that sums over tokens sets its precision itself."""
    delegate: Callable[[Any, Any, str, str], tuple[Any, Any]] | None = None
    """For an update that only wraps others: calls `memory` on them with the requested form and backend."""
    sequence_parallel: SequenceParallel | None = None
    """How it runs over a sequence that processes share; None: it cannot."""


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
        context: the processes that share the sequence. The tokens are then this process's part of it, `state` the
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
    run = chosen(engine, update, form, backend)[1].run
    return run(update, state) if engine.autocast else without_autocast(run, update, state)


def _run_part(engine: Engine, update: Any, state: Any, form: str, backend: str, context: Context) -> tuple[Any, Any]:
    problem = cannot_be_shared(update)
    if problem is not None or engine.sequence_parallel is None:
        raise ValueError(f"{type(update).__name__} {problem}: compute the whole sequence in one process")
    shortest = engine.sequence_parallel.shortest(update)
    if update.tokens < shortest:
        raise ValueError(
            f"this part has {update.tokens} tokens, but one must have at least {shortest}: use fewer parts"
        )
    engine.check_state(update, state)
    run = engine.sequence_parallel.run
    if engine.autocast:
        return run(update, state, form, backend, context)
    return without_autocast(run, update, state, form, backend, context)


def cannot_be_shared(update: Any) -> str | None:
    """Why processes cannot share an update's sequence, in one clause; None if it can."""
    shared = engine_of(type(update)).sequence_parallel
    return "has no map that carries its state over a part at once" if shared is None else shared.refuses(update)


def chosen(engine: Engine, update: Any, form: str = "auto", backend: str = "auto") -> tuple[str, Implementation]:
    """The form, and its first implementation that serves an update; ValueError says why none does, and which would."""
    wanted = engine.choose(update) if form == "auto" else form
    if wanted not in engine.forms:
        raise ValueError(
            f"form {wanted!r} cannot serve {type(update).__name__}, which has the forms {', '.join(engine.forms)}"
        )
    reasons = []
    for one in engine.forms[wanted]:
        if backend not in ("auto", one.backend) or (backend == "auto" and not one.automatic(update)):
            continue
        reason = one.refuses(update)
        if reason is None:
            return wanted, one
        reasons.append(f"backend {one.backend!r} {reason}")
    serving = [one.backend for one in engine.forms[wanted] if one.refuses(update) is None]
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
    _, one = chosen(engine_of(Update), update, *resolve("recurrent", backend))
    if one.backend == "triton":
        from prism.engine.kernels import decode
        from prism.engine.kernels.serve import decode_options

        return decode.step_(*update.tensors, update.reset, update.mask, state, *decode_options(update))
    o, new = without_autocast(one.run, update, state)
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
    run = chosen(engine, update, form, backend)[1].run
    return run(update, state) if engine.autocast else without_autocast(run, update, state)


def in_place_equivalent(update: Any, form: str, state: Tensor | None = None) -> bool:
    """Whether `memory_` computes what `memory` does in this form, to the bit, and can overwrite the state."""
    form, _ = resolve(form)
    if type(update) is not Update or (state is not None and state.dtype != update.state_dtype):
        return False
    return (engine_of(Update).choose(update) if form == "auto" else form) == "recurrent"


Choice = tuple[str, str]
"""Form and backend; each may be `"auto"`."""

AUTO: Choice = ("auto", "auto")
_choice: ContextVar[Choice] = ContextVar("prism_form_and_backend", default=AUTO)
_entered: list[Choice] = []
_latest: Choice = AUTO
_lock = Lock()


@contextmanager
def using(form: str = "auto", backend: str = "auto") -> Iterator[None]:
    """Set the form and the backend that `"auto"` stands for inside the block.

    Args:
        form: one of `FORMS`; `"auto"` keeps the choice of an outer block.
        backend: one of `BACKENDS`; `"auto"` keeps the choice of an outer block. `"torch"` also turns off the kernels around
            the memory (short convolutions, PRISM's solver).

    A memory that lacks the form or the backend raises ValueError, as if the call had named it. An argument of the call, or
    of a model's configuration, takes precedence over the block.

    >>> import prism, torch
    >>> mixer, x = prism.Mixer("gla", 16, 2), torch.randn(1, 6, 16)
    >>> with prism.engine.using(form="recurrent", backend="torch"):
    ...     y, state = mixer(x)
    """
    check_choice(form, backend)
    chosen = resolve(form, backend)
    token = _choice.set(chosen)
    _update_latest(entered=chosen)
    try:
        yield
    finally:
        _choice.reset(token)
        _update_latest(left=chosen)


def resolve(form: str = "auto", backend: str = "auto") -> Choice:
    """This form and backend, with `"auto"` replaced by the choice of the surrounding block."""
    if form != "auto" and backend != "auto":
        return form, backend
    outer = _latest if torch.compiler.is_compiling() else _choice.get()
    return outer[0] if form == "auto" else form, outer[1] if backend == "auto" else backend


def check_choice(form: str, backend: str) -> None:
    """Raise ValueError for a form or a backend that no memory has."""
    if form not in ("auto", *FORMS, *SPECIAL_FORMS):
        raise ValueError(f"unknown form {form!r}: choose from auto, {', '.join((*FORMS, *SPECIAL_FORMS))}")
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"unknown backend {backend!r}: choose from auto, {', '.join(BACKENDS)}")


def _update_latest(entered: Choice | None = None, left: Choice | None = None) -> None:
    """Keep `_latest`, which compiled code reads, up to date. Blocks of several threads may end in any order."""
    global _latest
    with _lock:
        if entered is not None:
            _entered.append(entered)
        if left is not None:
            del _entered[len(_entered) - 1 - _entered[::-1].index(left)]
        _latest = _entered[-1] if _entered else AUTO
