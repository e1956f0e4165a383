"""Register the memory with a decay per key channel as the torch operator `prism::channel_memory`, and run its kernels in order.

As in `memory.py`, operators take and return flat tensors in one order: `ChannelInputs`, then the state, then `Saved`. `reads`
are the flags BEFORE and UNDECAYED, and `save` says whether a backward will follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels.available import device_guard
from prism.engine.kernels.memory.channel_launch import ChannelInputs, ChannelLaunch, ChannelTables
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
    """Tensors that the forward saves for the backward, empty where not needed (`ChannelTables` describes all but two)."""

    states: Tensor  # before each chunk, [B, H, chunks, V, K]
    fed: Tensor  # Y_0, [B, T, H, V]
    cumulated: Tensor
    asked: Tensor
    lookups: Tensor
    keys: Tensor
    carried: Tensor
    grams: Tensor
    inverse: Tensor


Forward = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None", ChannelTables]


def _forward(run: Any, state: Tensor | None, save: bool, segments: int) -> Forward:
    """The outputs, the final state, and for the backward: the state before each chunk, Y_0 and the chunk tables."""
    o = run.empty(run.B, run.T, run.H, run.V)
    states = run.empty(run.B, run.H, run.chunks, run.V, run.K) if save else None
    fed = torch.empty_like(o) if save and run.u.erases else None
    tables = run.prepare()
    initial, maps = incoming(run, tables, state, segments)
    final = run.forward_scan(tables, initial, segments, o=o, states=states, fed=fed)[-1]
    final = final.detach()  # a view among the results of an autograd function could not be modified in-place
    return o, final, states, fed, tables._replace(maps=maps)


def _backward(
    run: Any,
    tables: Any,
    state: Tensor | None,
    states: Tensor,
    fed: Tensor | None,
    d_o: Tensor,
    d_final: Tensor | None,
    segments: int,
) -> tuple[Tensor | None, ...]:
    """The gradients of `ChannelInputs` without the documents, and of the state."""
    d_states, d_w = torch.empty_like(states), torch.empty_like(run.u.w)
    leaving = outgoing(run, tables, d_o, d_final, segments)
    d_initial = run.backward_scan(tables, d_o, leaving, segments, d_states, d_w)[0]
    d_q, d_x, d_log_decay, d_erase_key, d_strength = run.token_gradients(
        tables, states, fed, d_o, d_states, d_w, state, d_final
    )
    return d_q, d_x, d_w, d_log_decay, d_erase_key, d_strength, d_initial


def _rehearse(
    u: ChannelInputs, state: Tensor | None, reads: int, save: bool, numbers_of_segments: tuple[int, ...]
) -> None:
    """Start every kernel that a call with these arguments may start at any length, on one token of one group of heads.

    For compiling ahead: lengths and heads are not compiled in.
    """
    G = u.q.shape[2]
    one: list[Any] = [
        None if z is None else z.new_empty([1, 1, *[n // G for n in z.shape[2:3]], *z.shape[3:]]) for z in u
    ]
    run = ChannelLaunch(ChannelInputs(*one), reads)
    entering = None if state is None else state[:1, : run.H]
    for segments in numbers_of_segments:
        o, final, states, fed, tables = _forward(run, entering, save, segments)
        if states is not None:
            for d_final in (None, final):
                _backward(run, tables, entering, states, fed, o, d_final, segments)


INPUT_COUNT = len(ChannelInputs._fields)
_INPUT_SCHEMA = f"{schema_of(ChannelInputs)}, Tensor? state"


def _memory(*inputs: Any) -> tuple[Tensor, ...]:
    """`ChannelInputs`, the state, `reads` and `save` → o `[B, T, H, V]`, the final state `[B, H, K, V]`, and `Saved`."""
    return _memory_and_maps(*inputs)[0]


def _memory_and_maps(*inputs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None]]:
    """The outputs of `channel_memory`, and the segments' maps, which the registered operator cannot return (`memory.py`)."""
    *given, state, reads, save = inputs
    u, state = ChannelInputs(*all_contiguous_aligned(*given)), contiguous_aligned(state)
    with device_guard(u.w):
        run: Any = ChannelLaunch(u, reads)
        run.compiled.compile(lambda: _rehearse(u, state, reads, save, segment_counts(run)), save, state is not None)
        o, final, states, fed, tables = _forward(run, state, save, segment_count(run))
    saved = (states, fed, *tables[:-1]) if save else (None,) * len(Saved._fields)
    return (o, final, *all_present(saved, u.w)), (tables.maps,)


def _memory_shapes(*inputs: Any) -> tuple[Tensor, ...]:
    *given, _, _, save = inputs
    u = ChannelInputs(*given)
    (B, T, H, J, V), K, C = u.w.shape, u.q.shape[3], u.configuration.chunk
    N = (T + C - 1) // C
    exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32

    def allocated(needed: bool, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return u.w.new_empty(shape, dtype=dtype) if save and needed else u.w.new_empty(0)

    saved = Saved(
        states=allocated(True, B, H, N, V, K),
        fed=allocated(u.erases, B, T, H, V),
        cumulated=allocated(True, B, H, N * C, K, dtype=exact),
        asked=allocated(True, B, H, N, C, K),
        lookups=allocated(u.erases, B, H, N, C, K),
        keys=allocated(True, B, H, N, J, C, K),
        carried=allocated(True, B, H, N, K, dtype=torch.float32),
        grams=allocated(True, B, H, N, 2 * J if u.erases else J, C, C),
        inverse=allocated(u.erases, B, H, N, C, C),
    )
    return u.w.new_empty(B, T, H, V), u.w.new_empty(B, H, K, V, dtype=torch.float32), *saved


def _memory_backward(d_o: Tensor, d_final: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients of `ChannelInputs` without the documents, and of the state."""
    *tensors, reads = rest
    u = ChannelInputs(*all_contiguous_aligned(*tensors[:INPUT_COUNT]))
    with device_guard(u.w):
        # Saved tensors too: a saved-tensor hook may return them with other strides.
        d_o, d_final, state, *kept, maps = all_contiguous_aligned(d_o, d_final, *tensors[INPUT_COUNT:])
        present: list[Any] = [z if z.numel() else None for z in kept]
        states, fed, *tables = present
        run: Any = ChannelLaunch(u, reads)
        grads = _backward(
            run, ChannelTables(*tables)._replace(maps=maps), state, states, fed, d_o, d_final, segment_count(run)
        )
    return all_present(grads, u.w)


def _memory_backward_shapes(d_o: Tensor, d_final: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    u = ChannelInputs(*rest[:INPUT_COUNT])
    B, _, H, _, V = u.w.shape
    d_state = u.w.new_empty(B, H, u.q.shape[3], V, dtype=torch.float32)
    return *(gradient_like(z, u.w) for z in u[:-1]), d_state


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], maps: Tensor | None = None) -> None:
    *given, reads, save = inputs
    ctx.save_for_backward(*given, *output[2:], maps)
    ctx.has_state, ctx.reads, ctx.saved_states = given[-1] is not None, reads, save
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if not ctx.saved_states:
        raise RuntimeError(
            "prism::channel_memory was called with save=False, so nothing was saved for a backward: pass save=True"
        )
    kept = ctx.saved_tensors  # gradient checkpointing allows one read
    if d_o is None:
        if d_final is None:
            return (None,) * (INPUT_COUNT + 3)
        d_o = torch.zeros_like(ChannelInputs(*kept[:INPUT_COUNT]).w[..., 0, :])
    *grads, d_state = channel_memory_backward(d_o, d_final, *kept, ctx.reads)
    return *only_given(kept[: INPUT_COUNT - 1], grads), None, d_state if ctx.has_state else None, None, None


channel_memory_backward = Operator(
    "prism::channel_memory_backward",
    _memory_backward,
    _memory_backward_shapes,
    schema=f"(Tensor d_o, Tensor? d_final, {_INPUT_SCHEMA}, {schema_of(Saved)}, Tensor? maps, int reads) "
    f"-> ({', '.join(['Tensor'] * INPUT_COUNT)})",
)
channel_memory = Operator(
    "prism::channel_memory",
    _memory,
    _memory_shapes,
    _setup_context,
    _differentiate,
    run_for_gradient=_memory_and_maps,
    schema=f"({_INPUT_SCHEMA}, int reads, bool save) -> (Tensor, Tensor, {', '.join(['Tensor'] * len(Saved._fields))})",
)
