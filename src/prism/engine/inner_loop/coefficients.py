"""What a mini-batch does to the weights, in numbers: gradients enter every equation linearly, so their weights can be
found before the gradients are.

With J examples (the b tokens, preceded by c - 1 earlier ones if there is a window), incoming weights W and U, gradients g_j:

    U_i = inherit_i U + Σ_j accumulate_ij g_j          W_i = keep_i W - Σ_s apply_is P(U_s)

and without P, W_i = keep_i W - carry_i U - Σ_j write_ij g_j with write = apply · accumulate, carry = apply · inherit. Here W is
what the last token read, for `Averaged` the weights at the start of the mini-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prism.engine.decay import HeadDecay
from prism.engine.inner_loop.layout import Layout
from prism.engine.inner_loop.update import Averaged, InnerUpdate


class Coefficients(NamedTuple):
    """`…` stands for `N, B, H`; None is 1 for `keep`, and no incoming U for `inherit` and `carry`."""

    keep: Tensor | None  # [..., b, 1]
    inherit: Tensor | None  # [..., b, 1]
    accumulate: Tensor  # [..., b, J]
    apply: Tensor  # [..., b, b]
    carry: Tensor | None  # [..., b, 1]
    write: Tensor  # [..., b, J]


def coefficients(u: InnerUpdate, layout: Layout, rate: Tensor) -> Coefficients:
    """`rate` `[N, B, H, J]`."""
    b, learner = u.mini_batch, u.learner
    eye = torch.eye(b, dtype=rate.dtype, device=rate.device)
    if isinstance(learner, Averaged):
        sums = eye.new_ones(b, b).tril() * rate.unsqueeze(-2)
        scale = learner.scale.unsqueeze(-1)
        return Coefficients(None, eye.new_ones(b, 1), sums, eye * scale, scale, scale * sums)

    left, inherit = _products(layout, learner.log_momentum)
    seen = (eye if left is None else left) if u.window == 1 else _windowed(left, _window(u, layout))
    accumulate = seen * rate.unsqueeze(-2)
    kept, keep = _products(layout, learner.log_decay)
    apply = eye.new_ones(b, b).tril() if kept is None else kept
    # Empty slots take no step: their U is not zero.
    apply = apply * (_occupied(u, layout) if learner.step is None else layout.lay(learner.step)).unsqueeze(-2)
    carry = None if inherit is None else apply @ inherit
    return Coefficients(keep, inherit, accumulate, apply, carry, apply @ accumulate)


def _products(layout: Layout, log: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Π_{j<m≤i} of a gate, `[…, b, b]`, and Π_{m≤i} `[…, b, 1]`; None for no gate."""
    if log is None:
        return None, None
    decay = HeadDecay(layout.lay(log), None)
    return decay.weights(strict=False, before=False), decay.inclusive.to(decay.dtype).exp().unsqueeze(-1)


def _occupied(u: InnerUpdate, layout: Layout) -> Tensor:
    """`[N, B, 1, b]`, 1 where a slot holds a token."""
    return layout.lay(u.rate.new_ones(u.batch, u.tokens, 1))


def _window(u: InnerUpdate, layout: Layout) -> Tensor:
    """`[N, B, 1, b, J]`, 1 where example j is among the c that token i looks at."""
    place = torch.arange(u.mini_batch, device=u.q.device).expand(1, 1, -1)
    if layout.origin is not None:  # tokens are counted from the first that this call brings
        place = place - layout.origin.unsqueeze(-1)
    earlier = torch.arange(1 - u.window, 0, device=u.q.device).expand(*place.shape[:2], -1)
    age = place.unsqueeze(-1) - torch.cat([earlier, place], -1).unsqueeze(-2)
    inside = ((age >= 0) & (age < u.window)).unsqueeze(2)
    return inside * _occupied(u, layout).unsqueeze(-1)


def _windowed(left: Tensor | None, window: Tensor) -> Tensor:
    return window if left is None else left @ window
