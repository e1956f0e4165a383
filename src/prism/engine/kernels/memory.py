"""The chunk memory: the torch operator `prism::memory`, and which kernels run in which order.

Tensors that an operator does not need are None as inputs and empty as outputs. `save` says whether a backward will follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels.available import device_guard
from prism.engine.kernels.launch import ChunkTables, KernelInputs, Launch
from prism.engine.kernels.runtime import Operator, all_contiguous_aligned, all_present, contiguous_aligned
from prism.engine.kernels.segments import incoming, kinds, outgoing, side_by_side


def forward(
    u: KernelInputs, state: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, ChunkTables]:
    """The outputs, the final state, and for the backward: each chunk's state, Y_0 and what was prepared."""
    run = Launch(u)
    run.compiled.compile(lambda: _rehearse(u, state, save, kinds(run)), save, state is not None)
    return _forward(run, state, save, side_by_side(run))


def _forward(
    run: Launch, state: Tensor | None, save: bool, segments: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, ChunkTables]:
    o = run.empty(run.B, run.T, run.H, run.V)
    states = run.empty(run.B, run.H, run.chunks, run.V, run.K) if save else None
    fed = torch.empty_like(o) if save and run.u.erases else None
    tables = run.prepare()
    initial, maps = incoming(run, tables, state, segments)
    final = run.scan(tables, initial, segments, o=o, states=states, fed=fed)[-1]
    final = final.detach()  # a view among an autograd function's results could never be written to
    return o, final, states, fed, replace(tables, maps=maps)


def backward(
    u: KernelInputs,
    tables: ChunkTables,
    state: Tensor | None,
    states: Tensor,
    fed: Tensor | None,
    d_o: Tensor,
    d_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """The gradients of q, x, w, log_decay, erase_key, strength and the state."""
    run = Launch(u)
    return _backward(run, tables, state, states, fed, d_o, d_final, side_by_side(run))


def _backward(
    run: Launch,
    tables: ChunkTables,
    state: Tensor | None,
    states: Tensor,
    fed: Tensor | None,
    d_o: Tensor,
    d_final: Tensor | None,
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    d_states, d_w = torch.empty_like(states), torch.empty_like(run.u.w)
    leaving = outgoing(run, tables, d_o, d_final, segments)
    d_initial = run.reverse(tables, d_o, leaving, segments, d_states, d_w)[0]
    d_q, d_x, d_erase_key, d_strength, d_log_decay = run.token_gradients(
        tables, states, fed, d_o, d_states, d_w, state, d_final
    )
    return d_q, d_x, d_w, d_log_decay, d_erase_key, d_strength, d_initial


def _rehearse(u: KernelInputs, state: Tensor | None, save: bool, numbers_of_segments: tuple[int, ...]) -> None:
    """Start everything that a call with these arguments starts at any length, on one token: lengths and heads are not
    compiled in."""

    def one(z: Tensor | None, *shape: int) -> Any:
        return None if z is None else z.new_empty(1, 1, *shape)

    K, (J, V) = u.q.shape[3], u.w.shape[3:]
    run = Launch(
        KernelInputs(
            one(u.q, 1, K),
            one(u.x, 1, J, K),
            one(u.w, 1, J, V),
            one(u.log_decay, 1),
            one(u.erase_key, 1, K),
            one(u.strength, 1),
            one(u.documents),
        )
    )
    entering = None if state is None else state[:1, :1]
    for segments in numbers_of_segments:
        o, final, states, fed, tables = _forward(run, entering, save, segments)
        if states is not None:
            for d_final in (None, final):
                _backward(run, tables, entering, states, fed, o, d_final, segments)


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
    """Chunkwise: o `[B, T, H, V]`, the final state `[B, H, K, V]`, and what the backward reads (see `ChunkTables`)."""
    return _memory_and_maps(q, x, w, log_decay, erase_key, strength, documents, state, save)[0]


def _memory_and_maps(*inputs: Any) -> tuple[Any, tuple[Tensor | None]]:
    """`memory`'s outputs, and the segments' maps. An operator cannot return those: their number depends on the device and on
    how much there is to do, which compiled code must not be bound to. Its backward finds them again."""
    *given, state, save = inputs
    u = _inputs(*given)
    with device_guard(u.w):
        o, final, states, fed, tables = forward(u, contiguous_aligned(state), save)
    kept = (states, fed, tables.cumulated, tables.strengths, tables.grams, tables.inverse) if save else (None,) * 6
    return (o, final, *all_present(kept, u.w)), (tables.maps,)


def _memory_shapes(q, x, w, log_decay, erase_key, strength, documents, state, save):
    u = KernelInputs(q, x, w, log_decay, erase_key, strength, documents)
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
    u = _inputs(q, x, w, log_decay, erase_key, strength, documents)
    with device_guard(w):
        # What the forward made is laid too: a hook on saved tensors may bring it back with other strides.
        states, fed, cumulated, strengths, grams, inverse, maps, d_o, d_final, state = all_contiguous_aligned(
            states, fed, cumulated, strengths, grams, inverse, maps, d_o, d_final, state
        )
        tables = ChunkTables(
            None if log_decay is None else cumulated,
            None if strength is None else strengths,
            grams,
            inverse if u.erases else None,
            maps,
        )
        grads = backward(u, tables, state, states, fed if u.erases else None, d_o, d_final)
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


def _inputs(*tensors: Tensor | None) -> KernelInputs:
    return KernelInputs(*all_contiguous_aligned(*tensors))
