"""Settings every test shares: one thread (tests run side by side) and reproducible, unhurried hypothesis examples."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # kernels are tested all the same; Triton reads this once, when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest

torch.set_num_threads(1)

_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, database=None, **_UNTIMED)
hypothesis.settings.register_profile("search", max_examples=500, database=None, print_blob=True, **_UNTIMED)
# HYPOTHESIS_PROFILE=search looks for new counterexamples; the default always tries the same ones.
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
