"""Training samples: windows of a token stream, in the order that order.py computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prism.data.tokens import Stream
from prism.documents import document_starts, needed_starts
from prism.train.order import windows_of


@dataclass(frozen=True)
class Batch:
    """inputs and targets `[B, T]` int64 (targets are the next tokens); reset `[B, T]` bool or None: a document starts."""

    inputs: Tensor
    targets: Tensor
    reset: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        held = {"inputs": self.inputs, "targets": self.targets, "reset": self.reset}
        return {name: value for name, value in held.items() if value is not None}

    def __getitem__(self, rows: slice) -> Batch:
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device) -> Batch:
        """Copy to a device. A reset that changes nothing is dropped first: on the CPU, looking costs no waiting."""
        needed = None if self.reset is None else needed_starts(self.reset, fresh=True)
        return replace(self, reset=needed)._map(lambda x: x.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        reset = None if self.reset is None else function(self.reset)
        return Batch(function(self.inputs), function(self.targets), reset)


class Windows:
    """A stream cut into windows of `context` tokens, each with the token after it.

    Args:
        end: the end token. With it, batches say where documents start (see `prism.documents`).
    """

    def __init__(self, stream: Stream, context: int, end: int | None = None) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1 token, got {context}")
        if len(stream) < context + 1:
            raise ValueError(
                f"the data has {len(stream)} tokens, too few for a context of {context} and the token after it"
            )
        self.stream, self.context, self.end = stream, context, end

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.context

    def samples(self, samples: np.ndarray, seed: int) -> Batch:
        """Samples i, j, … of the endless training order."""
        return self.windows(windows_of(samples, len(self), seed))

    def windows(self, windows: np.ndarray) -> Batch:
        """These windows, in this order."""
        starts = np.asarray(windows) * self.context
        tokens = torch.from_numpy(np.stack([self.stream.read(s, s + self.context + 1) for s in starts.tolist()]))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        reset = None if self.end is None else document_starts(inputs, self.end)
        return Batch(inputs, targets, reset)
