"""Where the kernels run, and the mark of tests that start them."""

from __future__ import annotations

import pytest
import torch

from prism.engine.kernels import available

STARTED = available.PROBLEM is None and (available.INTERPRETED or torch.cuda.is_available())
DEVICE = "cuda" if STARTED and not available.INTERPRETED else "cpu"

needs_kernels = pytest.mark.skipif(not STARTED, reason="needs Triton's interpreter or a GPU")
