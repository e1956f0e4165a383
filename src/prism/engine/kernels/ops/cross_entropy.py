"""Cross-entropy of rows of logits and its gradient, in one kernel.

One program takes one row and passes it twice: once for the log-sum-exp, with a running maximum, and once for the gradient. A
row of 32,000 float32 logits is still in the cache at its second pass, so that memory is read once and written once. The
definition in torch is `token_losses` in `engine/layer_ops.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard

BLOCK, WARPS = 8192, 16


@triton.jit(do_not_specialize=["ignore_index"])
def token_losses_kernel(
    logits,
    targets,
    losses,
    gradient,
    ignore_index,
    z_loss,
    V,
    BLOCK: tl.constexpr,
):
    """logits `[rows, V]`, targets `[rows]` → losses `[rows]`, and unless it is None the gradient `[rows, V]`."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counted = target != ignore_index
    logits += row * V
    highest, norm = float("-inf"), 0.0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < V, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        norm = norm * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    lse = tl.log(norm) + highest
    valid = (target >= 0) & (target < V)
    at_target = tl.load(logits + target, mask=valid, other=float("nan"))
    tl.store(losses + row, tl.where(counted, lse - at_target + z_loss * lse * lse, 0.0))
    if gradient is not None:
        gradient += row * V
        scale = tl.where(counted, (1.0 + 2.0 * z_loss * lse) / norm, 0.0)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(logits + v, mask=v < V, other=float("-inf"))
            share = scale * tl.exp(x - highest) - tl.where(counted & (v == target), 1.0, 0.0)
            tl.store(gradient + v, share.to(gradient.dtype.element_ty), mask=v < V)


def token_losses(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Arguments and results as in `engine/layer_ops.py`. Called inside operators and autograd functions, it has no gradient."""
    rows, V = logits.shape
    losses = logits.new_empty(rows)
    gradient = None if dtype is None else logits.new_empty(rows, V, dtype=dtype)
    if rows:
        with device_guard(logits):
            token_losses_kernel[(rows,)](
                logits, targets.contiguous(), losses, gradient, ignore_index, z_loss, V, BLOCK=BLOCK, num_warps=WARPS
            )
    return losses, gradient
