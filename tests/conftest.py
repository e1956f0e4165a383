"""Settings every test shares: one thread (tests run side by side) and reproducible, unhurried hypothesis examples."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

if os.environ.get("PRISM_TEST_GPU") != "1":  # alike on every machine: no command takes a GPU, kernels are interpreted
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

ON_GPU = os.environ.get("PRISM_TEST_GPU") == "1"
if ON_GPU and not torch.cuda.is_available():
    raise pytest.UsageError("PRISM_TEST_GPU=1, but torch finds no GPU")

_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, database=None, **_UNTIMED)
hypothesis.settings.register_profile("search", max_examples=500, database=None, print_blob=True, **_UNTIMED)
# HYPOTHESIS_PROFILE=search looks for new counterexamples; the default always tries the same ones.
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("on a GPU, with PRISM_TEST_GPU=1 (`make test-gpu`)")


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    if "triton.runtime.interpreter" in sys.modules and not ON_GPU:  # some test that was collected may start kernels
        from tests.interpreter import make_quick

        make_quick()


@pytest.fixture(autouse=True)
def _usual_signals() -> Iterator[None]:
    """Signals arrive, also where the shell ignores them for its children (nohup, `&` in a script)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    inherited = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in inherited.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
