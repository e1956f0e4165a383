"""The device on which kernels run, and the mark of tests that start kernels."""

from __future__ import annotations

import pytest
import torch

from prism.engine.kernels import available

CAN_START = available.PROBLEM is None and (available.INTERPRETED or torch.cuda.is_available())
DEVICE = "cuda" if CAN_START and not available.INTERPRETED else "cpu"

needs_kernels = pytest.mark.skipif(not CAN_START, reason="needs Triton's interpreter or a GPU")
