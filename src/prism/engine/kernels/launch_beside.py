"""Launches of the kernels beside the memory: the solver, a memory's columns, the short convolution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels.columns import columns_backward_kernel, columns_kernel
from prism.engine.kernels.paths import padded
from prism.engine.kernels.short_conv import short_conv_inputs_kernel, short_conv_kernel, short_conv_weights_kernel
from prism.engine.kernels.solver import solve_backward_kernel, solve_kernel

ELEMENTS = 2048
"""What one program of the solver holds: tokens × channels."""


class Grid(NamedTuple):
    """A program takes some tokens of one head."""

    per_program: int
    per_head: int
    programs: int


def grid(tokens: int, heads: int, block: int) -> Grid:
    per_program = max(1, ELEMENTS // block)
    count = -(-tokens // per_program)
    return Grid(per_program, count, count * heads)


def solve(
    gelu: bool, nonlinear: bool, v: Tensor, u: Tensor | None, p: Tensor | None, beta: Tensor, scale: Tensor | None
) -> Tensor:
    where, sizes, constants = _solver(v, beta)
    w = v.new_empty(*beta.shape, v.shape[-1])
    solve_kernel[(where.programs,)](v, u, p, beta, scale, w, *sizes, **constants, GELU=gelu, NONLINEAR=nonlinear)
    return w


def solve_backward(
    gelu: bool,
    nonlinear: bool,
    d_w: Tensor,
    v: Tensor,
    u: Tensor | None,
    p: Tensor | None,
    beta: Tensor,
    scale: Tensor | None,
) -> tuple[Tensor | None, ...]:
    where, sizes, constants = _solver(v, beta)
    d_v, d_u, d_p, d_beta = (_like(z) for z in (v, u, p, beta))
    shares = _shares(scale, where)
    solve_backward_kernel[(where.programs,)](
        v, u, p, beta, scale, d_w, d_v, d_u, d_p, d_beta, shares, *sizes, **constants, GELU=gelu, NONLINEAR=nonlinear
    )
    return d_v, d_u, d_p, d_beta, _summed(shares, scale)


def _solver(v: Tensor, beta: Tensor) -> tuple[Grid, tuple[int, int], dict[str, int]]:
    H, V, L = v.shape[-2], v.shape[-1], beta.shape[-1]
    tokens, block = v.numel() // (H * V), padded(V)
    where = grid(tokens, H, block)
    return where, (tokens, H), {"L": L, "V": V, "BV": block, "ROWS": where.per_program}


def columns(
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
    where, sizes, constants = _columns(mixed, beta, later[3], key_dim)
    lead, J, K, V = beta.shape, 1 + constants["N"], key_dim, constants["V"]
    q, k, w = mixed.new_empty(*lead, K), mixed.new_empty(*lead, J, K), mixed.new_empty(*lead, J, V)
    columns_kernel[(where.programs,)](
        mixed, beta, *later, q, k, w, query_scale, eps, *sizes, **constants,
        GELU=gelu, NONLINEAR=nonlinear,
    )  # fmt: skip
    return q, k, w


def columns_backward(
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
    where, sizes, constants = _columns(mixed, beta, later[3], key_dim)
    given = (mixed, beta, *most)
    grads = [_like(z) for z in given]
    shares = _shares(scale, where)
    columns_backward_kernel[(where.programs,)](
        *given, scale, d_q, d_k, d_w, *grads, shares, query_scale, eps, *sizes, **constants,
        GELU=gelu, NONLINEAR=nonlinear,
    )  # fmt: skip
    return (*grads, _summed(shares, scale))


def _columns(mixed: Tensor, beta: Tensor, betas: Tensor | None, K: int) -> tuple[Grid, tuple[int, int], dict[str, Any]]:
    H, tokens = beta.shape[-1], beta.numel() // beta.shape[-1]
    V, N = mixed.shape[-1] // H - 2 * K, 0 if betas is None else betas.shape[-1]
    narrow, wide = padded(K), padded(V)
    where = grid(tokens, H, max(narrow, wide))
    return where, (tokens, H), {"N": N, "K": K, "BK": narrow, "V": V, "BV": wide, "ROWS": where.per_program}


def _like(z: Tensor | None) -> Tensor | None:
    return None if z is None else torch.empty_like(z)


def _shares(scale: Tensor | None, where: Grid) -> Tensor | None:
    """Each program's part of γ's gradient."""
    return None if scale is None else scale.new_empty(where.per_head, *scale.shape, dtype=torch.float32)


def _summed(shares: Tensor | None, scale: Tensor | None) -> Tensor | None:
    return None if shares is None or scale is None else shares.sum(0).to(scale.dtype)


# One warp has whole rows of a tile: what it adds up over tokens never leaves a thread.
CONV_TILE: dict[str, int] = {"ROWS": 4, "COLUMNS": 256, "num_warps": 1}
CONV_SUM_TILE, CONV_SUM_REPEAT = {**CONV_TILE, "ROWS": 2}, 64


def short_conv(
    silu: bool, x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, documents: Tensor | None
) -> Tensor:
    y = torch.empty_like(x)
    short_conv_kernel[_conv_grid(x)](
        x, weight, bias, window, documents, y, *x.shape[1:], W=weight.shape[0], SILU=silu, **CONV_TILE
    )
    return y


def short_conv_backward(
    silu: bool,
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    (_, T, D), W = x.shape, weight.shape[0]
    programs = x.shape[0] * -(-T // (CONV_SUM_TILE["ROWS"] * CONV_SUM_REPEAT))
    d_z, d_x = torch.empty_like(x), torch.empty_like(x)
    shares = x.new_empty(programs, W + 1, D, dtype=torch.float32)
    short_conv_weights_kernel[(programs, -(-D // CONV_SUM_TILE["COLUMNS"]))](
        x, weight, bias, window, documents, d_y, d_z, shares, T, D, W=W, SILU=silu,
        **CONV_SUM_TILE, REPEAT=CONV_SUM_REPEAT,
    )  # fmt: skip
    short_conv_inputs_kernel[_conv_grid(x)](d_z, weight, documents, d_x, T, D, W=W, **CONV_TILE)
    return d_x, shares[:, :W].sum(0).to(weight.dtype), None if bias is None else shares[:, W].sum(0).to(bias.dtype)


def _conv_grid(x: Tensor) -> tuple[int, int]:
    B, T, D = x.shape
    return B * -(-T // CONV_TILE["ROWS"]), -(-D // CONV_TILE["COLUMNS"])
