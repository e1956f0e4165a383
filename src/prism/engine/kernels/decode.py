"""Decoding: tokens one after the other, a state read once and written once, gates and all in one kernel.

One program holds BV value columns of one head's state in registers. The arithmetic is that of `engine/recurrent.py`, in
float32; q, k and the erase may have fewer heads than w (head h reads group h // (H // G)).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, padded
from prism.engine.kernels.runtime import Operator, all_contiguous_aligned


@triton.jit
def load_row(tensor, row, h, H, groups, apart, ks, K: tl.constexpr):
    """A vector of `[rows, groups, K]`, whose vectors begin `apart` numbers after one another, as float32 `[K, 1]`."""
    group = h // (H // groups)
    return tl.load(tensor + (row * groups + group) * apart + ks, mask=ks < K, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["T", "H", "q_groups", "k_groups", "b_groups", "a_groups"])
def step_kernel(
    q,
    k,
    w,
    log_decay,
    erase_key,
    erase_strength,
    erase_write,
    reset,
    mask,
    state,
    new_state,
    o,
    T,
    H,
    q_groups,
    k_groups,
    b_groups,
    a_groups,
    b_apart,
    SUBSTEPS: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """`state` and `new_state` `[B, H, K, V]` may be the same memory. Tensors that are None are left out of the code. The
    erase's vectors begin `b_apart` numbers after one another: it may be the first of k's, as it lies there."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    bh = pid // BLOCKS
    b, h = (bh // H).to(tl.int64), bh % H
    ks = tl.arange(0, BK)
    vs = pid % BLOCKS * BV + tl.arange(0, BV)
    place = bh.to(tl.int64) * (K * V) + ks[:, None] * V + vs[None, :]
    inside = (ks < K)[:, None] & (vs < V)[None, :]
    S = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        S = tl.load(state + place, mask=inside, other=0.0)

    for i in range(T):
        token = b * T + i
        live = True
        if mask is not None:
            live = tl.load(mask + token) != 0
        before = S
        if reset is not None:
            S = tl.where(tl.load(reset + token) != 0, 0.0, S)
        if log_decay is not None:
            S = S * tl.exp(tl.load(log_decay + token * H + h).to(tl.float32))
        for s in tl.static_range(SUBSTEPS):
            row = token * SUBSTEPS + s
            if erase_key is not None:
                lookup = load_row(erase_key, row, h, H, b_groups, b_apart, ks, K)
                seen = tl.sum(S * lookup, 0)
                if erase_strength is not None:
                    seen *= tl.load(erase_strength + row * H + h).to(tl.float32)
                    S = S - lookup * seen[None, :]
                else:
                    S = S - load_row(erase_write, row, h, H, a_groups, K, ks, K) * seen[None, :]
            for l in tl.static_range(L):
                key = load_row(k + l * K, row, h, H, k_groups, L * K, ks, K)
                value = tl.load(w + ((row * H + h) * L + l) * V + vs, mask=vs < V, other=0.0).to(tl.float32)
                S = S + key * value[None, :]
        out = tl.sum(S * load_row(q, token, h, H, q_groups, K, ks, K), 0)
        if mask is not None:
            out = tl.where(live, out, 0.0)
            S = tl.where(live, S, before)
        tl.store(o + (token * H + h) * V + vs, out.to(o.dtype.element_ty), mask=vs < V)

    tl.store(new_state + place, S, mask=inside)


def _launch(given: list[Tensor | None], new_state: Tensor, substeps: int) -> Tensor:
    """The decode kernel on an `Update`'s tensors and a state; fills `new_state`, which may be that state."""
    q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state = given
    assert q is not None and k is not None and w is not None
    (B, T, _, K), (H, L, V) = q.shape, w.shape[2:]
    groups = {
        name: 1 if z is None else z.shape[2] for name, z in {"q": q, "k": k, "b": erase_key, "a": erase_write}.items()
    }
    # (A contiguous tensor may have any stride where its size is 1.)
    apart = K if erase_key is None or erase_key.is_contiguous() else erase_key.stride(2)
    o = w.new_empty(B, T, H, V)
    block = min(padded(V), 32)
    step_kernel[(-(-V // block) * B * H,)](
        q, k, w, log_decay, erase_key, erase_strength, erase_write, _bytes(reset), _bytes(mask), state, new_state, o,
        T=T, H=H, **{f"{name}_groups": count for name, count in groups.items()}, b_apart=apart,
        SUBSTEPS=substeps, L=L, K=K, V=V, BK=padded(K), BV=block, num_warps=4,
    )  # fmt: skip
    return o


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.view(torch.int8)


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
    with device_guard(w):
        given = _aligned_for_step(q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state)
        return _launch(given, new, substeps), new


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
    with device_guard(w):
        given = _aligned_for_step(q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state)
        return _launch(given, state, substeps)


@step_.register_fake
def _(q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state, substeps):
    return w.new_empty(q.shape[0], q.shape[1], w.shape[2], w.shape[4])


def _aligned_for_step(*given: Tensor | None) -> list[Any]:
    """As `laid`, but the erase's keys may also lie evenly apart, as the first of k's do: decoding copies nothing."""
    b = given[4]
    if b is not None and b.data_ptr() % 16 == 0:
        apart, (_, T, G, _) = b.stride(2), b.shape
        if b.stride() == (T * G * apart, G * apart, apart, 1):
            return [*all_contiguous_aligned(*given[:4]), b, *all_contiguous_aligned(*given[5:])]
    return all_contiguous_aligned(*given)
