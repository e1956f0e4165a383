"""Text of any length through a model in constant memory: a segment at a time, only the state is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from prism.documents import document_starts, needed_starts
from prism.models import PrismCache, PrismForCausalLM
from prism.models.replay import cache_for

SEGMENT = 2048


class Reader:
    """Where a model is in a text.

    Nothing is carried from one document to the next: the end token opens a new one (see `prism.documents`).

    Args:
        end: the end token.
        cache: the state to continue from.
        last: the last token that `cache` has read, kept for files that record it.
    """

    def __init__(
        self, model: PrismForCausalLM, end: int, cache: PrismCache | None = None, last: int | None = None
    ) -> None:
        self.model, self.end, self.last = model, end, last
        self.cache = cache_for(model) if cache is None else cache

    @torch.no_grad()
    def read(self, tokens: Tensor, keep: int = 0) -> Tensor:
        """Read tokens `[T]` in one pass; logits `[T, V]` of what follows each (or each of the last `keep`), float32."""
        reset = needed_starts(document_starts(tokens[None], self.end), fresh=not self.cache.states)
        out = self.model(
            tokens[None].to(self.model.device),
            past_key_values=self.cache,
            reset=None if reset is None else reset.to(self.model.device),
            logits_to_keep=keep,
            use_cache=True,
        )
        self.last = int(tokens[-1])
        logits: Tensor = out.logits[0]
        return logits.float()

    def read_all(self, tokens: Tensor, segment: int = SEGMENT) -> Tensor:
        """Read tokens `[T]` in segments; logits `[V]` of what follows the last."""
        for part in tokens.split(segment):
            logits = self.read(part, keep=1)
        return logits[-1]
