"""Kernels are tested where they can run: on a GPU, or else in Triton's interpreter. Tensors are made there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.kernels.where import DEVICE


@pytest.fixture(autouse=True)
def _made_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE != "cpu":
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # what they are compared with is exact
        torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
