"""Refuse a plan that no training could follow, before any is started: each mistake is one sentence that names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from prism.compare.entries import Budget, PlanSettings
from prism.messages import did_you_mean
from prism.overrides import override
from prism.probes.batches import Curriculum

TASK_KEYS = ("task", "label", "options", "tests", "curriculum", "budget", "learning_rate")
_TABLES = ("options", "tests", "curriculum", "budget", "learning_rate")
_LEAST = {"hidden": 0, "positions": 0}
"""The smallest values of the budget's whole numbers where that is not 1."""


def check_settings(settings: PlanSettings, where: str) -> None:
    """Refuse values that make no comparison, or no training."""
    rates = settings.learning_rate
    _check_budget(settings.budget, where)
    for name, number in {"jobs": settings.jobs, "learning_rate.steps": rates.steps}.items():
        if number is not None and number < 1:
            raise ValueError(f"{where}: {name} must be at least 1, got {number}")
    for name, found in {
        "seeds": settings.seeds,
        "learning_rate.seeds": rates.seeds,
        "learning_rate.values": rates.values,
        "budget.key_dim": settings.budget.key_dim,
    }.items():
        if not found or len(set(found)) < len(found):
            raise ValueError(f"{where}: {name} must be a list of one or more different numbers, got {list(found)}")
    if len(rates.values) > 1 and set(settings.seeds) & set(rates.seeds):
        raise ValueError(
            f"{where}: learning_rate.seeds must not contain a final seed, got {sorted(set(settings.seeds) & set(rates.seeds))}"
        )
    for rate in rates.values:
        if not 0 < rate < math.inf:
            raise ValueError(f"{where}: learning_rate.values must be above 0, got {rate:g}")


def _check_budget(budget: Budget, where: str) -> None:
    if (budget.steps is None) == (budget.tokens is None):
        raise ValueError(f"{where}: budget must have either steps or tokens")
    for name, value in vars(budget).items():
        least = _LEAST.get(name, 1)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool) and number < least:
                raise ValueError(f"{where}: budget.{name} must be at least {least}, got {number}")
    if not 0 < budget.clip < math.inf:
        raise ValueError(f"{where}: budget.clip must be above 0, got {budget.clip:g}")
    if not 0 <= budget.weight_decay < math.inf:
        raise ValueError(f"{where}: budget.weight_decay must be at least 0, got {budget.weight_decay:g}")
    if not 0 <= budget.warmup < 1:
        raise ValueError(f"{where}: budget.warmup must be at least 0 and below 1, got {budget.warmup:g}")
    if budget.stop_at is not None and not math.isfinite(budget.stop_at):
        raise ValueError(f"{where}: budget.stop_at must be a finite number, got {budget.stop_at:g}")


def check_device(name: str, where: str) -> None:
    """Refuse a name that is no device. Whether this machine has it matters only when a training starts."""
    try:
        torch.device("cpu" if name == "auto" else name)
    except RuntimeError:  # torch knows no such name
        raise ValueError(f"{where}: device must be auto, cpu, cuda or a GPU such as cuda:1, got {name!r}") from None


def check_table(table: Mapping[str, Any], prefix: str, where: str) -> None:
    """Refuse a table of `tasks` with wrong keys, or values of another type than the key has."""
    for key in table:
        if key not in TASK_KEYS:
            raise ValueError(f"{where} has a setting {prefix}{key} that does not exist{did_you_mean(key, TASK_KEYS)}")
    if not isinstance(table.get("task"), str):
        raise ValueError(f"{where}: {prefix}task must be the name of a task, got {table.get('task')!r}")
    if not isinstance(table.get("label", ""), str):
        raise ValueError(f"{where}: {prefix}label must be a text, got {table['label']!r}")
    for key in _TABLES:
        if not isinstance(table.get(key, {}), dict):
            raise ValueError(f"{where}: {prefix}{key} must be a table, got {table[key]!r}")
    for label, options in table.get("tests", {}).items():
        if not isinstance(options, dict):
            raise ValueError(f"{where}: {prefix}tests.{label} must be a table of options, got {options!r}")
    if "curriculum" in table:
        override(Curriculum("", 1), table["curriculum"], where, f"{prefix}curriculum.")
        if not {"option", "start"} <= set(table["curriculum"]):
            raise ValueError(f"{where}: {prefix}curriculum must have option and start, got {table['curriculum']!r}")
