"""Settings every test shares: one thread (tests run side by side) and reproducible, unhurried hypothesis examples."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, database=None, **_UNTIMED)
hypothesis.settings.register_profile("search", max_examples=500, database=None, print_blob=True, **_UNTIMED)
# HYPOTHESIS_PROFILE=search looks for new counterexamples; the default always tries the same ones.
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Choose where kernels run: on the GPU with `-m gpu`, else in Triton's interpreter, and then no test sees a GPU.

    Adds no option. It is the first hook of this file, so that the choice is made before anything imports Triton.
    """
    config = pluginmanager.get_plugin("pytestconfig")
    if not _selects_gpu(config.known_args_namespace.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _selects_gpu(expression: str) -> bool:
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and `-m gpu`")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """With `-m gpu`, skip files whose packages are not installed: machines with a GPU have few, and most files no such test.

    A conftest.py of a folder is not covered: it imports what is optional inside its fixtures.
    """
    report = yield
    absent = re.search(r"No module named '([\w.]+)'", str(report.longrepr)) if report.failed else None
    if absent and _selects_gpu(collector.config.option.markexpr) and absent[1].split(".")[0] not in ("prism", "tests"):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {absent[1]}")
    return report


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    # Some test that was collected may start kernels.
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import make_quick

        make_quick()


USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
if hasattr(signal, "SIGHUP"):
    USUAL[signal.SIGHUP] = signal.SIG_DFL
if threading.current_thread() is threading.main_thread():  # for children of fixtures that live longer than a test
    for number, handler in USUAL.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _usual_signals() -> Iterator[None]:
    """Signals arrive, also where the shell ignores them for its children (nohup, `&` in a script)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    inherited = {number: signal.signal(number, handler) for number, handler in USUAL.items()}
    yield
    for number, handler in inherited.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
