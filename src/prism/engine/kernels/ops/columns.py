"""Compute the columns that a delta rule's memory reads from its projections in one pass, with gradients.

    q = K^-½ · unit(q̃)        k_1 = unit(k̃)        w_1 = β v        k_l = unit(k̃_l),  w_l = the solver's writes of v - u

q̃, k̃ and v are stored in one row per token, as the preceding convolution writes them, and so is their gradient. In torch, the
norms, the scalings and the concatenation of first and later columns move each of these tensors several times. One program
takes ROWS tokens of one head. Only the inputs are saved for the backward. The definition in torch is `delta_columns` in
`engine/layer_ops.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, tile_width
from prism.engine.kernels.ops.solver import (
    ELEMENTS,
    Grid,
    differentiate_solution,
    empty_like,
    scale_shares,
    summed_shares,
    token_grid,
    tokens_of_a_head,
    write_solution,
)
from prism.engine.kernels.runtime import (
    Operator,
    all_contiguous_aligned,
    all_present,
    gradient_like,
    only_given,
    schema_of,
)

BACKWARD_ELEMENTS, BACKWARD_WARPS = 1024, 2
"""Tokens × channels per program of the backward, and its warps: measured (0.92 ms; as in the forward 1.04)."""


@triton.jit
def unit(x, eps):
    """Rows divided by their length."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def differentiate_unit(x, d_y, eps):
    """The gradient of x, from that of `unit(x, eps)`."""
    shrink = tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
    y = x * shrink
    return shrink * (d_y - y * tl.sum(y * d_y, 1)[:, None])


@triton.jit
def load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointers, x, mask):
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "H"])
def columns_kernel(
    mixed,
    beta,
    keys,
    u,
    p,
    betas,
    scale,
    q,
    k,
    w,
    query_scale,
    eps,
    rows,
    H,
    N: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    """mixed `[rows, H·(K + K + V)]`, β `[rows, H]`; of the N later writes keys `[rows, H, N, K]` (None: the first key), u
    `[rows, H, V]`, p `[rows, H, N, V]`, betas `[rows, H, N]`, γ `[N, H, V]` → q `[rows, H, K]`, k and w of 1 + N columns."""
    h, head, known = tokens_of_a_head(rows, H, ROWS)
    c, v = tl.arange(0, BK), tl.arange(0, BV)
    narrow, wide = known[:, None] & (c < K)[None, :], known[:, None] & (v < V)[None, :]
    row = mixed + ((head - h) * (2 * K + V))[:, None]
    store(q + head[:, None] * K + c[None, :], query_scale * unit(load(row + h * K + c[None, :], narrow), eps), narrow)
    key = unit(load(row + (H + h) * K + c[None, :], narrow), eps)
    place = k + head[:, None] * ((1 + N) * K) + c[None, :]
    store(place, key, narrow)
    for l in tl.static_range(N):
        if keys is not None:
            key = unit(load(keys + head[:, None] * (N * K) + l * K + c[None, :], narrow), eps)
        store(place + (1 + l) * K, key, narrow)
    value = load(row + H * (2 * K) + h * V + v[None, :], wide)
    first = load(beta + head, known)[:, None] * value
    store(w + head[:, None] * ((1 + N) * V) + v[None, :], first, wide)
    if N > 0:
        if u is not None:
            value -= load(u + head[:, None] * V + v[None, :], wide)
        write_solution(value, p, betas, scale, w, head, h, v, wide, known, H, N, 1, V, GELU, NONLINEAR)


# Repeats the argument list of `columns_kernel`: a Triton kernel takes no structures.
@triton.jit(do_not_specialize=["rows", "H"])
def columns_backward_kernel(
    mixed,
    beta,
    keys,
    u,
    p,
    betas,
    scale,
    d_q,
    d_k,
    d_w,
    d_mixed,
    d_beta,
    d_keys,
    d_u,
    d_p,
    d_betas,
    d_scale,
    query_scale,
    eps,
    rows,
    H,
    N: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    h, head, known = tokens_of_a_head(rows, H, ROWS)
    c, v = tl.arange(0, BK), tl.arange(0, BV)
    narrow, wide = known[:, None] & (c < K)[None, :], known[:, None] & (v < V)[None, :]
    row = ((head - h) * (2 * K + V))[:, None]

    place = row + h * K + c[None, :]
    d_unit = query_scale * load(d_q + head[:, None] * K + c[None, :], narrow)
    store(d_mixed + place, differentiate_unit(load(mixed + place, narrow), d_unit, eps), narrow)

    columns = d_k + head[:, None] * ((1 + N) * K) + c[None, :]
    d_unit = load(columns, narrow)
    for l in tl.static_range(N):
        d_later = load(columns + (1 + l) * K, narrow)
        if keys is not None:
            place = head[:, None] * (N * K) + l * K + c[None, :]
            store(d_keys + place, differentiate_unit(load(keys + place, narrow), d_later, eps), narrow)
        else:
            d_unit += d_later
    place = row + (H + h) * K + c[None, :]
    store(d_mixed + place, differentiate_unit(load(mixed + place, narrow), d_unit, eps), narrow)

    place = row + H * (2 * K) + h * V + v[None, :]
    value = load(mixed + place, wide)
    d_first = load(d_w + head[:, None] * ((1 + N) * V) + v[None, :], wide)
    store(d_beta + head, tl.sum(d_first * value, 1), known)
    d_value = load(beta + head, known)[:, None] * d_first
    if N > 0:
        if u is not None:
            value -= load(u + head[:, None] * V + v[None, :], wide)
        d_residual = differentiate_solution(
            value, p, betas, scale, d_w, d_p, d_betas, d_scale, head, h, v, wide, known, H, N, 1, V, GELU, NONLINEAR
        )
        if u is not None:
            store(d_u + head[:, None] * V + v[None, :], -d_residual, wide)
        d_value += d_residual
    store(d_mixed + place, d_value, wide)


class ColumnInputs(NamedTuple):
    """Inputs of the kernels: q̃, k̃ and v of a token in one row, β, and PRISM's N later writes."""

    mixed: Tensor  # […, H·(K + K + V)]
    beta: Tensor  # […, H]
    keys: Tensor | None  # […, H, N, K]; None: the first key
    u: Tensor | None  # […, H, V]
    p: Tensor | None  # […, H, N, V]
    betas: Tensor | None  # […, H, N]
    scale: Tensor | None  # γ, [N, H, V]


INPUT_COUNT = len(ColumnInputs._fields)


def _columns(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`ColumnInputs` and options → q `[…, H, K]`, k `[…, H, 1 + N, K]` and w `[…, H, 1 + N, V]`."""
    given = ColumnInputs(*all_contiguous_aligned(*inputs[:INPUT_COUNT]))
    q, k, w = _columns_shapes(*given, *inputs[INPUT_COUNT:])
    grid, numbers, constants = _layout(given, *inputs[INPUT_COUNT:])
    with device_guard(given.mixed):
        columns_kernel[(grid.programs,)](*given, q, k, w, *numbers, **constants)
    return q, k, w


def _columns_shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, key_dim = ColumnInputs(*inputs[:INPUT_COUNT]), inputs[INPUT_COUNT]
    lead, J = given.beta.shape, 1 if given.betas is None else 1 + given.betas.shape[-1]
    value_dim, new = given.mixed.shape[-1] // lead[-1] - 2 * key_dim, given.mixed.new_empty
    return new(*lead, key_dim), new(*lead, J, key_dim), new(*lead, J, value_dim)


def _columns_backward(d_q: Tensor, d_k: Tensor, d_w: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The gradients of `ColumnInputs`."""
    d_q, d_k, d_w, *tensors = all_contiguous_aligned(d_q, d_k, d_w, *inputs[:INPUT_COUNT])
    given = ColumnInputs(*tensors)
    grid, numbers, constants = _layout(given, *inputs[INPUT_COUNT:], elements=BACKWARD_ELEMENTS)
    grads = [empty_like(z) for z in given[:-1]]
    shares = scale_shares(given.scale, grid)
    with device_guard(given.mixed):
        columns_backward_kernel[(grid.programs,)](
            *given, d_q, d_k, d_w, *grads, shares, *numbers, **constants, num_warps=BACKWARD_WARPS
        )
    return all_present((*grads, summed_shares(shares, given.scale)), given.mixed)


def _columns_backward_shapes(d_q: Tensor, d_k: Tensor, d_w: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    given = ColumnInputs(*inputs[:INPUT_COUNT])
    return tuple(gradient_like(z, given.mixed) for z in given)


def _layout(
    given: ColumnInputs,
    K: int,
    query_scale: float,
    eps: float,
    gelu: bool,
    nonlinear: bool,
    *,
    elements: int = ELEMENTS,
) -> tuple[Grid, tuple[float, float, int, int], dict[str, Any]]:
    """The grid, the numbers and the constants of a launch."""
    H = given.beta.shape[-1]
    tokens, V = given.beta.numel() // H, given.mixed.shape[-1] // H - 2 * K
    narrow, wide = tile_width(K), tile_width(V)
    grid = token_grid(tokens, H, max(narrow, wide), elements)
    constants = {
        "N": 0 if given.betas is None else given.betas.shape[-1],
        "K": K,
        "BK": narrow,
        "V": V,
        "BV": wide,
        "ROWS": grid.per_program,
        "GELU": gelu,
        "NONLINEAR": nonlinear,
    }
    return grid, (query_scale, eps, tokens, H), constants


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:INPUT_COUNT])
    ctx.options = inputs[INPUT_COUNT:]


def _differentiate(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    return *only_given(given, columns_backward(*d_outputs, *given, *ctx.options)), *[None] * len(ctx.options)


_INPUT_SCHEMA = f"{schema_of(ColumnInputs)}, int key_dim, float query_scale, float eps, bool gelu, bool nonlinear"

columns_backward = Operator(
    "prism::columns_backward",
    _columns_backward,
    _columns_backward_shapes,
    schema=f"(Tensor d_q, Tensor d_k, Tensor d_w, {_INPUT_SCHEMA}) -> ({', '.join(['Tensor'] * INPUT_COUNT)})",
)
columns = Operator(
    "prism::columns",
    _columns,
    _columns_shapes,
    _setup_context,
    _differentiate,
    schema=f"({_INPUT_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
