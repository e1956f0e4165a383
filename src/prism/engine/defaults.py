"""Choose the form and the backend that `"auto"` stands for: `with using(backend="torch"): …`.

The choice belongs to the thread or async task that made it. Compiled code cannot read such a variable: it follows the
block entered last in the process, and is recompiled when that changes. Enter the block outside compiled code. Another
thread (the backward pass on a GPU) does not see the choice, so a model resolves it once per forward pass and passes it to
its layers: recomputed activations take the same form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

import torch

FORMS = ("recurrent", "parallel", "chunkwise", "scan")
BACKENDS = ("torch", "triton", "fla")
SPECIAL_FORMS = ("serial",)
"""Forms that only one type of memory has: online learning of a network."""

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
