"""Solve for PRISM's L writes in one pass, from v, u, gains and step sizes, with gradients.

    gelu     δ_l = GELU(p_l r_l),   r_{l+1} = r_l - δ_l                w_l = γ_l β_l δ_l,   r_1 = v - u
    closed   δ_l = σ(p_l) r_l,      r_{l+1} = r_l - δ_l

One program takes ROWS tokens of one head. Only the inputs are saved; the backward computes the L residuals again. γ's
gradient is summed over each program's tokens in the kernel and over programs by torch, in a fixed order. The definition
in torch is `solved_writes` in `engine/layer_ops.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, tile_width
from prism.engine.kernels.ops.sigmoid import sigmoid
from prism.engine.kernels.runtime import (
    Operator,
    all_contiguous_aligned,
    all_present,
    gradient_like,
    only_given,
    schema_of,
)

ELEMENTS = 2048
"""Tokens × channels per program, of the kernels here and in columns.py."""


@triton.jit
def tokens_of_a_head(rows, H, ROWS: tl.constexpr):
    """The program's head h, the positions of its tokens in `[rows, H]`, and which of them exist."""
    h = tl.program_id(0) % H
    i = tl.program_id(0) // H * ROWS + tl.arange(0, ROWS)
    return h, i.to(tl.int64) * H + h, i < rows


@triton.jit
def normal_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def load_gain(p, place, l, v, inside, L: tl.constexpr, V: tl.constexpr, GELU: tl.constexpr):
    """p_l, or the constant in its place: 1 with GELU, and half of every residual in the closed form."""
    if p is None:
        return 1.0 if GELU else 0.5
    else:  # Triton also compiles code after a return
        return tl.load(p + place * L + l * V + v[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def correction(gain, r, GAINS: tl.constexpr, GELU: tl.constexpr, NONLINEAR: tl.constexpr):
    """δ_l, and its derivatives by r_l and p_l."""
    if GELU:
        x = gain * r
        if NONLINEAR:
            cdf = normal_cdf(x)
            slope = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
            return x * cdf, slope * gain, slope * r
        return x, gain + 0.0 * r, r
    if GAINS and NONLINEAR:
        share = sigmoid(gain)
        return share * r, share, share * (1.0 - share) * r
    return gain * r, gain + 0.0 * r, r


@triton.jit
def write_solution(
    residual,
    p,
    beta,
    scale,
    w,
    head,
    h,
    v,
    inside,
    known,
    H,
    L: tl.constexpr,
    SKIP: tl.constexpr,
    V: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    """Store the L writes, after the first SKIP columns of a token in w `[rows, H, SKIP + L, V]`."""
    place = head[:, None] * V
    for l in tl.static_range(L):
        gain = load_gain(p, place, l, v, inside, L, V, GELU)
        delta, _, _ = correction(gain, residual, p is not None, GELU, NONLINEAR)
        value = delta * tl.load(beta + head * L + l, mask=known, other=0.0).to(tl.float32)[:, None]
        if scale is not None:
            value *= tl.load(scale + (l * H + h) * V + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
        tl.store(w + place * (SKIP + L) + (SKIP + l) * V + v[None, :], value.to(w.dtype.element_ty), mask=inside)
        residual -= delta


@triton.jit
def differentiate_solution(
    first,
    p,
    beta,
    scale,
    d_w,
    d_p,
    d_beta,
    d_scale,
    head,
    h,
    v,
    inside,
    known,
    H,
    L: tl.constexpr,
    SKIP: tl.constexpr,
    V: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    """The gradient of the first residual; the gradients of p and β are stored. `d_scale` `[programs / H, L, H, V]` holds each
    program's sum."""
    place = head[:, None] * V
    d_residual = tl.zeros_like(first)
    for l in tl.static_range(L - 1, -1, -1):
        residual = first
        for m in tl.static_range(l):
            gain = load_gain(p, place, m, v, inside, L, V, GELU)
            delta, _, _ = correction(gain, residual, p is not None, GELU, NONLINEAR)
            residual -= delta
        gain = load_gain(p, place, l, v, inside, L, V, GELU)
        delta, by_residual, by_gain = correction(gain, residual, p is not None, GELU, NONLINEAR)
        step = tl.load(beta + head * L + l, mask=known, other=0.0).to(tl.float32)[:, None]
        written = d_w + place * (SKIP + L) + (SKIP + l) * V + v[None, :]
        d_value = tl.load(written, mask=inside, other=0.0).to(tl.float32)
        if scale is not None:
            tl.store(
                d_scale + ((tl.program_id(0).to(tl.int64) // H * L + l) * H + h) * V + v,
                tl.sum(d_value * delta * step, 0),
                mask=v < V,
            )
            d_value *= tl.load(scale + (l * H + h) * V + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
        tl.store(d_beta + head * L + l, tl.sum(d_value * delta, 1).to(d_beta.dtype.element_ty), mask=known)
        d_delta = d_value * step - d_residual
        if p is not None:
            tl.store(d_p + place * L + l * V + v[None, :], (d_delta * by_gain).to(d_p.dtype.element_ty), mask=inside)
        d_residual += d_delta * by_residual
    return d_residual


@triton.jit
def load_residual(value, u, place, inside):
    """v - u, or v if u is None."""
    residual = tl.load(value + place, mask=inside, other=0.0).to(tl.float32)
    if u is not None:
        residual -= tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
    return residual


@triton.jit(do_not_specialize=["rows", "H"])
def solve_kernel(
    value,
    u,
    p,
    beta,
    scale,
    w,
    rows,
    H,
    L: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    """`value` (v) and u `[rows, H, V]`, p and w `[rows, H, L, V]`, β `[rows, H, L]`, γ `[L, H, V]`."""
    h, head, known = tokens_of_a_head(rows, H, ROWS)
    v = tl.arange(0, BV)
    inside = known[:, None] & (v < V)[None, :]
    residual = load_residual(value, u, head[:, None] * V + v[None, :], inside)
    write_solution(residual, p, beta, scale, w, head, h, v, inside, known, H, L, 0, V, GELU, NONLINEAR)


# Repeats the argument list of `solve_kernel`: a Triton kernel takes no structures.
@triton.jit(do_not_specialize=["rows", "H"])
def solve_backward_kernel(
    value,
    u,
    p,
    beta,
    scale,
    d_w,
    d_value,
    d_u,
    d_p,
    d_beta,
    d_scale,
    rows,
    H,
    L: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    h, head, known = tokens_of_a_head(rows, H, ROWS)
    v = tl.arange(0, BV)
    inside = known[:, None] & (v < V)[None, :]
    place = head[:, None] * V + v[None, :]
    d_residual = differentiate_solution(
        load_residual(value, u, place, inside), p, beta, scale, d_w, d_p, d_beta, d_scale, head, h, v, inside, known,
        H, L, 0, V, GELU, NONLINEAR,
    )  # fmt: skip
    tl.store(d_value + place, d_residual.to(d_value.dtype.element_ty), mask=inside)
    if u is not None:
        tl.store(d_u + place, (-d_residual).to(d_u.dtype.element_ty), mask=inside)


class Grid(NamedTuple):
    """The programs of a launch. Each takes `per_program` tokens of one head."""

    per_program: int
    per_head: int
    programs: int


def token_grid(tokens: int, heads: int, block: int, elements: int = ELEMENTS) -> Grid:
    """The grid for `tokens` × `heads` rows of `block` channels, with `elements` numbers per program."""
    per_program = max(1, elements // block)
    count = -(-tokens // per_program)
    return Grid(per_program, count, count * heads)


def empty_like(z: Tensor | None) -> Tensor | None:
    """Memory for z's gradient, or None."""
    return None if z is None else torch.empty_like(z)


def scale_shares(scale: Tensor | None, grid: Grid) -> Tensor | None:
    """Memory for each program's part of γ's gradient."""
    return None if scale is None else scale.new_empty(grid.per_head, *scale.shape, dtype=torch.float32)


def summed_shares(shares: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """γ's gradient: the sum over programs."""
    return None if shares is None or scale is None else shares.sum(0).to(scale.dtype)


class SolverInputs(NamedTuple):
    """Inputs of the solver, for L writes."""

    v: Tensor  # […, H, V]
    u: Tensor | None  # […, H, V]
    p: Tensor | None  # […, H, L, V]
    beta: Tensor  # […, H, L]
    scale: Tensor | None  # γ, [L, H, V]


INPUT_COUNT = len(SolverInputs._fields)


def _solve(*inputs: Any) -> Tensor:
    """`SolverInputs`, gelu and nonlinear → the writes `[…, H, L, V]`."""
    given = SolverInputs(*all_contiguous_aligned(*inputs[:INPUT_COUNT]))
    grid, sizes, constants = _layout(given, *inputs[INPUT_COUNT:])
    w = given.v.new_empty(*given.beta.shape, given.v.shape[-1])
    with device_guard(w):
        solve_kernel[(grid.programs,)](*given, w, *sizes, **constants)
    return w


def _solve_shapes(*inputs: Any) -> Tensor:
    given = SolverInputs(*inputs[:INPUT_COUNT])
    return given.v.new_empty(*given.beta.shape, given.v.shape[-1])


def _solve_backward(d_w: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The gradients of `SolverInputs`."""
    d_w, *tensors = all_contiguous_aligned(d_w, *inputs[:INPUT_COUNT])
    given = SolverInputs(*tensors)
    grid, sizes, constants = _layout(given, *inputs[INPUT_COUNT:])
    grads = [empty_like(z) for z in given[:-1]]
    shares = scale_shares(given.scale, grid)
    with device_guard(d_w):
        solve_backward_kernel[(grid.programs,)](*given, d_w, *grads, shares, *sizes, **constants)
    return all_present((*grads, summed_shares(shares, given.scale)), given.v)


def _solve_backward_shapes(d_w: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    given = SolverInputs(*inputs[:INPUT_COUNT])
    return tuple(gradient_like(z, given.v) for z in given)


def _layout(given: SolverInputs, gelu: bool, nonlinear: bool) -> tuple[Grid, tuple[int, int], dict[str, Any]]:
    """The grid, the sizes and the constants of a launch."""
    (H, V), L = given.v.shape[-2:], given.beta.shape[-1]
    tokens, block = given.v.numel() // (H * V), tile_width(V)
    grid = token_grid(tokens, H, block)
    constants = {"L": L, "V": V, "BV": block, "ROWS": grid.per_program, "GELU": gelu, "NONLINEAR": nonlinear}
    return grid, (tokens, H), constants


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:INPUT_COUNT])
    ctx.options = inputs[INPUT_COUNT:]


def _differentiate(ctx: Any, d_w: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors  # gradient checkpointing allows one read
    return *only_given(given, solve_backward(d_w, *given, *ctx.options)), *[None] * len(ctx.options)


_INPUT_SCHEMA = f"{schema_of(SolverInputs)}, bool gelu, bool nonlinear"

solve_backward = Operator(
    "prism::solve_backward",
    _solve_backward,
    _solve_backward_shapes,
    schema=f"(Tensor d_w, {_INPUT_SCHEMA}) -> ({', '.join(['Tensor'] * INPUT_COUNT)})",
)
solve = Operator(
    "prism::solve", _solve, _solve_shapes, _setup_context, _differentiate, schema=f"({_INPUT_SCHEMA}) -> Tensor"
)
