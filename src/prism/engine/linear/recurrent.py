"""The definition of a linear memory: one token after the other. Slow, short, and the oracle of every test.

S_t = (I - a_t b_tᵀ) · Diag(exp g_t) · S_{t-1}  +  Σ_l k_{t,l} w_{t,l}ᵀ          o_t = S_tᵀ q_t
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from prism.engine.inputs import repeat_heads
from prism.engine.update import Steps, Update, check_state, steps_of


def recurrent(update: Update, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the outputs `[B, T, H, V]` and the memory after the last token `[B, H, K, V]`."""
    steps = steps_of(update)  # one row per (sub-)step, with all heads; padding becomes the identity
    S = steps.initial(state)
    outputs = []
    for row in _rows(steps):
        o, S = _step(S, steps, *row)
        outputs.append(o)
    return steps.read(torch.stack(outputs, 1)), S


def step(update: Update, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute one token per row (T = 1), for decoding."""
    if update.tokens != 1:
        raise ValueError(f"step takes one token, q has {update.tokens}: shape {list(update.q.shape)}")
    check_state(update, state)
    return one_token(update, state)


def one_token(u: Update, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """`recurrent` for one token per row (T = 1) without padding, in few operations. The state is left as it is."""
    if u.substeps > 1 or u.reset is not None or u.mask is not None:
        return recurrent(u, state)
    B, _, H, _, V = u.w.shape
    K, dtype = u.q.shape[-1], u.state_dtype

    def rows(x: Tensor) -> Tensor:
        """`[B, 1, G, …, K]` → `[B·H, …, K]`: all heads are one batch of matrices."""
        return repeat_heads(x.to(dtype), H).reshape(B * H, -1, K)

    before = u.q.new_zeros(B * H, K, V, dtype=dtype) if state is None else state.to(dtype).reshape(B * H, K, V)
    q, k, w = rows(u.q), rows(u.k), u.w.to(dtype).reshape(B * H, -1, V)
    S = before
    if u.log_decay is not None:
        S = before * u.log_decay.to(dtype).exp().reshape(B * H, -1, 1)
    if u.erase_key is not None:
        b = rows(u.erase_key)
        a = b if u.erase_write is None else rows(u.erase_write)
        if u.erase_strength is not None:
            a = u.erase_strength.to(dtype).reshape(B * H, 1, 1) * a
        seen = torch.bmm(b, S if u.erase_on == "decayed" else before)  # bᵀS
        S = torch.baddbmm(S, a.mT, seen, alpha=-1)
    S = torch.baddbmm(S, k.mT, w)
    o = torch.bmm(q, S if u.read == "after" else before)
    return o.view(B, 1, H, V).to(u.w.dtype), S.view(B, H, K, V)


def _step(
    S: Tensor,
    steps: Steps,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    g: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The output `[B, H, V]` and the new state of one row; letters as in the equation above."""
    if reset is not None:
        S = torch.where(reset[:, None, None, None], 0.0, S)
    if not steps.read_after:
        o = _read(S, q)
    kept = S
    if g is not None:
        kept = S * (g.exp()[..., None] if g.ndim == 3 else g.exp()[..., None, None])
    new = kept
    if a is not None and b is not None:
        seen = _read(kept if steps.erase_decayed else S, b)  # bᵀS, [B, H, V]
        new = kept - a[..., :, None] * seen[..., None, :]
    new = new + k.transpose(-1, -2) @ w  # Σ_l k_l w_lᵀ
    if steps.read_after:
        o = _read(new, q)
    return o, new


def _read(S: Tensor, q: Tensor) -> Tensor:
    """Sᵀq: `[B, H, K, V]`, `[B, H, K]` → `[B, H, V]`."""
    return (q.unsqueeze(-2) @ S).squeeze(-2)


def _rows(steps: Steps) -> Iterable[tuple[Any, ...]]:
    """The tensors row by row. `unbind` has one backward; indexing in the loop would fill a full tensor per row."""
    fields = (steps.q, steps.k, steps.w, steps.log_decay, steps.erase_key, steps.erase_write, steps.reset)
    return zip(*[[None] * steps.rows if x is None else x.unbind(1) for x in fields], strict=True)
