"""Line and bar charts as inline SVG. Colours come from the style sheet of page.py and follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 14, 44
MOST_POINTS = 400
"""Longer curves are thinned: more points than pixels only make the file larger."""
MOST_MARKERS = 40
COLORS = 8
"""Number of colours that the style sheet has."""

Format = Callable[[float], str]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Series:
    """One curve: its name, its points (x, y) in order, and optionally the range (low, high) of each value."""

    name: str
    points: Sequence[tuple[float, float]]
    ranges: Sequence[tuple[float, float]] = ()


def short(value: float) -> str:
    """12000 as "12k", 0.25 as it is."""
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def percent(value: float) -> str:
    return f"{100 * value:g}%"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    x_from: float | None = None,
    y_limits: tuple[float, float] | None = None,
    x_labels: Sequence[str] = (),
    y_format: Format = short,
    error_bars: bool = False,
    own_legend: bool = False,
) -> str:
    """A panel with one curve for each series.

    Args:
        x, y: labels of the axes.
        x_from: start of the x axis. None: the first point.
        y_limits: range of the y axis. None: the range of the values.
        x_labels: names of the positions 0, 1, … for an axis of categories.
        error_bars: draw ranges as bars instead of bands.
        own_legend: put a legend into the panel.
    """
    series = [_finite(one) for one in series]
    points = [point for one in series for point in one.points]
    values = [value for _, value in points] + [value for one in series for ends in one.ranges for value in ends]
    x_low, x_high = _limits([place for place, _ in points])
    x_low = x_low if x_from is None else x_from
    if x_labels:
        x_low, x_high = -0.5, len(x_labels) - 0.5
    y_ticks = _ticks(*(_limits(values) if y_limits is None else y_limits))
    y_low, y_high = (min(y_ticks[0], *values), max(y_ticks[-1], *values)) if y_limits is None else y_limits
    to_x, to_y = _scale(x_low, x_high, LEFT, WIDTH - RIGHT), _scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    places = list(enumerate(x_labels)) if x_labels else [(value, short(value)) for value in _ticks(x_low, x_high)]
    parts = [
        _y_axis(y_ticks, to_y, y_format),
        _x_axis([(to_x(at), label) for at, label in places if x_low <= at <= x_high]),
    ]
    for color, one in enumerate(series):
        parts.append(f'<g class="s{color % COLORS}">{_curve(one, color, to_x, to_y, y_format, error_bars)}</g>')
    return _panel(title, x, y, parts, legend([one.name for one in series]) if own_legend else "")


def bar_chart(
    title: str,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    x: str,
    y: str,
    y_format: Format = short,
) -> str:
    """A panel with a bar for each series in each group; bars start at 0."""
    y_ticks = _ticks(0, max((value for _, values in series for value in values), default=1) or 1)
    top = max(y_ticks[-1], *(value for _, values in series for value in values))
    to_x, to_y = _scale(-0.5, len(groups) - 0.5, LEFT, WIDTH - RIGHT), _scale(0, top, HEIGHT - BOTTOM, TOP)
    width = (to_x(1) - to_x(0)) * 0.76 / max(1, len(series))
    parts = [_y_axis(y_ticks, to_y, y_format), _x_axis([(to_x(at), label) for at, label in enumerate(groups)])]
    for color, (name, values) in enumerate(series):
        bars = []
        for place, value in enumerate(values):
            start = to_x(place) + (color - len(series) / 2) * width
            height = to_y(0) - to_y(value)
            tip = f"<title>{escape(f'{name}, {groups[place]}: {y_format(round(value, 4))}')}</title>"
            size = f'width="{width - 1.5:.1f}" height="{height:.1f}" rx="1.5"'
            bars.append(f'<rect x="{start:.1f}" y="{to_y(value):.1f}" {size} fill="currentColor">{tip}</rect>')
        parts.append(f'<g class="s{color % COLORS}">{"".join(bars)}</g>')
    return _panel(title, x, y, parts)


def legend(names: Sequence[str]) -> str:
    """The names of all series, each with its mark, as HTML."""
    marks = [
        f'<svg viewBox="0 0 14 14" class="s{n % COLORS}" aria-hidden="true">{_marker(n, 7, 7)}</svg>'
        for n in range(len(names))
    ]
    items = "".join(f"<li>{mark}{escape(name)}</li>" for mark, name in zip(marks, names, strict=True))
    return f'<ul class="legend">{items}</ul>'


def _finite(one: Series) -> Series:
    """The series without points whose value is NaN or infinite, such as the loss of a diverged run."""
    kept = [place for place, (_, y) in enumerate(one.points) if math.isfinite(y)]
    ranges = [one.ranges[place] for place in kept] if one.ranges else ()
    return Series(one.name, [one.points[place] for place in kept], ranges)


def _panel(title: str, x: str, y: str, parts: Sequence[str], key: str = "") -> str:
    head = f'<p class="title">{escape(title)} <span>{escape(y)}</span></p>'
    label = f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>'
    about = escape(f"{title}: {y} by {x}")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">{"".join(parts)}{label}</svg>'
    return f'<div class="panel">{head}{key}{svg}</div>'


def _curve(one: Series, color: int, to_x: Scale, to_y: Scale, y_format: Format, error_bars: bool) -> str:
    if not one.points:
        return ""
    stride = -(-len(one.points) // MOST_POINTS)
    points = [*one.points[::stride], *one.points[-1:]] if stride > 1 else one.points
    parts = []
    if one.ranges and error_bars:
        ends = [(to_x(x), to_y(low), to_y(high)) for (x, _), (low, high) in zip(one.points, one.ranges, strict=True)]
        bars = "".join(
            f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8" for x, low, high in ends
        )
        parts.append(f'<path d="{bars}" class="error"/>')
    elif any(low != high for low, high in one.ranges):
        above = [(x, high) for (x, _), (_, high) in zip(one.points, one.ranges, strict=True)]
        below = [(x, low) for (x, _), (low, _) in zip(one.points, one.ranges, strict=True)]
        parts.append(f'<path d="{_path([*above, *reversed(below)], to_x, to_y)}Z" class="band"/>')
    parts.append(f'<path d="{_path(points, to_x, to_y)}" class="curve"/>')
    if len(points) <= MOST_MARKERS:
        for x, y in points:
            parts.append(_marker(color, to_x(x), to_y(y), f"{one.name}: {y_format(round(y, 4))}"))
    return "".join(parts)


def _marker(color: int, x: float, y: float, tip: str = "") -> str:
    """A circle, a square or a diamond, so that series differ without colours."""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    if color % 3 == 0:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4">{inside}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if color % 3 == 2 else ""
    return f'<rect class="mark" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"{turn}>{inside}</rect>'


def _y_axis(ticks: Sequence[float], to_y: Scale, y_format: Format) -> str:
    lines = "".join(f'<path class="grid" d="M{LEFT} {to_y(value):.1f}H{WIDTH - RIGHT}"/>' for value in ticks)
    texts = "".join(
        f'<text x="{LEFT - 8}" y="{to_y(v) + 4.5:.1f}" text-anchor="end">{escape(y_format(v))}</text>' for v in ticks
    )
    return lines + texts


def _x_axis(places: Sequence[tuple[float, str]]) -> str:
    base = HEIGHT - BOTTOM
    crowded = 7.5 * max((len(label) for _, label in places), default=0) * len(places) > WIDTH - LEFT
    parts = [f'<path class="axis" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>']
    for x, label in places:
        turned = (
            f' text-anchor="end" transform="rotate(-28 {x:.1f} {base + 14})"' if crowded else ' text-anchor="middle"'
        )
        parts.append(f'<text x="{x:.1f}" y="{base + 18}"{turned}>{escape(label)}</text>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], to_x: Scale, to_y: Scale) -> str:
    return "M" + "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in points)


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
