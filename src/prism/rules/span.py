"""Where a stretch of tokens begins and ends: padding, documents, and what must be remembered for the next stretch.

Rules never meet padding between tokens: the mixer moves real tokens to the front first, so row b has `lengths[b]` real
tokens followed by padding. A causal rule needs no more than that, except where it keeps the *last real* tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """T tokens of B rows. `mask` `[B, T]`: real tokens first, then padding. `reset` `[B, T]`: a document starts here.

    `shared` is a dict that one pass hands from layer to layer (RWKV-7's first value); None outside a stack.
    """

    mask: Tensor | None = None
    reset: Tensor | None = None
    shared: dict[str, Tensor] | None = None

    @property
    def lengths(self) -> Tensor | None:
        """`[B]`, the number of real tokens, or None if all are."""
        return None if self.mask is None else self.mask.sum(1)

    @property
    def documents(self) -> Tensor | None:
        """`[B, T]`, 0 for the document that began before this span, then 1, 2, …; None if there is only that one."""
        return None if self.reset is None else self.reset.long().cumsum(1)

    def last(self, rows: Tensor, count: int) -> Tensor:
        """The `count` rows up to the last real token. `rows` `[B, count + T, …]` begins with what came before the span."""
        if self.lengths is None:
            return rows[:, rows.shape[1] - count :]
        index = self.lengths[:, None] + torch.arange(count, device=rows.device)
        return rows.gather(1, index.reshape(*index.shape, *[1] * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:]))

    def positions(self, tokens: int, start: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's place in its document `[B, T]`, and the place `[B]` of the token after the last real one.

        `start` `[B]` is the place of the first token if no document starts in this span.
        """
        index = torch.arange(tokens, device=start.device).expand(start.shape[0], tokens)
        place = start[:, None] + index
        if self.reset is not None:
            began = torch.where(self.reset, index, -1).cummax(1).values
            place = torch.where(began >= 0, index - began, place)
        following = torch.cat([start[:, None], place + 1], 1)
        return place, self.last(following, 1)[:, 0]
