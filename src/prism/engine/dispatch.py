"""`memory`: the one call through which every rule, model and benchmark computes a memory.

An *engine* serves one type of update: it lists its forms and says, per backend, what it cannot serve. The linear memory
(`Update`) and attention (`Attend`) are registered at the bottom, memories of other kinds in kinds.py: every caller of
`memory` then has them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from prism.engine.autocast import without_autocast
from prism.engine.defaults import BACKENDS, FORMS, resolve
from prism.engine.kernels import fla, serve
from prism.engine.linear.block import parallel
from prism.engine.linear.chunkwise import chunkwise
from prism.engine.linear.recurrent import recurrent
from prism.engine.linear.scan import scan
from prism.engine.memories import attention
from prism.engine.update import Update, check_state, wants_gradients

Form = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Path:
    """One way to compute a form. `refuses` says in one clause why it cannot serve an update, or returns None; a path that
    is not `automatic` for an update serves it only by name."""

    run: Form
    refuses: Callable[[Any], str | None] = lambda update: None
    automatic: Callable[[Any], bool] = lambda update: True


@dataclass(frozen=True)
class Engine:
    """What computes one type of update: paths by (form, backend), best backend first."""

    paths: Mapping[tuple[str, str], Path]
    choose: Callable[[Any], str]
    """The form that `"auto"` stands for."""
    check_state: Callable[[Any, Any], None] = lambda update, state: None
    autocast: bool = False
    """Whether `torch.autocast` may choose the precision inside; a memory that adds up over tokens keeps its own."""
    delegate: Callable[[Any, Any, str, str], tuple[Any, Any]] | None = None
    """Set where an update only wraps others: it calls `memory` on them with the form and backend asked for."""

    @property
    def forms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(form for form, _ in self.paths))


_engines: dict[type, Engine] = {}


def register(update_type: type, engine: Engine) -> None:
    _engines[update_type] = engine


def engine_of(update_type: type) -> Engine:
    for kind in update_type.__mro__:
        if kind in _engines:
            return _engines[kind]
    known = ", ".join(kind.__name__ for kind in _engines)
    raise ValueError(f"update must be one of {known}; got {update_type.__name__}")


def memory(update: Any, state: Any = None, form: str = "auto", backend: str = "auto") -> tuple[Any, Any]:
    """Run T tokens through a memory.

    Args:
        update: what is forgotten, erased, written and asked (`prism.Update` for the linear family).
        state: the memory before the first token, `[B, H, K, V]`; None is an empty one.
        form: `"recurrent"`, `"parallel"`, `"chunkwise"`, `"scan"`, or `"auto"`; an engine may have one more of its own
            (`"serial"`: online learning of a network, inner_loop/serial.py).
        backend: `"torch"`, `"triton"`, `"fla"`, or `"auto"`.

    Inside `with prism.engine.using(form=…, backend=…)`, `"auto"` is what that says.

    Returns:
        The outputs `[B, T, H, V]` and the memory after the last token. Passing that memory on with the next tokens gives
        what one call over all tokens would have given.

    >>> import torch
    >>> q, k, w = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 1, 8), torch.randn(1, 5, 2, 1, 4)
    >>> o, state = memory(Update(q, k, w))
    >>> tuple(o.shape), tuple(state.shape)
    ((1, 5, 2, 4), (1, 2, 8, 4))
    """
    engine = engine_of(type(update))
    form, backend = resolve(form, backend)
    known = tuple(dict.fromkeys((*FORMS, *engine.forms)))
    if form != "auto" and form not in known:
        raise ValueError(f"unknown form {form!r}: choose from auto, {', '.join(known)}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: choose from auto, {', '.join(BACKENDS)}")
    engine.check_state(update, state)
    if engine.delegate is not None:
        return engine.delegate(update, state, form, backend)
    run = choose_path(engine, update, form, backend).run
    return run(update, state) if engine.autocast else without_autocast(run, update, state)


def choose_path(engine: Engine, update: Any, form: str = "auto", backend: str = "auto") -> Path:
    return engine.paths[path_taken(engine, update, form, backend)]


def path_taken(engine: Engine, update: Any, form: str = "auto", backend: str = "auto") -> tuple[str, str]:
    """The first (form, backend) that serves; otherwise one sentence that says why none does and what would."""
    wanted = engine.choose(update) if form == "auto" else form
    if wanted not in engine.forms:
        raise ValueError(
            f"form {wanted!r} cannot serve a {type(update).__name__}: it has the forms {', '.join(engine.forms)}"
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


def _choose_linear(update: Update) -> str:
    return "recurrent" if update.tokens * update.substeps == 1 else "chunkwise"


register(
    Update,
    Engine(
        paths={
            ("recurrent", "triton"): Path(serve.run_step, serve.step_refuses, serve.on_gpu),
            ("recurrent", "torch"): Path(recurrent),
            ("parallel", "torch"): Path(parallel),
            ("chunkwise", "triton"): Path(serve.run_chunks, serve.chunks_refuse, serve.on_gpu),
            ("chunkwise", "fla"): Path(fla.run, fla.refuses, serve.on_gpu),
            ("chunkwise", "torch"): Path(chunkwise),
            ("scan", "torch"): Path(scan),
        },
        choose=_choose_linear,
        check_state=check_state,
    ),
)

register(
    attention.Attend,
    Engine(
        paths={
            ("recurrent", "torch"): Path(attention.recurrent),
            ("parallel", "torch"): Path(attention.parallel),
        },
        choose=lambda update: "parallel",
        check_state=attention.check_state,
        autocast=True,
    ),
)


# Decoding into one state: tokens one after the other, each state where the one before it lay.
#
# The decode kernel writes it there; where that does not serve an update (decays per channel, a CPU) it is computed and
# copied.


def memory_(update: Update, state: Tensor, backend: str = "auto") -> Tensor:
    """`memory` in its recurrent form, for decode loops: overwrites `state` and returns the outputs `[B, T, H, V]`.

    Args:
        state: `[B, H, K, V]`, contiguous, float32 (float64 for float64 tokens). Afterwards the memory after the last token.
        backend: `"torch"`, `"triton"` or `"auto"`.

    It has no gradients of either mode: where one could be wanted it refuses, and `memory` has them.

    >>> import torch
    >>> q, k, w = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 1, 8), torch.randn(1, 1, 2, 1, 4)
    >>> state = torch.zeros(1, 2, 8, 4)
    >>> tuple(memory_(Update(q, k, w), state).shape), bool(state.any())
    ((1, 1, 2, 4), True)
    """
    if type(update) is not Update:
        raise ValueError(f"update must be an Update: a {type(update).__name__} has no state of one tensor")
    if not isinstance(state, Tensor):
        raise ValueError(f"state must be a tensor to be overwritten, got {type(state).__name__}")
    check_state(update, state)
    if state.dtype != update.state_dtype or not state.is_contiguous():
        strides = "" if state.is_contiguous() else f" with strides {list(state.stride())}"
        raise ValueError(f"state must be contiguous {update.state_dtype} to be overwritten, got {state.dtype}{strides}")
    if wants_gradients(*update.tensors, state):
        raise ValueError("memory_ has no gradients: call it under torch.no_grad(), or call memory")
    if path_taken(engine_of(Update), update, *resolve("recurrent", backend))[1] == "triton":
        from prism.engine.kernels import decode

        return decode.step_(*update.tensors, update.reset, update.mask, state, update.substeps)
    o, new = without_autocast(recurrent, update, state)
    state.copy_(new)
    return o


def replaces(update: Any, form: str) -> bool:
    """Whether `memory_` computes what `memory` would in this form, to the bit."""
    form, _ = resolve(form)
    return type(update) is Update and (engine_of(Update).choose(update) if form == "auto" else form) == "recurrent"
