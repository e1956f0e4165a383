"""The parts of a plan: the budget, the search for a learning rate, and entries, each of which is a set of trainings.

Values that no training could follow are refused before any is started: each mistake is one sentence that names its key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from prism.lab.grid import Training
from prism.lab.tasks.batches import Curriculum
from prism.messages import did_you_mean
from prism.overrides import override

TASK_KEYS = ("task", "label", "options", "tests", "curriculum", "budget", "learning_rate")
_TABLES = ("options", "tests", "curriculum", "budget", "learning_rate")
_LEAST = {"hidden": 0, "positions": 0}
"""The smallest values of the budget's whole numbers where that is not 1."""


@dataclass(frozen=True)
class Budget:
    """What every rule may spend."""

    steps: int | None = None
    """Training steps; or `tokens`."""
    tokens: int | None = None
    """Tokens to train on, from which the steps follow; or `steps`."""
    batch: int = 32
    """Sequences in a step."""
    layers: int = 1
    width: int = 64
    heads: int = 1
    key_dim: tuple[int, ...] = (16,)
    """Key widths of a head, a number or a list: the state size is heads · key width · value width · layers."""
    value_dim: int | None = None
    """Value width of a head. By default width / heads."""
    conv: int = 4
    """Tokens that a short convolution spans; 1 means none. On synthetic tasks it is in front of every mixer and rules run
    without their own; in language models it is the rules' own."""
    hidden: int = 0
    """Width of the SwiGLU after every mixer; 0 means none."""
    positions: int = 0
    """Number of learned absolute positions (synthetic tasks); 0 means none."""
    match: Literal["none", "parameters"] = "none"
    """`parameters`: every rule gets the reference's number of parameters within 1 %, by the width of the SwiGLU, or without
    one, of the model."""
    equal_state: bool = True
    """Whether a rule is refused if its state size differs from the reference's. Caches, which grow, are exempt."""
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    evaluations: int = 10
    """Times that a model is judged on the split validation."""
    validation_sequences: int = 512
    test_sequences: int = 1024
    stop_at: float | None = None
    """Stop a run when its score on validation reaches this (synthetic tasks)."""

    def steps_for(self, length: int) -> int:
        """Training steps for sequences of `length` tokens."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return max(1, round(self.tokens / (length * self.batch)))


@dataclass(frozen=True)
class Rates:
    """The search for a learning rate."""

    values: tuple[float, ...] = (1e-2,)
    """Peak learning rates to try; a single one is not searched."""
    seeds: tuple[int, ...] = (1000,)
    """Seeds of the search. None of them may be a final seed."""
    steps: int | None = None
    """Steps of a run of the search. By default those of the budget."""


@dataclass(frozen=True)
class PlanSettings:
    """The keys of a plan, apart from `rules` and `tasks`."""

    title: str = "Comparison of rules"
    reference: str | None = None
    """The rule that others are compared with. By default the first."""
    seeds: tuple[int, ...] = (0,)
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    jobs: int | None = None
    """Trainings side by side. By default one per core, or four on a GPU."""
    imports: tuple[str, ...] = ()
    """Modules that register rules of one's own, as by `--import`."""
    budget: Budget = field(default_factory=Budget)
    learning_rate: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class Entry:
    """One task, one rule and one size: searched for a learning rate, then trained with every seed."""

    task: str
    rule: str
    """Their labels."""
    function: str
    settings: dict[str, Any]
    """Settings of a training, without `steps`, `seed`, `learning_rate` and `test`."""
    steps: int
    seeds: tuple[int, ...]
    rates: Rates
    parameters: int
    state_size: int
    grows: bool = False
    """Whether the state grows with the sequence; `state_size` is then that of one token."""
    size: int = 0
    """Place in the budget's list of key widths: rules are compared at the same place."""
    data: str = ""
    """A hash of the prepared tokens, on text: settings have only the folder's name."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Options of the rule that the plan leaves as they are: settings, and so keys, have only those it gives."""

    @property
    def name(self) -> str:
        return f"{self.task}, {self.rule}, state {self.state_size:,}"

    def search(self) -> list[Training]:
        """The trainings that choose the learning rate; none if there is only one."""
        if len(self.rates.values) < 2:
            return []
        return [self._training("search", rate, seed) for rate in self.rates.values for seed in self.rates.seeds]

    def final(self, rate: float) -> list[Training]:
        """The trainings with the chosen learning rate."""
        return [self._training("final", rate, seed) for seed in self.seeds]

    def trainings(self) -> list[Training]:
        """The search, and the final trainings at every learning rate."""
        return [*self.search(), *(training for rate in self.rates.values for training in self.final(rate))]

    def _training(self, phase: str, rate: float, seed: int) -> Training:
        steps = self.rates.steps if phase == "search" and self.rates.steps is not None else self.steps
        changes = {"steps": steps, "learning_rate": rate, "seed": seed, "test": phase == "final"}
        about = {"task": self.task, "rule": self.rule, "state_size": self.state_size, "phase": phase}
        if self.defaults:
            about["defaults"] = self.defaults
        name = f"{self.name}, rate {rate:g}, seed {seed}"
        return Training(
            self.function, {**self.settings, **changes}, {**about, "seed": seed, "learning_rate": rate}, name, steps
        )


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
