"""How well text is predicted: nats per token, perplexity, and bits per byte, which compares across tokenizers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    nats: float
    """Mean per token."""
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes_per_token
