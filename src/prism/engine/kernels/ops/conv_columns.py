"""Compute the columns of a delta rule's memory from its projections, short convolution included, with gradients.

    x = silu(conv(projected))        q = K^-½ · unit(x_q)        k_1 = unit(x_k)        w_1 = β x_v        later columns

The definition in torch is `short_conv`, then `delta_columns` (`engine/layer_ops.py`). short_conv.py and columns.py compute
the same in two passes; here x is never in memory (kernels: strips.py, strips_backward.py). Only the inputs are saved for the
backward. The gradients of weights and γ are summed over each strip in the kernel, and over strips by torch, in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels.available import device_guard
from prism.engine.kernels.ops.solver import empty_like, summed_shares
from prism.engine.kernels.ops.strips import unit_strip_kernel, write_strip_kernel
from prism.engine.kernels.ops.strips_backward import unit_strip_backward_kernel, write_strip_backward_kernel
from prism.engine.kernels.runtime import (
    Operator,
    all_contiguous_aligned,
    all_present,
    gradient_like,
    only_given,
    schema_of,
)

# One warp walks along STRIP tokens and loads UNROLL of them at a time.
TILE: dict[str, int] = {"STRIP": 32, "UNROLL": 4, "num_warps": 1}
BACKWARD_TILE: dict[str, int] = {"STRIP": 128, "UNROLL": 2, "num_warps": 1}


class Inputs(NamedTuple):
    """Inputs of the operator: those of short_conv.py, without a bias, and of columns.py."""

    x: Tensor  # the projections [B, T, H·(K + K + V)]
    weight: Tensor  # [W, H·(K + K + V)]
    window: Tensor | None  # the conv state: the tokens before x, [B, W - 1, H·(K + K + V)]; gets no gradient
    documents: Tensor | None  # [B, T] int32
    beta: Tensor  # [B, T, H]
    keys: Tensor | None  # [B, T, H, N, K]; None: the first key
    u: Tensor | None  # [B, T, H, V]
    p: Tensor | None  # [B, T, H, N, V]
    betas: Tensor | None  # [B, T, H, N]
    scale: Tensor | None  # γ, [N, H, V]


INPUT_COUNT = len(Inputs._fields)


class Sizes(NamedTuple):
    """The sizes of a call."""

    T: int
    D: int
    H: int
    N: int
    K: int
    V: int
    W: int

    @property
    def values(self) -> int:
        """The first channel of the values."""
        return 2 * self.H * self.K


def sizes_of(given: Inputs, key_dim: int) -> Sizes:
    (_, T, D), H = given.x.shape, given.beta.shape[-1]
    N = 0 if given.betas is None else given.betas.shape[-1]
    return Sizes(T, D, H, N, key_dim, D // H - 2 * key_dim, given.weight.shape[0])


def strips_of(x: Tensor, tile: dict[str, int]) -> int:
    return x.shape[0] * -(-x.shape[1] // tile["STRIP"])


def _conv_columns(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`Inputs` and options → q `[B, T, H, K]`, k `[B, T, H, 1 + N, K]` and w `[B, T, H, 1 + N, V]`."""
    given = Inputs(*all_contiguous_aligned(*inputs[:INPUT_COUNT]))
    key_dim, query_scale, eps, gelu, nonlinear = inputs[INPUT_COUNT:]
    q, k, w = _conv_columns_shapes(*given, key_dim)
    T, D, H, N, K, V, W = s = sizes_of(given, key_dim)
    grid = (strips_of(given.x, TILE) * H,)
    before, later = given[:4], (given.u, given.p, given.betas, given.scale)
    with device_guard(given.x):
        unit_strip_kernel[grid](*before, None, q, query_scale, eps, 0, T, D, H, N=0, K=K, W=W, **TILE)
        unit_strip_kernel[grid](*before, given.keys, k, 1.0, eps, H * K, T, D, H, N=N, K=K, W=W, **TILE)
        write_strip_kernel[grid](
            *before, given.beta, *later, w, s.values, T, D, H, N=N, V=V, W=W, GELU=gelu, NONLINEAR=nonlinear, **TILE
        )
    return q, k, w


def _conv_columns_shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, key_dim = Inputs(*inputs[:INPUT_COUNT]), inputs[INPUT_COUNT]
    s, lead, new = sizes_of(given, key_dim), given.beta.shape, given.x.new_empty
    return new(*lead, s.K), new(*lead, 1 + s.N, s.K), new(*lead, 1 + s.N, s.V)


def _conv_columns_backward(d_q: Tensor, d_k: Tensor, d_w: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The gradients of `Inputs`, empty for window and documents."""
    d_q, d_k, d_w, *tensors = all_contiguous_aligned(d_q, d_k, d_w, *inputs[:INPUT_COUNT])
    given = Inputs(*tensors)
    key_dim, query_scale, eps, gelu, nonlinear = inputs[INPUT_COUNT:]
    T, D, H, N, K, V, W = s = sizes_of(given, key_dim)
    strips, tile = strips_of(given.x, BACKWARD_TILE), BACKWARD_TILE
    grid, before, later = (strips * H,), given[:4], given[6:]
    d_x, d_beta, d_keys, *d_later = [empty_like(z) for z in (given.x, given.beta, *given[5:9])]
    d_weight = given.x.new_empty(strips, W, D, dtype=torch.float32)
    d_scale = None if given.scale is None else d_weight.new_empty(strips, *given.scale.shape)
    with device_guard(given.x):
        unit_strip_backward_kernel[grid](
            *before, None, d_q, d_x, None, d_weight, query_scale, eps, 0, T, D, H, N=0, K=K, W=W, **tile
        )
        unit_strip_backward_kernel[grid](
            *before, given.keys, d_k, d_x, d_keys, d_weight, 1.0, eps, H * K, T, D, H, N=N, K=K, W=W, **tile
        )
        write_strip_backward_kernel[grid](
            *before, given.beta, *later, d_w, d_x, d_beta, *d_later, d_weight, d_scale, s.values, T, D, H,
            N=N, V=V, W=W, GELU=gelu, NONLINEAR=nonlinear, **tile,
        )  # fmt: skip
    sums = d_weight.sum(0).to(given.weight.dtype), summed_shares(d_scale, given.scale)
    return all_present((d_x, sums[0], None, None, d_beta, d_keys, *d_later, sums[1]), given.x)


def _conv_columns_backward_shapes(d_q: Tensor, d_k: Tensor, d_w: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    given = Inputs(*inputs[:INPUT_COUNT])
    return tuple(gradient_like(z, given.x) for z in given._replace(window=None, documents=None))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:INPUT_COUNT])
    ctx.options = inputs[INPUT_COUNT:]


def _differentiate(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    given = Inputs(*ctx.saved_tensors)  # gradient checkpointing allows one read
    grads = conv_columns_backward(*d_outputs, *given, *ctx.options)
    return *only_given(given._replace(window=None, documents=None), grads), *[None] * len(ctx.options)


_INPUT_SCHEMA = f"{schema_of(Inputs)}, int key_dim, float query_scale, float eps, bool gelu, bool nonlinear"

conv_columns_backward = Operator(
    "prism::conv_columns_backward",
    _conv_columns_backward,
    _conv_columns_backward_shapes,
    schema=f"(Tensor d_q, Tensor d_k, Tensor d_w, {_INPUT_SCHEMA}) -> ({', '.join(['Tensor'] * INPUT_COUNT)})",
)
conv_columns = Operator(
    "prism::conv_columns",
    _conv_columns,
    _conv_columns_shapes,
    _setup_context,
    _differentiate,
    schema=f"({_INPUT_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
