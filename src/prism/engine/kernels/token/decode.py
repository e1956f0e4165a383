"""Decode tokens one after the other in one kernel, which reads the state once and writes it once.

One program holds BV value channels of one head's state in registers (`one_token` advances it by a token). The arithmetic is
that of the recurrent form in torch, in float32. q, k and the erase may have fewer heads than w (head h reads group
h // (H // G)). The state may be stored in float32 or bfloat16; it is rounded when it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, tile_width
from prism.engine.kernels.runtime import Operator, all_contiguous_aligned, schema_of


@triton.jit
def load_row(tensor, row, h, H, groups, apart, ks, K: tl.constexpr):
    """A vector of `[rows, groups, K]`, whose vectors begin `apart` elements after one another, as float32 `[K, 1]`."""
    group = h // (H // groups)
    return tl.load(tensor + (row * groups + group) * apart + ks, mask=ks < K, other=0.0).to(tl.float32)[:, None]


@triton.jit
def write(S, k, w, row, h, H, k_groups, l, ks, vs, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """S `[BK, BV]` after write l of a row, k_l w_lᵀ."""
    key = load_row(k + l * K, row, h, H, k_groups, L * K, ks, K)
    value = tl.load(w + ((row * H + h) * L + l) * V + vs, mask=vs < V, other=0.0).to(tl.float32)
    return S + key * value[None, :]


@triton.jit
def one_token(
    S,
    q,
    k,
    w,
    log_decay,
    erase_key,
    erase_strength,
    erase_write,
    token,
    h,
    H,
    q_groups,
    k_groups,
    b_groups,
    a_groups,
    b_apart,
    a_apart,
    ks,
    vs,
    SUBSTEPS: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    UNDECAYED: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """The output `[BV]` and the new state of one token of one head, from its state S `[BK, BV]` in float32.

    `token` counts over all sequences (b · T + t, int64); `ks` and `vs` are the tile's key and value channels. PER_CHANNEL:
    `log_decay` is `[B, T, H, K]`. UNDECAYED: the erase reads the state before its decay. BEFORE: so does the query."""
    asked = load_row(q, token, h, H, q_groups, K, ks, K)
    if BEFORE:
        out = tl.sum(S * asked, 0)
    for s in tl.static_range(SUBSTEPS):
        row = token * SUBSTEPS + s
        before = S
        if s == 0 and log_decay is not None:
            if PER_CHANNEL:
                S = S * tl.exp(load_row(log_decay, token, h, H, H, K, ks, K))
            else:
                S = S * tl.exp(tl.load(log_decay + token * H + h).to(tl.float32))
        if erase_key is not None:
            lookup = load_row(erase_key, row, h, H, b_groups, b_apart, ks, K)
            seen = tl.sum((before if UNDECAYED else S) * lookup, 0)
            if erase_strength is not None:
                seen *= tl.load(erase_strength + row * H + h).to(tl.float32)
                S = S - lookup * seen[None, :]
            else:
                S = S - load_row(erase_write, row, h, H, a_groups, a_apart, ks, K) * seen[None, :]
        if L <= 8:
            for l in tl.static_range(L):
                S = write(S, k, w, row, h, H, k_groups, l, ks, vs, L, K, V)
        else:
            for l in range(L):
                S = write(S, k, w, row, h, H, k_groups, l, ks, vs, L, K, V)
    if not BEFORE:
        out = tl.sum(S * asked, 0)
    return out, S


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
    a_apart,
    SUBSTEPS: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    UNDECAYED: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """`state` and `new_state` `[B, H, K, V]` may share memory. Tensors that are None are left out of the compiled code. The
    vectors of the erase begin `b_apart` and `a_apart` elements after one another, so that they may be views of k's keys."""
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
        S = tl.load(state + place, mask=inside, other=0.0).to(tl.float32)

    for i in range(T):
        token = b * T + i
        before = S
        if reset is not None:
            S = tl.where(tl.load(reset + token) != 0, 0.0, S)
        out, S = one_token(
            S, q, k, w, log_decay, erase_key, erase_strength, erase_write, token, h,
            H, q_groups, k_groups, b_groups, a_groups, b_apart, a_apart, ks, vs,
            SUBSTEPS, L, K, V, PER_CHANNEL, UNDECAYED, BEFORE,
        )  # fmt: skip
        if mask is not None:
            live = tl.load(mask + token) != 0
            out = tl.where(live, out, 0.0)
            S = tl.where(live, S, before)
        tl.store(o + (token * H + h) * V + vs, out.to(o.dtype.element_ty), mask=vs < V)

    tl.store(new_state + place, S.to(new_state.dtype.element_ty), mask=inside)


class DecodeInputs(NamedTuple):
    """Inputs of the kernel: the tensors of an `Update`, with their own numbers of heads, and the state."""

    q: Tensor  # [B, T, G, K]
    k: Tensor  # [B, T·n, G, L, K]
    w: Tensor  # [B, T·n, H, L, V]
    log_decay: Tensor | None  # [B, T, H] or [B, T, H, K]
    erase_key: Tensor | None  # [B, T·n, G, K]
    erase_strength: Tensor | None  # [B, T·n, H]
    erase_write: Tensor | None  # [B, T·n, G, K]
    reset: Tensor | None  # [B, T]
    mask: Tensor | None  # [B, T]
    state: Tensor | None  # [B, H, K, V], float32 or bfloat16


class Options(NamedTuple):
    """The fields of an `Update` that are not tensors."""

    substeps: int = 1
    undecayed: bool = False
    before: bool = False


STRIDED = (DecodeInputs._fields.index("erase_key"), DecodeInputs._fields.index("erase_write"))
"""The inputs whose vectors may be evenly strided, as views of k's first keys are: no copy is made while decoding."""


def _launch(given: DecodeInputs, new_state: Tensor, how: Options) -> Tensor:
    """Run the kernel. Writes `new_state`, which may be the state itself, and returns the outputs `[B, T, H, V]`."""
    q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state = given
    (B, T, _, K), (H, L, V) = q.shape, w.shape[2:]
    groups = {
        name: 1 if z is None else z.shape[2] for name, z in {"q": q, "k": k, "b": erase_key, "a": erase_write}.items()
    }
    o = w.new_empty(B, T, H, V)
    block = min(tile_width(V), 32)
    step_kernel[(-(-V // block) * B * H,)](
        q, k, w, log_decay, erase_key, erase_strength, erase_write, _bytes(reset), _bytes(mask), state, new_state, o,
        T=T, H=H, **{f"{name}_groups": count for name, count in groups.items()},
        b_apart=_apart(erase_key, K), a_apart=_apart(erase_write, K),
        SUBSTEPS=how.substeps, L=L, K=K, V=V, BK=tile_width(K), BV=block,
        PER_CHANNEL=log_decay is not None and log_decay.ndim == 4, UNDECAYED=how.undecayed, BEFORE=how.before,
        num_warps=4,
    )  # fmt: skip
    return o


def _apart(z: Tensor | None, K: int) -> int:
    # `is_contiguous` first: a contiguous tensor may have any stride in a dimension of size 1.
    return K if z is None or z.is_contiguous() else z.stride(2)


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.view(torch.int8)


def _aligned(tensors: Sequence[Tensor | None]) -> DecodeInputs:
    """Contiguous and aligned tensors, except for those that may be evenly strided."""
    as_given = {i: tensors[i] for i in STRIDED if _evenly_strided(tensors[i])}
    aligned = all_contiguous_aligned(*[None if i in as_given else z for i, z in enumerate(tensors)])
    for i, z in as_given.items():
        aligned[i] = z
    return DecodeInputs(*aligned)


def _evenly_strided(b: Tensor | None) -> bool:
    if b is None or b.data_ptr() % 16 != 0:
        return False
    apart, (_, T, G, _) = b.stride(2), b.shape
    return b.stride() == (T * G * apart, G * apart, apart, 1)


COUNT = len(DecodeInputs._fields)


def _step(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`DecodeInputs` and `Options` → the outputs `[B, T, H, V]` and a new state `[B, H, K, V]`. Has no backward."""
    given = _aligned(inputs[:COUNT])
    with device_guard(given.w):
        new = _new_state(given)
        return _launch(given, new, Options(*inputs[COUNT:])), new


def _step_shapes(*inputs: Any) -> tuple[Tensor, Tensor]:
    given = DecodeInputs(*inputs[:COUNT])
    return _new_output(given), _new_state(given)


def _step_in_place(*inputs: Any) -> Tensor:
    """`step` that updates the state in-place. Called by `engine.memory_`, which checks its arguments."""
    state = inputs[COUNT - 1]
    if state.dtype not in (torch.float32, torch.bfloat16) or not state.is_contiguous():
        raise ValueError(
            f"state must be contiguous float32 or bfloat16, got {state.dtype} with strides {list(state.stride())}"
        )
    given = _aligned(inputs[:COUNT])
    with device_guard(given.w):
        return _launch(given, state, Options(*inputs[COUNT:]))


def _new_output(given: DecodeInputs) -> Tensor:
    return given.w.new_empty(given.q.shape[0], given.q.shape[1], given.w.shape[2], given.w.shape[4])


def _new_state(given: DecodeInputs) -> Tensor:
    w = given.w
    dtype = torch.float32 if given.state is None else given.state.dtype
    return w.new_empty(w.shape[0], w.shape[2], given.q.shape[3], w.shape[4], dtype=dtype)


_INPUT_SCHEMA = f"{schema_of(DecodeInputs)}, int substeps=1, bool undecayed=False, bool before=False"
_IN_PLACE = _INPUT_SCHEMA.replace("Tensor? state", "Tensor(a!) state")

step = Operator("prism::step", _step, _step_shapes, schema=f"({_INPUT_SCHEMA}) -> (Tensor, Tensor)")
step_ = torch.library.custom_op(
    "prism::step_", _step_in_place, mutates_args=("state",), schema=f"({_IN_PLACE}) -> Tensor"
)
step_.register_fake(lambda *inputs: _new_output(DecodeInputs(*inputs[:COUNT])))
