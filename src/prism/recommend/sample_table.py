"""Histories as training samples, padded once and kept where they are needed: a batch is then one gather."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from prism.recommend.events import RecBatch, Samples
from prism.train.order import Order

LIMIT = 2 << 30
"""Bytes of samples above which each batch is made when it is asked for."""


class SampleTable:
    """Samples of the endless order.

    Args:
        gaps: whether batches say how long after the one before it each event came.
    """

    def __init__(self, samples: Samples, seed: int, gaps: bool, limit: int = LIMIT) -> None:
        self.samples, self.gaps = samples, gaps
        self.order = Order(len(samples), seed)
        a_sample = samples.width * (8 + 8 + 1 + (4 if gaps else 0)) + 8
        self.fits = len(samples) * a_sample <= limit
        self._held: RecBatch | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def targets(self, numbers: np.ndarray) -> int:
        return self.samples.targets(self.order(numbers))

    def batch(self, numbers: np.ndarray, device: torch.device) -> RecBatch:
        rows = self.order(numbers)
        if not self.fits:
            return self._make(rows)
        if self._held is None:
            self._held = self._make(np.arange(len(self))).to(device)
        return self._held[torch.from_numpy(rows).to(device, non_blocking=True)]

    def _make(self, rows: np.ndarray) -> RecBatch:
        batch = self.samples.batch(rows)
        return batch if self.gaps else replace(batch, gaps=None)
