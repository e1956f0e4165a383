"""The warning about threads that have no core to themselves."""

from __future__ import annotations

import pytest
import torch

from prism.train import threads


@pytest.mark.parametrize(
    ("count", "busy", "warned"), [(2, 1.0, True), (2, 0.1, False), (1, 2.0, False), (4, 0.0, False)]
)
def test_it_is_said_once_where_cores_are_busy(
    count: int, busy: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_said", False)
    monkeypatch.setattr(threads, "busy_cores", lambda: busy)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: max(2, count))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    said: list[str] = []
    for _ in range(2):
        threads.warn_if_crowded(said.append)
    assert len(said) == warned
    assert all("OMP_NUM_THREADS=1" in line and "about 1 of 2 cores" in line and "\n" not in line for line in said)


def test_busy_cores_are_counted_from_the_system_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(1000, 500), (1040, 510)])
    monkeypatch.setattr(threads, "_ticks", lambda: next(readings))
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    assert threads.busy_cores() == 3.0


def test_without_a_clock_the_load_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_ticks", lambda: None)
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (1.5, 0.0, 0.0), raising=False)
    assert threads.busy_cores() == 1.5
