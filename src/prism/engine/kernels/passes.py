"""Forward and backward of a memory: which kernels, in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels.launch import Launch
from prism.engine.kernels.segments import incoming, kinds, outgoing, side_by_side
from prism.engine.kernels.told import Columns, Prepared


def forward(
    u: Columns, state: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Prepared]:
    """The outputs, the final state, and for the backward: each chunk's state, Y_0 and what was prepared."""
    run = Launch(u)
    run.compiled.compile(lambda: _rehearse(u, state, save, kinds(run)), save, state is not None)
    return _forward(run, state, save, side_by_side(run))


def _forward(
    run: Launch, state: Tensor | None, save: bool, segments: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Prepared]:
    o = run.empty(run.B, run.T, run.H, run.V)
    states = run.empty(run.B, run.H, run.chunks, run.V, run.K) if save else None
    fed = torch.empty_like(o) if save and run.u.erases else None
    ready = run.prepare()
    initial, maps = incoming(run, ready, state, segments)
    final = run.scan(ready, initial, segments, o=o, states=states, fed=fed)[-1]
    final = final.detach()  # a view among an autograd function's results could never be written to
    return o, final, states, fed, replace(ready, maps=maps)


def backward(
    u: Columns,
    ready: Prepared,
    state: Tensor | None,
    states: Tensor,
    fed: Tensor | None,
    d_o: Tensor,
    d_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """The gradients of q, x, w, log_decay, erase_key, strength and the state."""
    run = Launch(u)
    return _backward(run, ready, state, states, fed, d_o, d_final, side_by_side(run))


def _backward(
    run: Launch,
    ready: Prepared,
    state: Tensor | None,
    states: Tensor,
    fed: Tensor | None,
    d_o: Tensor,
    d_final: Tensor | None,
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    d_states, d_w = torch.empty_like(states), torch.empty_like(run.u.w)
    leaving = outgoing(run, ready, d_o, d_final, segments)
    d_initial = run.reverse(ready, d_o, leaving, segments, d_states, d_w)[0]
    d_q, d_x, d_erase_key, d_strength, d_log_decay = run.tokens(ready, states, fed, d_o, d_states, d_w, state, d_final)
    return d_q, d_x, d_w, d_log_decay, d_erase_key, d_strength, d_initial


def _rehearse(u: Columns, state: Tensor | None, save: bool, numbers_of_segments: tuple[int, ...]) -> None:
    """Start everything that a call with these arguments starts at any length, on one token: lengths and heads are not
    compiled in."""

    def one(z: Tensor | None, *shape: int) -> Any:
        return None if z is None else z.new_empty(1, 1, *shape)

    K, (J, V) = u.q.shape[3], u.w.shape[3:]
    run = Launch(
        Columns(
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
        o, final, states, fed, ready = _forward(run, entering, save, segments)
        if states is not None:
            for d_final in (None, final):
                _backward(run, ready, entering, states, fed, o, d_final, segments)
