"""Random state as plain tensors, so that it is saved like everything else."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)


def capture(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators (the CPU's, and that of a GPU which the run is on) and of Python's."""
    version, words, _ = random.getstate()
    assert version == 3
    state = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Tensor], device: torch.device) -> None:
    """A run may go on where there is no GPU, or come from there."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), None))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
