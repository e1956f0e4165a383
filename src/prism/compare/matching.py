"""Give every rule the same number of parameters, without changing its memory.

With a SwiGLU, its width is changed. Without one, the width of the model (the residual stream and every map from or to it) is
changed, while heads, key width and value width stay. Either way the state keeps its size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from prism.probes.model import ModelSettings, ProbeModel
from prism.probes.task import Task

TOLERANCE = 0.01
"""Largest relative difference between the numbers of parameters."""
_STEPS = (16, 8, 4, 2, 1)
"""Widths are multiples of the first of these that comes close enough: round widths are fast."""


def sizes(task: Task, settings: ModelSettings) -> tuple[int, int]:
    """The number of parameters of a model, and its state size."""
    with torch.device("meta"):
        model = ProbeModel(task, settings)
    return model.parameter_count, model.state_size


def matched(task: Task, settings: ModelSettings, target: int) -> ModelSettings:
    """The settings with another width of the SwiGLU, or of the model, so that there are about `target` parameters."""
    name = "hidden" if settings.hidden else "width"
    if settings.value_dim is None:  # the state must not follow the width
        settings = replace(settings, value_dim=max(1, settings.width // settings.heads))
    try:
        found = closest(lambda value: sizes(task, replace(settings, **{name: value}))[0], target)
    except ValueError as error:
        raise ValueError(
            f"rule {settings.rule!r} cannot have {target:,} parameters ± {TOLERANCE:.0%} by changing {name}: {error}; "
            'omit the rule, give it other options, or set budget.match = "none"'
        ) from error
    return replace(settings, **{name: found})


def closest(count: Callable[[int], int], target: int) -> int:
    """The roundest value ≥ 1 whose count is within the tolerance of the target; `count` must not decrease."""
    low, high = 1, 2
    while count(high) < target:
        low, high = high, 2 * high
    while high - low > 1:  # count(low) < target ≤ count(high), or low is 1
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < target else (low, middle)
    best = min((low, high), key=lambda value: abs(count(value) - target))
    for step in _STEPS:
        around = {step * max(1, best // step), step * (best // step + 1), step * max(1, round(best / step))}
        fit = {value: abs(count(value) - target) for value in around}
        found = min(fit, key=lambda value: fit[value])
        if fit[found] <= TOLERANCE * target:
            return found
    raise ValueError(f"the closest is {count(best):,}")
