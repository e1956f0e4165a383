"""The learning rate as a function of the step alone: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from prism.train.settings import ScheduleSettings


def lr_factor(step: int, steps: int, schedule: ScheduleSettings) -> float:
    """What the learning rate is multiplied by in step 1 … `steps`."""
    warmup = min(schedule.warmup, steps)
    if step <= warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        done = (step - warmup) / (steps - warmup)
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2
    decaying = min(round(steps * schedule.decay), steps - warmup)
    plateau_end = steps - decaying
    if step <= plateau_end:
        return 1.0
    return 1 - (1 - schedule.final) * (step - plateau_end) / decaying
