"""What the kernels of a memory are given, and what the first of them prepares for the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from prism.engine.kernels.configurations import Configuration, configuration


@dataclass(frozen=True)
class Columns:
    """What a memory is told, as the kernels read it: J columns a token, contiguous, one dtype; gates in float32.

    An erase looks up `erase_key`, or column 0's own key if that is None, and feeds column 0 with `strength` (None: 1).
    K and V are powers of two ≥ 16.
    """

    q: Tensor  # [B, T, H, K]
    x: Tensor  # [B, T, H, J, K]
    w: Tensor  # [B, T, H, J, V]
    log_decay: Tensor | None  # [B, T, H]
    erase_key: Tensor | None  # [B, T, H, K]
    strength: Tensor | None  # [B, T, H]
    documents: Tensor | None  # [B, T] int32, numbered from 0 (the one the state belongs to)

    @property
    def erases(self) -> bool:
        return self.strength is not None or self.erase_key is not None

    @property
    def configuration(self) -> Configuration:
        return configuration(self.q.shape[3], self.w.shape[4], self.w.shape[3], self.w.dtype, self.w.device)


@dataclass(frozen=True)
class Prepared:
    """What depends on the inputs alone. `padded` is T in whole chunks."""

    cumulated: Tensor | None  # G, [B, H, padded]
    strengths: Tensor | None  # β, [B, H, padded]
    grams: Tensor  # [B, H, padded / step, J or 2J, step, step]
    inverse: Tensor | None  # T⁻¹, [B, H, padded / step, step, step]
    maps: Tensor | None = None  # what each segment does to the state it is given, [segments, B, H, K, K]
