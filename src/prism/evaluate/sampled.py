"""Rankings among a few items instead of all: cheap, common, and not comparable with full ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """Others that a target is ranked among, instead of all items."""

    count: int
    by: Literal["uniform", "popularity"] = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"sampled must be at least 1 item, got {self.count}")
        if self.by not in ("uniform", "popularity"):
            raise ValueError(f"sampled items are drawn uniform or by popularity, got {self.by!r}")


def sampler(
    sampled: Sampled, num_items: int, popularity: np.ndarray | None
) -> Callable[[Tensor, Tensor, np.ndarray], Tensor]:
    """Keeps of the candidates the target and `count` others, drawn without replacement; a function of seed and row."""
    if sampled.count > num_items:
        raise ValueError(f"sampled must be at most the number of items, {num_items:,}, got {sampled.count:,}")
    weights = np.ones(num_items + 1)
    if sampled.by == "popularity":
        if popularity is None:
            raise ValueError("items sampled by popularity need the popularity of the items")
        weights = np.maximum(popularity, 1e-9).astype(np.float64)
    log_weights = torch.from_numpy(np.log(weights))

    def keep(taking_part: Tensor, wanted: Tensor, rows: np.ndarray) -> Tensor:
        # the largest of log-weights with Gumbel noise are a weighted draw without replacement
        noise = np.stack(
            [np.random.default_rng((sampled.seed, row)).gumbel(size=num_items + 1) for row in rows.tolist()]
        )
        keys = (log_weights + torch.from_numpy(noise)).to(taking_part.device)
        free = taking_part.scatter(1, wanted[:, None], False)
        keys = keys.masked_fill(~free, -torch.inf)
        drawn = keys.topk(sampled.count, dim=1).indices
        kept = torch.zeros_like(taking_part).scatter_(1, drawn, True) & free
        return kept.scatter_(1, wanted[:, None], True)

    return keep
