"""Linear maps of many tokens on a CPU, by oneDNN.

torch computes them by MKL. On processors that are not Intel's, oneDNN is faster by a sixth, and by more where another
process holds a core, because its threads wait less for each other. A convolution with one tap is the way to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mkldnn as _mkldnn

from prism.dropin.plain import is_linear, untouched

_FEW = 256
"""Fewer tokens stay with torch: preparing the weights for oneDNN costs more than it gains."""


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """What `module(x)` computes, x `[…, K]`. A module that is more than a linear map without a bias is called."""
    if not serves(x) or not is_linear(module):
        found: Tensor = module(x)
        return found
    weight: Any = module.weight
    if not torch.is_grad_enabled():
        return times(x, weight)
    return _Linear.apply(x, weight)


def serves(x: Tensor) -> bool:
    """Whether x `[…, K]` has enough tokens, and may be computed on this way."""
    return x.numel() >= _FEW * x.shape[-1] and x.is_contiguous() and untouched(x)


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x `[…, K]` times the transpose of `weight` `[N, K]`."""
    if torch.get_num_threads() == 1 or not _mkldnn.is_available():  # torch's convolution would not use oneDNN
        return x @ weight.t()
    rows = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)  # [1, K, 1, tokens], channels last
    y = F.conv2d(rows, weight[:, :, None, None])
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return d_y @ weight, d_y.flatten(0, -2).t() @ x.flatten(0, -2)
        d_x = times(d_y.contiguous(), weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = d_y.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return d_x, d_weight
