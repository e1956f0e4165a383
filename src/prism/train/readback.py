"""Read a training step's numbers from the device without keeping it waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def decides_on_device(device: torch.device) -> bool:
    """Whether the device decides to skip a step and the host reads its numbers one step later.

    On a GPU reading a number waits for all work queued before it, so it is put off until the next step is queued. On the
    CPU nothing is queued: each step is read at once.
    """
    return device.type == "cuda"


class HostCopy:
    """A copy of a device's numbers in host memory, which arrives when the device has computed them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers. Waits for them, but not for work queued after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._numbers.tolist()
        return values
