"""Scale rows by one number each and add rows scaled per head, with a backward that has no temporaries of full size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.dropin.norms import spans, traced


def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """x `[B, T, H, V]` times `scale` `[B, T, H]`."""
    if not torch.is_grad_enabled() or traced(x, scale):
        return x * scale.unsqueeze(-1)
    return _ScaledRows.apply(x, scale)


def add_scaled(y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """y + scale ⊙ x, which may overwrite y: `[B, T, H, V]`, scale `[H]` or `[H, V]`."""
    scale = scale.unsqueeze(-1) if scale.ndim == 1 else scale
    if not torch.is_grad_enabled() or traced(y, x, scale):
        return torch.addcmul(y, x, scale)
    return _AddScaled.apply(y, x, scale)


class _ScaledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return d_y * scale.unsqueeze(-1), (d_y * x).sum(-1)
        d_x, d_scale = torch.empty_like(d_y), torch.empty_like(scale)
        for b in range(len(x)):
            for rows in spans(x[b]):
                torch.mul(d_y[b, rows], scale[b, rows].unsqueeze(-1), out=d_x[b, rows])
                torch.sum(d_y[b, rows] * x[b, rows], -1, out=d_scale[b, rows])
        return d_x, d_scale


class _AddScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.mark_dirty(y)
        return y.addcmul_(x, scale)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return d_y, d_y * scale, (d_y * x).sum((0, 1)).sum_to_size(scale.shape)
        d_scale = torch.zeros_like(x[0, 0])
        for b in range(len(x)):
            for rows in spans(x[b]):
                d_scale += (d_y[b, rows] * x[b, rows]).sum(0)
        return d_y, d_y * scale, d_scale.sum_to_size(scale.shape)
