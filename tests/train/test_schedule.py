"""The learning rate over the steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.train.settings import ScheduleSettings
from prism.train.step import lr_factor


def test_warm_up_is_linear_and_never_zero() -> None:
    schedule = ScheduleSettings(warmup=10)
    assert [lr_factor(step, 100, schedule) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_cosine_values() -> None:
    schedule = ScheduleSettings("cosine", warmup=20, final=0.1)
    assert [lr_factor(step, 100, schedule) for step in (20, 60, 100)] == pytest.approx([1.0, 0.55, 0.1])


def test_wsd_is_flat_and_then_straight() -> None:
    schedule = ScheduleSettings("wsd", warmup=10, final=0.0, decay=0.2)
    assert [lr_factor(step, 100, schedule) for step in (11, 50, 80, 90, 100)] == pytest.approx([1, 1, 1, 0.5, 0.0])


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    name=st.sampled_from(["cosine", "wsd", "constant"]),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_it_rises_then_falls_to_its_end(steps: int, warmup: int, name: str, final: float, decay: float) -> None:
    schedule = ScheduleSettings(name, warmup, final, decay)
    factors = [lr_factor(step, steps, schedule) for step in range(1, steps + 1)]
    peak = min(warmup, steps)
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    assert factors[:peak] == sorted(factors[:peak])
    assert all(a >= b - 1e-12 for a, b in zip(factors[peak:], factors[peak + 1 :], strict=False))
    if name == "cosine" and warmup < steps:
        assert factors[-1] == pytest.approx(final, abs=1e-9)
