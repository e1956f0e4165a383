"""The kernels beside the memory as operators that torch knows: PRISM's solver, a memory's columns, the short convolution."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prism.engine.kernels import launch_beside
from prism.engine.kernels.operator import Operator
from prism.engine.kernels.ops import all_laid, all_present, present
from prism.engine.kernels.paths import home


def _solve(
    v: Tensor,
    u: Tensor | None,
    p: Tensor | None,
    beta: Tensor,
    scale: Tensor | None,
    gelu: bool,
    nonlinear: bool,
) -> Tensor:
    """PRISM's solver: v, u `[…, H, V]`, p `[…, H, L, V]`, β `[…, H, L]`, γ `[L, H, V]` → the writes `[…, H, L, V]`."""
    with home(v):
        return launch_beside.solve(gelu, nonlinear, *all_laid(v, u, p, beta, scale))


def _solve_shapes(v, u, p, beta, scale, gelu, nonlinear):
    return v.new_empty(*beta.shape, v.shape[-1])


def _solve_backward(
    d_w: Tensor,
    v: Tensor,
    u: Tensor | None,
    p: Tensor | None,
    beta: Tensor,
    scale: Tensor | None,
    gelu: bool,
    nonlinear: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with home(v):
        grads = launch_beside.solve_backward(gelu, nonlinear, *all_laid(d_w, v, u, p, beta, scale))
    return all_present(grads, v)


def _solve_backward_shapes(d_w, v, u, p, beta, scale, gelu, nonlinear):
    return tuple(_gradient_like(z, v) for z in (v, u, p, beta, scale))


def _keep_solve(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.gelu, ctx.nonlinear = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_solve(ctx: Any, d_w: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors  # gradient checkpointing allows one read
    return (*_wanted(given, solve_backward(d_w, *given, ctx.gelu, ctx.nonlinear)), None, None)


solve_backward = Operator("prism::solve_backward", _solve_backward, _solve_backward_shapes)
solve = Operator("prism::solve", _solve, _solve_shapes, _keep_solve, _differentiate_solve)


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
    with home(mixed):
        return launch_beside.columns(*options, *all_laid(mixed, beta, keys, u, p, betas, scale))


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
    with home(mixed):
        grads = launch_beside.columns_backward(
            *options, *all_laid(d_q, d_k, d_w, mixed, beta, keys, u, p, betas, scale)
        )
    return all_present(grads, mixed)


def _columns_backward_shapes(d_q, d_k, d_w, mixed, beta, keys, u, p, betas, scale, *options):
    return tuple(_gradient_like(z, mixed) for z in (mixed, beta, keys, u, p, betas, scale))


def _keep_columns(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _differentiate_columns(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    return (*_wanted(given, columns_backward(*d_outputs, *given, *ctx.options)), *[None] * len(ctx.options))


columns_backward = Operator("prism::columns_backward", _columns_backward, _columns_backward_shapes)
columns = Operator("prism::columns", _columns, _columns_shapes, _keep_columns, _differentiate_columns)


def _short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, documents: Tensor | None, silu: bool
) -> Tensor:
    """x `[B, T, D]`, weight `[W, D]`, bias `[D]`, window `[B, W - 1, D]`, documents `[B, T]` int32 → `[B, T, D]`.

    The window gets no gradient."""
    with home(x):
        return launch_beside.short_conv(silu, *all_laid(x, weight, bias, window, documents))


def _short_conv_shapes(x, weight, bias, window, documents, silu):
    return x.new_empty(x.shape)


def _short_conv_backward(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    documents: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    with home(x):
        d_x, d_weight, d_bias = launch_beside.short_conv_backward(
            silu, *all_laid(d_y, x, weight, bias, window, documents)
        )
    return d_x, d_weight, present(d_bias, weight)


def _short_conv_backward_shapes(d_y, x, weight, bias, window, documents, silu):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(0 if bias is None else bias.shape)


def _keep_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_conv(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    d_x, d_weight, d_bias = short_conv_backward(d_y, *given, ctx.silu)
    return d_x, d_weight, None if given[2] is None else d_bias, None, None, None


short_conv_backward = Operator("prism::short_conv_backward", _short_conv_backward, _short_conv_backward_shapes)
short_conv = Operator("prism::short_conv", _short_conv, _short_conv_shapes, _keep_conv, _differentiate_conv)


def _gradient_like(z: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if z is None else z.new_empty(z.shape)


def _wanted(given: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
    return [None if z is None else grad for z, grad in zip(given, grads, strict=True)]
