"""The last c - 1 examples before a token, which ATLAS looks at again: never those of another document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.inner_loop.layout import Layout, take
from prism.engine.inner_loop.update import InnerUpdate

Examples = tuple[Tensor, Tensor, Tensor]  # k, v, rate


def earlier_examples(u: InnerUpdate, layout: Layout, window: tuple[Tensor, ...]) -> tuple[Examples, Examples]:
    """Those before each mini-batch, `[N, B, H, c - 1, …]`, and those before what follows, `[B, c - 1, H, …]`."""
    count = u.window - 1
    k, v, rate = (torch.cat([old, new], 1) for old, new in zip(window, (u.k, u.v, u.rate), strict=True))
    real = torch.full((u.batch,), u.tokens, device=u.q.device) if u.mask is None else u.mask.sum(1)
    last = real[:, None] + torch.arange(count, device=u.q.device)
    shared, kept = layout.before(rate, count), take(rate, last)
    if u.reset is not None and layout.first is not None:  # an example of another document weighs nothing
        document = F.pad(u.reset.long().cumsum(1), (count, 0))
        own = document.gather(1, layout.first.T + count).T  # of each mini-batch's first token
        shared = torch.where(layout.before(document.unsqueeze(-1), count) == own[..., None, None], shared, 0.0)
        final = document.gather(1, last)
        kept = torch.where((final == final[:, -1:]).unsqueeze(-1), kept, 0.0)
    before = (layout.before(k, count), layout.before(v, count), shared)
    return before, (take(k, last), take(v, last), kept)
