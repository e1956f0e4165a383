"""A checkpoint holds the random state of what the run uses: a GPU's only if the run is on one."""

from __future__ import annotations

import random

import pytest
import torch

from prism.train import tensors as rng

CPU = torch.device("cpu")


def test_what_is_drawn_next_is_drawn_again() -> None:
    rng.seed(3)
    state = rng.capture(CPU)
    first = torch.rand(3), random.random()
    rng.restore(state, CPU)
    assert torch.equal(torch.rand(3), first[0]) and random.random() == first[1]


def test_a_run_on_a_cpu_leaves_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that resumes from a GPU's checkpoint, and where something else uses a GPU."""

    def touched(*arguments: object) -> None:
        raise AssertionError("a GPU was asked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)
    monkeypatch.setattr(torch.cuda, "set_rng_state", touched)
    state = rng.capture(CPU)
    assert "cuda" not in state
    rng.restore({**state, "cuda": torch.zeros(16, dtype=torch.uint8)}, CPU)


def test_a_run_on_a_gpu_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    there, kept = torch.device("cuda", 1), torch.arange(16, dtype=torch.uint8)
    restored = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: kept if device == there else None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((state, device)))
    state = rng.capture(there)
    rng.restore(state, there)
    assert restored == [(kept, there)]
    rng.restore(rng.capture(CPU), there)  # from a checkpoint of a CPU
    assert len(restored) == 1
