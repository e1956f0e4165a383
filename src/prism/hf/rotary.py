"""Rotate queries and keys by their positions, on a CPU in fewer passes than transformers makes.

    y_1 = x_1 ⊙ cos_1 - x_2 ⊙ sin_1        y_2 = x_2 ⊙ cos_2 + x_1 ⊙ sin_2        x_1, x_2: halves of the rotated channels

Channels after them pass through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.hf.linear_maps import untouched

_SMALL = 2**16
"""Of fewer numbers a call costs more than the passes."""
_CACHED = 2**17
"""Numbers of a span of tokens."""


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys `[B, H, T, D]` by cos and sin `[B, T, R]`, R ≤ D."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    fast = q.numel() >= _SMALL and unsqueeze_dim == 1 and untouched(q, k, cos, sin)
    fast = fast and not cos.requires_grad and not sin.requires_grad
    rotate = _in_steps if not fast else _Rotated.apply if torch.is_grad_enabled() else _rotated
    return rotate(q, cos, sin), rotate(k, cos, sin)


def _in_steps(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does it, in the precision that it chooses."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = ((turned * cos) + (torch.cat([-second, first], -1) * sin)).to(x.dtype)
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y, R, T = torch.empty_like(x), cos.shape[-1], x.shape[2]
    length = max(1, _CACHED * T // x.numel())
    for start in range(0, T, length):
        here, there, c, s = (z[:, :, start : start + length] for z in (x, y, cos, sin))
        (x_1, x_2), (y_1, y_2) = here[..., :R].chunk(2, -1), there[..., :R].chunk(2, -1)
        s_1, s_2 = s.chunk(2, -1)
        torch.mul(here[..., :R], c, out=there[..., :R])
        y_1.addcmul_(x_2, s_1, value=-1)
        y_2.addcmul_(x_1, s_2)
        there[..., R:] = here[..., R:]
    return y


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The transpose is the rotation by the opposite angles, with the halves of the sines exchanged.
        back = _in_steps if torch.is_grad_enabled() else _rotated
        return back(d_y, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None
