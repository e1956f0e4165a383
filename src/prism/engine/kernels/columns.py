"""From a delta rule's projections to the columns that its memory reads, in one pass, and back.

    q = K^-½ · unit(q̃)        k_1 = unit(k̃)        w_1 = β v        k_l = unit(k̃_l),  w_l = the solver's writes of v - u

q̃, k̃ and v lie side by side in one row a token, as the convolution before leaves them, and so does their gradient. Written
with torch, the norms, the scalings and the joining of first and later columns move each of these tensors several times.
One program takes ROWS tokens of one head. The backward keeps the inputs alone.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, padded
from prism.engine.kernels.runtime import Operator, all_contiguous_aligned, all_present, gradient_like, only_given
from prism.engine.kernels.solver import (
    Grid,
    differentiate_solution,
    empty_like,
    grid,
    scale_shares,
    summed_shares,
    tokens_of_a_head,
    write_solution,
)


@triton.jit
def unit(x, eps):
    """Rows over their length."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def differentiate_unit(x, d_y, eps):
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
    """mixed `[rows, H·(K + K + V)]`, β `[rows, H]`; of the N later writes keys `[rows, H, N, K]` (None: along the first key),
    u `[rows, H, V]`, p `[rows, H, N, V]`, betas `[rows, H, N]`, γ `[N, H, V]` → q `[rows, H, K]`, k and w of 1 + N columns."""
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


def _launch_columns(
    key_dim: int,
    query_scale: float,
    eps: float,
    gelu: bool,
    nonlinear: bool,
    mixed: Tensor,
    beta: Tensor,
    *later: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`later`: keys, u, p, betas and scale, as `columns_kernel` has them."""
    where, sizes, constants = _layout(mixed, beta, later[3], key_dim)
    lead, J, K, V = beta.shape, 1 + constants["N"], key_dim, constants["V"]
    q, k, w = mixed.new_empty(*lead, K), mixed.new_empty(*lead, J, K), mixed.new_empty(*lead, J, V)
    columns_kernel[(where.programs,)](
        mixed, beta, *later, q, k, w, query_scale, eps, *sizes, **constants,
        GELU=gelu, NONLINEAR=nonlinear,
    )  # fmt: skip
    return q, k, w


def _launch_columns_backward(
    key_dim: int,
    query_scale: float,
    eps: float,
    gelu: bool,
    nonlinear: bool,
    d_q: Tensor,
    d_k: Tensor,
    d_w: Tensor,
    mixed: Tensor,
    beta: Tensor,
    *later: Tensor | None,
) -> tuple[Tensor | None, ...]:
    *most, scale = later
    where, sizes, constants = _layout(mixed, beta, later[3], key_dim)
    given = (mixed, beta, *most)
    grads = [empty_like(z) for z in given]
    shares = scale_shares(scale, where)
    columns_backward_kernel[(where.programs,)](
        *given, scale, d_q, d_k, d_w, *grads, shares, query_scale, eps, *sizes, **constants,
        GELU=gelu, NONLINEAR=nonlinear,
    )  # fmt: skip
    return (*grads, summed_shares(shares, scale))


def _layout(mixed: Tensor, beta: Tensor, betas: Tensor | None, K: int) -> tuple[Grid, tuple[int, int], dict[str, Any]]:
    H, tokens = beta.shape[-1], beta.numel() // beta.shape[-1]
    V, N = mixed.shape[-1] // H - 2 * K, 0 if betas is None else betas.shape[-1]
    narrow, wide = padded(K), padded(V)
    where = grid(tokens, H, max(narrow, wide))
    return where, (tokens, H), {"N": N, "K": K, "BK": narrow, "V": V, "BV": wide, "ROWS": where.per_program}


def _columns(
    mixed: Tensor,
    beta: Tensor,
    keys: Tensor | None,
    u: Tensor | None,
    p: Tensor | None,
    betas: Tensor | None,
    scale: Tensor | None,
    key_dim: int,
    query_scale: float,
    eps: float,
    gelu: bool,
    nonlinear: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A delta rule's q `[…, H, K]`, k `[…, H, 1 + N, K]` and w `[…, H, 1 + N, V]`; see `columns_kernel`."""
    options = (key_dim, query_scale, eps, gelu, nonlinear)
    with device_guard(mixed):
        return _launch_columns(*options, *all_contiguous_aligned(mixed, beta, keys, u, p, betas, scale))


def _columns_shapes(mixed, beta, keys, u, p, betas, scale, key_dim, query_scale, eps, gelu, nonlinear):
    value_dim, J = mixed.shape[-1] // beta.shape[-1] - 2 * key_dim, 1 if betas is None else 1 + betas.shape[-1]
    lead = beta.shape
    return (
        mixed.new_empty(*lead, key_dim),
        mixed.new_empty(*lead, J, key_dim),
        mixed.new_empty(*lead, J, value_dim),
    )


def _columns_backward(
    d_q: Tensor,
    d_k: Tensor,
    d_w: Tensor,
    mixed: Tensor,
    beta: Tensor,
    keys: Tensor | None,
    u: Tensor | None,
    p: Tensor | None,
    betas: Tensor | None,
    scale: Tensor | None,
    key_dim: int,
    query_scale: float,
    eps: float,
    gelu: bool,
    nonlinear: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = (key_dim, query_scale, eps, gelu, nonlinear)
    with device_guard(mixed):
        grads = _launch_columns_backward(
            *options, *all_contiguous_aligned(d_q, d_k, d_w, mixed, beta, keys, u, p, betas, scale)
        )
    return all_present(grads, mixed)


def _columns_backward_shapes(d_q, d_k, d_w, mixed, beta, keys, u, p, betas, scale, *options):
    return tuple(gradient_like(z, mixed) for z in (mixed, beta, keys, u, p, betas, scale))


def _keep_columns(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _differentiate_columns(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    return (*only_given(given, columns_backward(*d_outputs, *given, *ctx.options)), *[None] * len(ctx.options))


columns_backward = Operator("prism::columns_backward", _columns_backward, _columns_backward_shapes)
columns = Operator("prism::columns", _columns, _columns_shapes, _keep_columns, _differentiate_columns)
