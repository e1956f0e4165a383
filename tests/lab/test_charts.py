"""Charts: round ticks, everything inside the picture, and names shown as they are."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.lab.charts import HEIGHT, MOST_POINTS, WIDTH, Series, _ticks, bar_chart, legend, line_chart

numbers = st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3))
points = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30).map(sorted)


@given(numbers, st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, width: float) -> None:
    high = low + width
    ticks = _ticks(low, high)
    steps = {round((after - before) / width, 6) for before, after in pairwise(ticks)}
    assert 2 <= len(ticks) <= 7
    assert all(low - width * 1e-6 <= tick <= high + width * 1e-6 for tick in ticks)
    assert len(steps) == 1 and 1 / 6 <= steps.pop() <= 0.5 + 1e-6


@settings(deadline=None)
@given(st.lists(points, min_size=1, max_size=4), st.booleans())
def test_every_mark_is_inside_the_picture(curves: list[list[tuple[float, float]]], error_bars: bool) -> None:
    series = [Series(f"{n}", curve, [(y - 1, y + 1) for _, y in curve]) for n, curve in enumerate(curves)]
    chart = line_chart("a title", series, x="x", y="y", error_bars=error_bars)
    tree = ElementTree.fromstring(chart)
    assert len(tree.findall(".//circle")) + len(tree.findall(".//rect")) == sum(map(len, curves))
    for mark in (*tree.iterfind(".//circle"), *tree.iterfind(".//rect")):
        x, y = float(mark.get("cx", mark.get("x", "nan"))), float(mark.get("cy", mark.get("y", "nan")))
        assert -4 <= x <= WIDTH and -4 <= y <= HEIGHT
    assert not re.search("nan|inf", chart)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.booleans())
def test_bars_are_as_high_as_their_values(values: list[float], two: bool) -> None:
    series = [("a", values), ("b", values[::-1])] if two else [("a", values)]
    bars = ElementTree.fromstring(bar_chart("t", [str(n) for n in range(len(values))], series, x="x", y="y"))
    heights = [float(bar.get("height", "nan")) for bar in bars.iterfind(".//g[@class='s0']/rect")]
    scale = max(heights) / max(values) if max(values) > 0 else 0.0
    assert heights == pytest.approx([value * scale for value in values], abs=0.15)


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    chart = line_chart("t", [Series("a", [(float(n), float(n)) for n in range(9999)])], x="x", y="y")
    places = re.findall(r"[ML]([\d.]+) [\d.]+", re.search(r'<path d="([^"]*)" class="curve"', chart)[1])  # type: ignore[index]
    assert MOST_POINTS / 2 < len(places) <= MOST_POINTS + 1
    assert float(places[-1]) == WIDTH - 14


@given(st.text(max_size=20).filter(lambda text: text.isprintable()))
def test_names_are_shown_as_they_are(name: str) -> None:
    chart = ElementTree.fromstring(line_chart(name, [Series(name, [(0.0, 1.0)])], x=name, y=name, own_legend=True))
    texts = ["".join(text.itertext()) for text in chart.iterfind(".//text")]
    assert name in texts
    assert "".join(ElementTree.fromstring(legend([name])).itertext()) == name


def test_values_that_are_not_finite_are_left_out() -> None:
    curve = [(0.0, 1.0), (1.0, float("nan")), (2.0, float("inf")), (3.0, 2.0)]
    chart = line_chart("t", [Series("a", curve), Series("none", [])], x="x", y="y")
    assert chart.count("<circle") == 2 and not re.search("nan|inf", chart)
