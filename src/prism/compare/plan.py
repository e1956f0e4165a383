"""The plan of a comparison: a TOML file becomes a list of entries (a task and a rule), and each entry trainings.

    rules = ["prism:steps=2", "gated_delta"]
    seeds = [0, 1, 2]

    [budget]
    steps = 600
    key_dim = 8

    [learning_rate]
    values = [3e-3, 1e-2]
    seeds = [100]

    [[tasks]]
    task = "mqar"
    options = { pairs = 8, length = 32 }

Every rule has the same budget and the same number of learning rates to try. Rates are compared on the split validation,
with seeds that are not among the final ones.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from prism import rules as registry
from prism.compare.grid import Training
from prism.compare.matching import TOLERANCE, matched, sizes
from prism.messages import did_you_mean
from prism.overrides import override, read_toml
from prism.probes.batches import Curriculum
from prism.probes.catalogue import build_task
from prism.probes.model import ModelSettings
from prism.probes.training import ProbeRun

PROBE = "prism.probes.training:probe_job"
_TASK_KEYS = ("task", "label", "options", "tests", "curriculum", "budget", "learning_rate")


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
    """Tokens that the convolution in front of every mixer spans; 1 means none."""
    hidden: int = 0
    """Width of the SwiGLU after every mixer; 0 means none."""
    positions: int = 0
    """Number of learned absolute positions; 0 means none."""
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
    """Stop a run when its score on validation reaches this."""


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
class _File:
    """The keys of a plan, apart from `rules` and `tasks`."""

    title: str = "Comparison of rules"
    reference: str | None = None
    """The rule that others are compared with. By default the first."""
    seeds: tuple[int, ...] = (0,)
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    jobs: int | None = None
    """Trainings side by side. By default one per core, or four on a GPU."""
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
    """Settings of a training, without `seed`, `learning_rate` and `test`."""
    steps: int
    seeds: tuple[int, ...]
    rates: Rates
    parameters: int
    state_size: int
    grows: bool = False
    """Whether the state grows with the sequence; `state_size` is then that of one token."""
    size: int = 0
    """Place in the budget's list of key widths: rules are compared at the same place."""

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

    def _training(self, phase: str, rate: float, seed: int) -> Training:
        steps = self.rates.steps if phase == "search" and self.rates.steps is not None else self.steps
        settings = {
            **self.settings,
            "steps": steps,
            "learning_rate": rate,
            "seed": seed,
            "test": phase == "final",
        }
        about = {"task": self.task, "rule": self.rule, "state_size": self.state_size, "phase": phase}
        name = f"{self.name}, rate {rate:g}, seed {seed}"
        return Training(self.function, settings, {**about, "seed": seed, "learning_rate": rate}, name, steps)


@dataclass(frozen=True)
class Plan:
    """All entries of a comparison."""

    title: str
    reference: str
    """Label of the rule that others are compared with."""
    jobs: int
    entries: tuple[Entry, ...]

    @cached_property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(entry.task for entry in self.entries))

    @cached_property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(entry.rule for entry in self.entries))

    @property
    def runs(self) -> int:
        """Number of trainings."""
        return sum(len(entry.search()) + len(entry.seeds) for entry in self.entries)

    def only(self, wanted: Any) -> Plan:
        """The entries whose name a compiled regular expression finds, and the reference's."""
        chosen = tuple(e for e in self.entries if wanted.search(e.name) or e.rule == self.reference)
        if not any(wanted.search(e.name) for e in self.entries):
            raise ValueError(f"--only {wanted.pattern!r} finds none of the runs, such as {self.entries[0].name!r}")
        return replace(self, entries=chosen)


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file."""
    return make_plan(read_toml(path), str(path))


def make_plan(values: Mapping[str, Any], where: str) -> Plan:
    """The plan that nested values describe; a mistake is a ValueError that names the key.

    Args:
        where: where the values come from, for messages.
    """
    values = dict(values)
    rule_values, tasks = values.pop("rules", None), values.pop("tasks", None)
    settings = override(_File(), _with_lists(values), where)
    named = _rules(rule_values, where)
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) for task in tasks):
        raise ValueError(f"{where}: tasks must be one or more tables [[tasks]]")
    reference = settings.reference or next(iter(named))
    if reference not in named:
        raise ValueError(
            f"{where}: reference must be one of the rules {', '.join(named)}, got {reference!r}{did_you_mean(reference, named)}"
        )
    _check(settings, where)
    labels = [task.get("label", task.get("task")) for task in tasks]
    double = next((label for label in labels if labels.count(label) > 1), None)
    if double is not None:
        raise ValueError(f"{where}: two tasks have the label {double!r}: give them different labels")
    entries = [
        entry
        for number, task in enumerate(tasks)
        for entry in _task_entries(task, f"tasks[{number}].", settings, named, reference, where)
    ]
    device = settings.device
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    jobs = settings.jobs or (4 if on_gpu else torch.multiprocessing.cpu_count())
    return Plan(settings.title, reference, jobs, tuple(entries))


def parse_rule(text: str) -> tuple[str, dict[str, Any]]:
    """Split `prism:steps=3,preset=paper` into the name and its options; values are Python literals or text."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"rule option {item!r} in {text!r} must look like name=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def _rules(values: Any, where: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Label → name and options of a rule, from a list of texts or a table."""
    if isinstance(values, list) and values and all(isinstance(text, str) for text in values):
        values = {text: text for text in values}
    if not isinstance(values, dict) or not values:
        raise ValueError(f'{where}: rules must be a list such as ["prism:steps=2", "gated_delta"], or a table')
    found = {}
    for label, value in values.items():
        if isinstance(value, str):
            found[label] = parse_rule(value)
        elif isinstance(value, dict) and isinstance(value.get("rule"), str):
            found[label] = (value["rule"], {key: item for key, item in value.items() if key != "rule"})
        else:
            raise ValueError(
                f'{where}: rules.{label} must be a text such as "prism:steps=2", or {{ rule = "prism", … }}'
            )
        try:
            registry.get(found[label][0])
        except ValueError as error:
            raise ValueError(f"{where}: rules: {error}") from error
    return found


def _with_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """A single `key_dim` as a list."""
    budget = values.get("budget")
    if isinstance(budget, dict) and isinstance(budget.get("key_dim"), int):
        return {**values, "budget": {**budget, "key_dim": [budget["key_dim"]]}}
    return dict(values)


def _check(settings: _File, where: str) -> None:
    """Refuse values that make no comparison."""
    budget, rates = settings.budget, settings.learning_rate
    if (budget.steps is None) == (budget.tokens is None):
        raise ValueError(f"{where}: budget must have either steps or tokens")
    least = {"budget.steps": budget.steps, "budget.tokens": budget.tokens, "jobs": settings.jobs}
    least |= {"learning_rate.steps": rates.steps}
    for name, number in least.items():
        if number is not None and number < 1:
            raise ValueError(f"{where}: {name} must be at least 1, got {number}")
    for name, found in {
        "seeds": settings.seeds,
        "learning_rate.seeds": rates.seeds,
        "learning_rate.values": rates.values,
        "budget.key_dim": budget.key_dim,
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


def _task_entries(
    table: dict[str, Any],
    prefix: str,
    settings: _File,
    named: dict[str, tuple[str, dict[str, Any]]],
    reference: str,
    where: str,
) -> Iterator[Entry]:
    """The entries of one task: every rule at every size, with the reference first where parameters are matched."""
    for key in table:
        if key not in _TASK_KEYS:
            raise ValueError(f"{where} has a setting {prefix}{key} that does not exist{did_you_mean(key, _TASK_KEYS)}")
    if not isinstance(table.get("task"), str):
        raise ValueError(f"{where}: {prefix}task must be the name of a task, got {table.get('task')!r}")
    more = _with_lists({"budget": table.get("budget", {})})["budget"]
    if isinstance(more, dict) and {"steps", "tokens"} & set(more):
        settings = replace(settings, budget=replace(settings.budget, steps=None, tokens=None))
    budget = override(settings.budget, more, where, f"{prefix}budget.")
    rates = override(settings.learning_rate, table.get("learning_rate", {}), where, f"{prefix}learning_rate.")
    settings = replace(settings, budget=budget, learning_rate=rates)
    _check(settings, f"{where}: {prefix.rstrip('.')}")
    try:
        base = _probe(table, settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {prefix.rstrip('.')}: {error}") from error
    task = base.build_task()
    for size, key_dim in enumerate(budget.key_dim):
        target: tuple[int, int] | None = None
        for label in sorted(named, key=lambda label: label != reference):
            try:
                entry = _entry(base, label, named[label], key_dim, settings, target, table.get("label", table["task"]))
            except ValueError as error:
                raise ValueError(f"{where}: rule {label!r}: {error}") from error
            target = target or sizes(task, ModelSettings(**entry.settings["model"]))
            yield replace(entry, size=size)


def _probe(table: Mapping[str, Any], settings: _File) -> ProbeRun:
    """A training of the task without its rule."""
    budget, curriculum = settings.budget, table.get("curriculum")
    task = build_task(table["task"], table.get("options", {}))
    run = ProbeRun(
        task=table["task"],
        task_options=dict(table.get("options", {})),
        tests=dict(table.get("tests", {})),
        model=ModelSettings(
            layers=budget.layers,
            width=budget.width,
            heads=budget.heads,
            value_dim=budget.value_dim,
            conv_size=budget.conv,
            hidden=budget.hidden,
            positions=budget.positions,
        ),
        steps=budget.steps or _steps(task.sample(1, torch.Generator().manual_seed(0)).inputs.shape[1], budget),
        batch=budget.batch,
        curriculum=None if curriculum is None else Curriculum(**curriculum),
        device=settings.device,
        precision=settings.precision,
        **{
            name: getattr(budget, name)
            for name in (
                "warmup",
                "weight_decay",
                "clip",
                "evaluations",
                "validation_sequences",
                "test_sequences",
                "stop_at",
            )
        },
    )
    run.build_tests()
    run.stages()
    return run


def _steps(length: int, budget: Budget) -> int:
    assert budget.tokens is not None
    return max(1, round(budget.tokens / (length * budget.batch)))


def _entry(
    base: ProbeRun,
    label: str,
    rule: tuple[str, dict[str, Any]],
    key_dim: int,
    settings: _File,
    target: tuple[int, int] | None,
    task_label: str,
) -> Entry:
    """The entry of a rule. `target` has the reference's parameters and state size; None: this is the reference."""
    budget, (name, options) = settings.budget, rule
    model = replace(base.model, rule=name, options=options, key_dim=key_dim)
    task = base.build_task()
    if budget.match == "parameters" and target is not None:
        model = matched(task, model, target[0])
    parameters, state_size = sizes(task, model)
    grows = not registry.get(name).constant_state
    if target is not None and budget.equal_state and not grows and abs(state_size - target[1]) > TOLERANCE * target[1]:
        raise ValueError(
            f"its state size is {state_size:,}, the reference's {target[1]:,}: give it options that make them equal, or set "
            "budget.equal_state = false"
        )
    run = asdict(replace(base, model=model))
    plain = {key: value for key, value in run.items() if key not in ("seed", "learning_rate", "test", "steps")}
    return Entry(
        task_label,
        label,
        PROBE,
        plain,
        base.steps,
        settings.seeds,
        settings.learning_rate,
        parameters,
        state_size,
        grows,
    )
