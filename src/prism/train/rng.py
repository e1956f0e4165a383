"""Random state as plain tensors, so that it is saved like everything else."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)


def capture() -> dict[str, Tensor]:
    """The state of torch's generators (CPU, and the current GPU if one is in use) and of Python's."""
    version, words, _ = random.getstate()
    assert version == 3
    state = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
