"""The only door to the kernels: operators that torch knows (fake tensors, autograd, compile), and nothing else.

Tensors that an operator does not need are None going in and empty coming out; `save` says whether a backward will follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels import launch, passes
from prism.engine.kernels.operator import Operator
from prism.engine.kernels.paths import home
from prism.engine.kernels.told import Columns, Prepared


def _memory(
    q: Tensor,
    x: Tensor,
    w: Tensor,
    log_decay: Tensor | None,
    erase_key: Tensor | None,
    strength: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chunkwise: o `[B, T, H, V]`, the final state `[B, H, K, V]`, and what the backward reads (see `told.Prepared`)."""
    return _memory_and_maps(q, x, w, log_decay, erase_key, strength, documents, state, save)[0]


def _memory_and_maps(*inputs: Any) -> tuple[Any, tuple[Tensor | None]]:
    """`memory`'s outputs, and the segments' maps. An operator cannot return those: their number depends on the device and on
    how much there is to do, which compiled code must not be bound to. Its backward finds them again."""
    *told, state, save = inputs
    u = _columns(*told)
    with home(u.w):
        o, final, states, fed, ready = passes.forward(u, laid(state), save)
    kept = (states, fed, ready.cumulated, ready.strengths, ready.grams, ready.inverse) if save else (None,) * 6
    return (o, final, *all_present(kept, u.w)), (ready.maps,)


def _memory_shapes(q, x, w, log_decay, erase_key, strength, documents, state, save):
    u = Columns(q, x, w, log_decay, erase_key, strength, documents)
    B, T, H, K = q.shape
    J, V = w.shape[3:]
    step, chunk = u.configuration.step, u.configuration.chunk
    N = (T + chunk - 1) // chunk
    steps = N * (chunk // step)
    exact = torch.float64 if w.dtype == torch.float32 else torch.float32

    def made(needed: bool, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return w.new_empty(shape, dtype=dtype) if save and needed else w.new_empty(0)

    return (
        w.new_empty(B, T, H, V),
        w.new_empty(B, H, K, V, dtype=torch.float32),
        made(True, B, H, N, V, K),
        made(u.erases, B, T, H, V),
        made(log_decay is not None, B, H, N * chunk, dtype=exact),
        made(strength is not None, B, H, N * chunk, dtype=torch.float32),
        made(True, B, H, steps, 2 * J if u.erases else J, step, step),
        made(u.erases, B, H, steps, step, step),
    )


def _memory_backward(
    d_o: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    x: Tensor,
    w: Tensor,
    log_decay: Tensor | None,
    erase_key: Tensor | None,
    strength: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    states: Tensor,
    fed: Tensor,
    cumulated: Tensor,
    strengths: Tensor,
    grams: Tensor,
    inverse: Tensor,
    maps: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    u = _columns(q, x, w, log_decay, erase_key, strength, documents)
    with home(w):
        # What the forward made is laid too: a hook on saved tensors may bring it back with other strides.
        states, fed, cumulated, strengths, grams, inverse, maps, d_o, d_final, state = all_laid(
            states, fed, cumulated, strengths, grams, inverse, maps, d_o, d_final, state
        )
        ready = Prepared(
            None if log_decay is None else cumulated,
            None if strength is None else strengths,
            grams,
            inverse if u.erases else None,
            maps,
        )
        grads = passes.backward(u, ready, state, states, fed if u.erases else None, d_o, d_final)
    return all_present(grads, w)


def _memory_backward_shapes(d_o, d_final, q, x, w, log_decay, erase_key, strength, *rest):
    def like(z: Tensor | None) -> Tensor:
        return w.new_empty(0) if z is None else z.new_empty(z.shape)

    B, _, H, K = q.shape
    d_state = w.new_empty(B, H, K, w.shape[4], dtype=torch.float32)
    return like(q), like(x), like(w), like(log_decay), like(erase_key), like(strength), d_state


memory_backward = Operator("prism::memory_backward", _memory_backward, _memory_backward_shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], maps: Tensor | None = None) -> None:
    *given, save = inputs
    ctx.save_for_backward(*given, *output[2:], maps)
    ctx.has_state, ctx.saved_states = given[-1] is not None, save
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if not ctx.saved_states:
        raise RuntimeError("prism::memory was called with save=False: nothing was kept for a backward")
    q, x, w, log_decay, erase_key, strength, *rest = ctx.saved_tensors
    if d_o is None:
        if d_final is None:
            return (None,) * 9
        d_o = torch.zeros_like(w[..., 0, :])
    grads = memory_backward(d_o, d_final, q, x, w, log_decay, erase_key, strength, *rest)
    d_q, d_x, d_w, d_log_decay, d_erase_key, d_strength, d_state = grads
    return (
        d_q,
        d_x,
        d_w,
        None if log_decay is None else d_log_decay,
        None if erase_key is None else d_erase_key,
        None if strength is None else d_strength,
        None,
        d_state if ctx.has_state else None,
        None,
    )


memory = Operator("prism::memory", _memory, _memory_shapes, _keep, _differentiate, run_for_gradient=_memory_and_maps)


def _step(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_decay: Tensor | None,
    erase_key: Tensor | None,
    erase_strength: Tensor | None,
    erase_write: Tensor | None,
    reset: Tensor | None,
    mask: Tensor | None,
    state: Tensor | None,
    substeps: int,
) -> tuple[Tensor, Tensor]:
    """Tokens one after the other, as `Update` gives them: the outputs and a new state. Has no backward."""
    new = w.new_empty(w.shape[0], w.shape[2], q.shape[3], w.shape[4], dtype=torch.float32)
    with home(w):
        given = _laid_for_step(q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state)
        return launch.step(given, new, substeps), new


def _step_shapes(q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state, substeps):
    B, T, _, K = q.shape
    H, V = w.shape[2], w.shape[4]
    return w.new_empty(B, T, H, V), w.new_empty(B, H, K, V, dtype=torch.float32)


step = Operator("prism::step", _step, _step_shapes)


@torch.library.custom_op("prism::step_", mutates_args=("state",))
def step_(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_decay: Tensor | None,
    erase_key: Tensor | None,
    erase_strength: Tensor | None,
    erase_write: Tensor | None,
    reset: Tensor | None,
    mask: Tensor | None,
    state: Tensor,
    substeps: int,
) -> Tensor:
    """`step` that updates the state in place. `engine.memory_` checks what it is given, and is the way here."""
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"state must be contiguous float32, got {state.dtype} with strides {list(state.stride())}")
    with home(w):
        given = _laid_for_step(q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state)
        return launch.step(given, state, substeps)


@step_.register_fake
def _(q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state, substeps):
    return w.new_empty(q.shape[0], q.shape[1], w.shape[2], w.shape[4])


def _columns(*tensors: Tensor | None) -> Columns:
    return Columns(*all_laid(*tensors))


def all_laid(*tensors: Tensor | None) -> list[Any]:
    return [laid(z) for z in tensors]


def laid(z: Tensor | None) -> Tensor | None:
    """Contiguous, and aligned as the kernels were compiled for (a view may begin anywhere)."""
    if z is None or (z.is_contiguous() and z.data_ptr() % 16 == 0):
        return z
    return z.clone(memory_format=torch.contiguous_format)


def _laid_for_step(*given: Tensor | None) -> list[Any]:
    """As `laid`, but the erase's keys may also lie evenly apart, as the first of k's do: decoding copies nothing."""
    b = given[4]
    if b is not None and b.data_ptr() % 16 == 0:
        apart, (_, T, G, _) = b.stride(2), b.shape
        if b.stride() == (T * G * apart, G * apart, apart, 1):
            return [*all_laid(*given[:4]), b, *all_laid(*given[5:])]
    return all_laid(*given)


def present(z: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if z is None else z


def all_present(tensors: Iterable[Tensor | None], like: Tensor) -> Any:
    """A tuple as long as the operator's type says."""
    return tuple(present(z, like) for z in tensors)
