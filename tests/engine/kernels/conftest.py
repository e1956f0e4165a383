"""Create tensors where the kernels run: on a GPU, or on the CPU for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.kernels.where import DEVICE


@pytest.fixture(autouse=True)
def _default_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE != "cpu":
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the references are exact
        torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
