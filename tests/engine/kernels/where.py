"""The device on which kernels run, and the mark of tests that start kernels."""

from __future__ import annotations

import pytest
import torch

from prism.engine.kernels import available

DEVICE = "cpu" if available.INTERPRETED else "cuda"
CAN_START = available.PROBLEM is None and (DEVICE == "cpu" or torch.cuda.is_available())

needs_kernels = (
    pytest.mark.skipif(not CAN_START, reason=f"the backend 'triton' {available.PROBLEM}")
    if DEVICE == "cpu"
    else pytest.mark.gpu
)
"""They run in Triton's interpreter or, with `-m gpu`, on a GPU (tests/conftest.py chooses)."""
