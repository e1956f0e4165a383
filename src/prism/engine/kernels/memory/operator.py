"""Register the chunk memory as the torch operator `prism::memory`, and run its kernels in order.

Operators take and return flat tensors, in one order: `KernelInputs`, then the state, then `Saved`. A tensor that an operator
does not need is None as an input and empty as an output. `save` says whether a backward will follow.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels.available import device_guard
from prism.engine.kernels.memory.launch import ChunkTables, KernelInputs, Launch
from prism.engine.kernels.memory.segments import incoming, outgoing, segment_count, segment_counts
from prism.engine.kernels.runtime import (
    Operator,
    all_contiguous_aligned,
    all_present,
    contiguous_aligned,
    gradient_like,
    only_given,
    schema_of,
)


class Saved(NamedTuple):
    """Tensors that the forward saves for the backward, empty where not needed (`ChunkTables` describes the last four)."""

    states: Tensor  # before each chunk, [B, H, chunks, V, K]
    fed: Tensor  # Y_0, [B, T, H, V]
    cumulated: Tensor
    strengths: Tensor
    first: Tensor
    inverse: Tensor


def forward(
    u: KernelInputs, state: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, ChunkTables]:
    """The outputs, the final state, and for the backward: the state before each chunk, Y_0 and the chunk tables."""
    run = Launch(u)
    run.compiled.compile(lambda: _rehearse(u, state, save, segment_counts(run)), save, state is not None)
    return _forward(run, state, save, segment_count(run))


def _forward(
    run: Launch, state: Tensor | None, save: bool, segments: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, ChunkTables]:
    tables = run.prepare(segments)  # first: the device then works while the host allocates
    o = run.empty(run.B, run.tokens, run.H, run.V)
    states = run.empty(run.B, run.H, run.chunks, run.V, run.K) if save else None
    fed = run.empty(run.B, run.T, run.H, run.V) if save and run.u.erases else None
    initial, maps = incoming(run, tables, state, segments)
    final = run.forward_scan(tables, initial, segments, o=o, states=states, fed=fed)[-1]
    final = final.detach()  # a view among the results of an autograd function could not be modified in-place
    return o, final, states, fed, tables._replace(maps=maps)


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
    return _backward(run, tables, state, states, fed, d_o, d_final, segment_count(run))


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
    d_initial = run.backward_scan(tables, d_o, leaving, segments, d_states, d_w)[0]
    d_q, d_x, d_erase_key, d_strength, d_log_decay = run.token_gradients(
        tables, states, fed, d_o, d_states, d_w, state, d_final
    )
    return d_q, d_x, d_w, d_log_decay, d_erase_key, d_strength, d_initial


def _rehearse(u: KernelInputs, state: Tensor | None, save: bool, numbers_of_segments: tuple[int, ...]) -> None:
    """Start every kernel that a call with these arguments may start at any length, on one token of one group of heads.

    For compiling ahead: lengths and heads are not compiled in.
    """
    T, G = u.q.shape[1:3]

    def first(z: Tensor | None) -> Tensor | None:
        if z is None:
            return None
        return z.new_empty([1, z.shape[1] // T, *(n // G for n in z.shape[2:3]), *z.shape[3:]])

    run = Launch(KernelInputs(*[first(z) for z in u]))  # type: ignore[arg-type]
    entering = None if state is None else state[:1, : u.group]
    for segments in numbers_of_segments:
        o, final, states, fed, tables = _forward(run, entering, save, segments)
        if states is not None:
            without = tables._replace(maps=None, reach=None)  # as in the backward of compiled callers
            for kind, d_final in product([tables] if segments == 1 else [tables, without], (None, final)):
                _backward(run, kind, entering, states, fed, o, d_final, segments)


INPUT_COUNT = len(KernelInputs._fields)
_INPUT_SCHEMA = f"{schema_of(KernelInputs)}, Tensor? state"


def _memory(*inputs: Any) -> tuple[Tensor, ...]:
    """`KernelInputs`, the state and `save` → o `[B, T, H, V]`, the final state `[B, H, K, V]`, and `Saved`."""
    return _memory_and_maps(*inputs)[0]


def _outputs(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The outputs and the final state alone: without a gradient, nothing is saved."""
    *given, state, save = inputs
    u = KernelInputs(*all_contiguous_aligned(*given))
    with device_guard(u.w):
        return forward(u, contiguous_aligned(state), save)[:2]


def _memory_and_maps(*inputs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, Tensor | None]]:
    """The outputs of `memory`, and of segments their maps and the reach of their chunks.

    The registered operator cannot return these: whether there are segments depends on the device and the amount of work, which
    compiled code must not depend on. Its backward computes the maps again, and does without the reach.
    """
    *given, state, save = inputs
    u = KernelInputs(*all_contiguous_aligned(*given))
    with device_guard(u.w):
        o, final, states, fed, tables = forward(u, contiguous_aligned(state), save)
    saved = (states, fed, *tables[:4]) if save else (None,) * len(Saved._fields)
    return (o, final, *all_present(saved, u.w)), (tables.maps, tables.reach)


def _memory_shapes(*inputs: Any) -> tuple[Tensor, ...]:
    *given, _, save = inputs
    u = KernelInputs(*given)
    (B, tokens, _, K), (T, H, _, V) = u.q.shape, u.w.shape[1:]
    step, chunk = u.configuration.step, u.configuration.chunk
    N = (T + chunk - 1) // chunk
    steps = N * (chunk // step)
    exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32

    def allocated(needed: bool, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return u.w.new_empty(shape, dtype=dtype) if save and needed else u.w.new_empty(0)

    saved = Saved(
        states=allocated(True, B, H, N, V, K),
        fed=allocated(u.erases, B, T, H, V),
        cumulated=allocated(u.log_decay is not None, B, H, N * chunk, dtype=exact),
        strengths=allocated(u.strength is not None, B, H, N * chunk, dtype=torch.float32),
        first=allocated(u.erases, B, H, steps, step, step),
        inverse=allocated(u.erases, B, H, steps, step, step),
    )
    return u.w.new_empty(B, tokens, H, V), u.w.new_empty(B, H, K, V, dtype=torch.float32), *saved


def _memory_backward(d_o: Tensor, d_final: Tensor | None, *rest: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients of `KernelInputs` without the documents, and of the state."""
    u = KernelInputs(*all_contiguous_aligned(*rest[:INPUT_COUNT]))
    with device_guard(u.w):
        # Saved tensors too: a saved-tensor hook may return them with other strides.
        d_o, d_final, state, *kept, maps, reach = all_contiguous_aligned(d_o, d_final, *rest[INPUT_COUNT:])
        saved = Saved(*kept)
        tables = ChunkTables(
            None if u.log_decay is None else saved.cumulated,
            None if u.strength is None else saved.strengths,
            saved.first if u.erases else None,
            saved.inverse if u.erases else None,
            maps=maps,
            reach=reach,
        )
        grads = backward(u, tables, state, saved.states, saved.fed if u.erases else None, d_o, d_final)
    return all_present(grads, u.w)


def _memory_backward_shapes(d_o: Tensor, d_final: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    u = KernelInputs(*rest[:INPUT_COUNT])
    d_state = u.w.new_empty(u.q.shape[0], u.w.shape[2], u.q.shape[3], u.w.shape[4], dtype=torch.float32)
    return *(gradient_like(z, u.w) for z in u[:-1]), d_state


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, ...],
    maps: Tensor | None = None,
    reach: Tensor | None = None,
) -> None:
    *given, save = inputs
    ctx.save_for_backward(*given, *output[2:], maps, reach)
    ctx.has_state, ctx.saved_states = given[-1] is not None, save
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if not ctx.saved_states:
        raise RuntimeError(
            "prism::memory was called with save=False, so nothing was saved for a backward: pass save=True"
        )
    kept = ctx.saved_tensors  # gradient checkpointing allows one read
    if d_o is None:
        if d_final is None:
            return (None,) * (INPUT_COUNT + 2)
        q, w = kept[0], kept[2]
        d_o = w.new_zeros(q.shape[0], q.shape[1], w.shape[2], w.shape[4])
    *grads, d_state = memory_backward(d_o, d_final, *kept)
    return *only_given(kept[: INPUT_COUNT - 1], grads), None, d_state if ctx.has_state else None, None


memory_backward = Operator(
    "prism::memory_backward",
    _memory_backward,
    _memory_backward_shapes,
    schema=f"(Tensor d_o, Tensor? d_final, {_INPUT_SCHEMA}, {schema_of(Saved)}, Tensor? maps, Tensor? reach) "
    f"-> ({', '.join(['Tensor'] * INPUT_COUNT)})",
)
memory = Operator(
    "prism::memory",
    _memory,
    _memory_shapes,
    _setup_context,
    _differentiate,
    run_for_gradient=_memory_and_maps,
    run_without_gradient=_outputs,
    schema=f"({_INPUT_SCHEMA}, bool save) -> (Tensor, Tensor, {', '.join(['Tensor'] * len(Saved._fields))})",
)
