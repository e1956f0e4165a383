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
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from prism import rules as registry
from prism.lab.entries import Budget, Entry, PlanSettings, check_device, check_settings, check_table
from prism.lab.grid import Records
from prism.lab.kinds import Compared, Kind, kind_of
from prism.messages import did_you_mean
from prism.overrides import override, read_toml
from prism.rules.outside import import_modules
from prism.rules.prism import default_gate

_TEXT_KEYS = ("model", "optimizer")
_NOT_DEFAULTS = ("conv_size", "layer_index", "layer_count")
"""Options that the budget and the model give."""

TOLERANCE = 0.01
"""Largest relative difference between the numbers of parameters."""
_LARGE = 1 << 16
"""A value this large makes any model larger that it has an influence on."""
FLAGS = "flags"
"""Where the values of a plan come from that `prism probe` makes."""
_STEPS = (64, 16, 8, 4, 2, 1)
"""Widths are multiples of the first of these that comes close enough: round widths are fast."""


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
        """The entries whose name a compiled regular expression finds, and the reference's on the same tasks."""
        tasks = {e.task for e in self.entries if wanted.search(e.name)}
        chosen = tuple(
            e for e in self.entries if wanted.search(e.name) or (e.rule == self.reference and e.task in tasks)
        )
        if not tasks:
            raise ValueError(f"--only {wanted.pattern!r} finds none of the runs, such as {self.entries[0].name!r}")
        return replace(self, entries=chosen)

    def with_seeds(self, seeds: Sequence[int]) -> Plan:
        """The same with some of its final seeds."""
        known = self.entries[0].seeds
        if not seeds or not set(seeds) <= set(known) or len(set(seeds)) < len(seeds):
            given = " ".join(map(str, seeds)) or "none"
            raise ValueError(f"--seeds must be some of the plan's, {' '.join(map(str, known))}; got {given}")
        return replace(self, entries=tuple(replace(entry, seeds=tuple(seeds)) for entry in self.entries))

    def check_results(self, records: Records) -> None:
        """Refuse results on other tokens than the plan's folders have now, or of rules with other defaults or sizes.

        A run is known by the name of its folder, and by the options that the plan gives.
        """
        for entry in self.entries:
            for training in entry.trainings():
                line = records.lines.get(training.key)
                if line is None or line["status"] != "done":
                    continue
                digest = line["result"].get("corpus", {}).get("digest", entry.data)
                if digest != entry.data:
                    raise ValueError(
                        f"{records.path} has runs on other tokens than {entry.settings['data']} has now "
                        f"({training.name}): choose another folder for results, or restore the tokens"
                    )
                sizes = line["state_size"], line["result"].get("parameters", entry.parameters)
                if sizes != (entry.state_size, entry.parameters):
                    raise ValueError(
                        f"{records.path} has runs of another version of a model, with {sizes[1]:,} parameters and a state of "
                        f"{sizes[0]:,}, and now these are {entry.parameters:,} and {entry.state_size:,} ({training.name}): "
                        "choose another folder for results"
                    )
                for name, value in line.get("defaults", {}).items():
                    if name in entry.defaults and entry.defaults[name] != value:
                        raise ValueError(
                            f"{records.path} has runs in which the default of {name} was {value!r}, and now it is "
                            f"{entry.defaults[name]!r} ({training.name}): choose another folder for results, or give the "
                            "option with the rule"
                        )


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
    settings = override(PlanSettings(), _with_lists(values), where)
    try:
        import_modules(settings.imports)
    except ValueError as error:
        raise ValueError(f"{where}: imports: {error}") from error
    named = _rules(rule_values, where)
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) for task in tasks):
        raise ValueError(f"{where}: tasks must be one or more tables [[tasks]]")
    reference = settings.reference or next(iter(named))
    if reference not in named:
        raise ValueError(
            f"{where}: reference must be one of the rules {', '.join(named)}, got {reference!r}{did_you_mean(reference, named)}"
        )
    check_settings(settings, where)
    check_device(settings.device, where)
    for number, task in enumerate(tasks):
        check_table(task, f"tasks[{number}].", where)
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


def _rules(values: Any, where: str) -> dict[str, Compared]:
    """Rules by label, from a list of texts or a table."""
    if isinstance(values, list) and values and all(isinstance(text, str) for text in values):
        double = next((text for text in values if values.count(text) > 1), None)
        if double is not None:
            raise ValueError(f"{where}: rules has {double!r} twice: remove one")
        values = {text: text for text in values}
    if not isinstance(values, dict) or not values:
        raise ValueError(f'{where}: rules must be a list such as ["prism:steps=2", "gated_delta"], or a table')
    found = {}
    for label, value in values.items():
        if isinstance(value, str):
            found[label] = Compared(*parse_rule(value), {})
        elif isinstance(value, dict) and isinstance(value.get("rule"), str):
            options = {key: item for key, item in value.items() if key not in ("rule", "text")}
            found[label] = Compared(value["rule"], options, _text(value.get("text", {}), label, where))
        else:
            raise ValueError(
                f'{where}: rules.{label} must be a text such as "prism:steps=2", or {{ rule = "prism", … }}'
            )
        try:
            registry.get(found[label].name)
        except ValueError as error:
            raise ValueError(f"{where}: rules: {error}") from error
    return found


def _text(values: Any, label: str, where: str) -> dict[str, Any]:
    """What a rule alone has in tasks on text. Data, steps and batches are the same for all rules."""
    if not isinstance(values, dict) or not all(isinstance(value, dict) for value in values.values()):
        raise ValueError(f"{where}: rules.{label}.text must be a table with tables {' and '.join(_TEXT_KEYS)}")
    for key in values:
        if key not in _TEXT_KEYS:
            raise ValueError(
                f"{where}: rules.{label}.text may have {' and '.join(_TEXT_KEYS)}, got {key!r}{did_you_mean(key, _TEXT_KEYS)}"
            )
    return values


def _with_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """A single `key_dim` as a list."""
    budget = values.get("budget")
    if isinstance(budget, dict) and isinstance(budget.get("key_dim"), int):
        return {**values, "budget": {**budget, "key_dim": [budget["key_dim"]]}}
    return dict(values)


def _task_entries(
    table: dict[str, Any],
    prefix: str,
    settings: PlanSettings,
    named: dict[str, Compared],
    reference: str,
    where: str,
) -> Iterator[Entry]:
    """The entries of one task: every rule at every size, with the reference first where parameters are matched."""
    more = _with_lists({"budget": table.get("budget", {})})["budget"]
    if {"steps", "tokens"} & set(more):
        settings = replace(settings, budget=replace(settings.budget, steps=None, tokens=None))
    budget = override(settings.budget, more, where, f"{prefix}budget.")
    rates = override(settings.learning_rate, table.get("learning_rate", {}), where, f"{prefix}learning_rate.")
    settings = replace(settings, budget=budget, learning_rate=rates)
    check_settings(settings, f"{where}: {prefix.rstrip('.')}")
    try:
        kind = kind_of(table, settings)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{where}: {prefix.rstrip('.')}: {error}") from error
    for size, key_dim in enumerate(budget.key_dim):
        target: tuple[int, int] | None = None
        for label in sorted(named, key=lambda label: label != reference):
            try:
                entry = _entry(kind, label, named[label], key_dim, settings, target, where)
            except ValueError as error:
                raise ValueError(f"{where}: {prefix.rstrip('.')}, rule {label!r}: {error}") from error
            target = target or (entry.parameters, entry.state_size)
            yield replace(entry, task=table.get("label", table["task"]), size=size, data=kind.data)


def _entry(
    kind: Kind,
    label: str,
    rule: Compared,
    key_dim: int,
    settings: PlanSettings,
    target: tuple[int, int] | None,
    where: str,
) -> Entry:
    """The entry of a rule. `target` has the reference's parameters and state size; None: this is the reference."""
    budget = settings.budget
    changed: dict[str, int] = {}
    if budget.match == "parameters" and target is not None:
        changed = _matched(kind, rule, key_dim, budget, target[0])
    made = kind.settings(rule, key_dim, **changed)
    parameters, state_size = kind.sizes(made)
    grows = not registry.get(rule.name).constant_state
    if target is not None and budget.equal_state and not grows and abs(state_size - target[1]) > TOLERANCE * target[1]:
        remedy = "give --set budget.equal_state=false" if where == FLAGS else "set budget.equal_state = false"
        raise ValueError(
            f"its state size is {state_size:,}, the reference's {target[1]:,}: give it options that make them equal, or "
            f"{remedy}"
        )
    own = {key: value for key, value in made.items() if key not in ("seed", "learning_rate", "test", "steps")}
    return Entry(
        "",
        label,
        kind.function,
        own,
        kind.steps,
        settings.seeds,
        settings.learning_rate,
        parameters,
        state_size,
        grows,
        defaults=_defaults(rule),
    )


def _defaults(rule: Compared) -> dict[str, Any]:
    """The rule's own values of options that the plan does not give. None stands for a value that depends on others."""
    kind = registry.get(rule.name)
    options = {name: parameter.default for name, parameter in kind.option_parameters().items()}
    given = {**options, **rule.options}
    if given.get("gate_by", "") is None and given.get("preset", "lm") == "lm":  # PRISM's: a mean must not mix two gates
        options["gate_by"] = default_gate(given.get("steps", 2), given.get("step_scale"), given.get("gate", True))
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name not in (*rule.options, *_NOT_DEFAULTS) and value is not None and value is not inspect.Parameter.empty
    }


def _matched(kind: Kind, rule: Compared, key_dim: int, budget: Budget, target: int) -> dict[str, int]:
    """The width of the SwiGLU, or without one of the model, at which the rule has about `target` parameters.

    The width of a model is that of the residual stream and of every map from or to it; heads, key width and value width
    stay. Either way the state keeps its size.
    """
    what = "hidden" if budget.hidden else "width"

    def count(value: int) -> int:
        return kind.sizes(kind.settings(rule, key_dim, **{what: value}))[0]

    try:
        try:
            return {what: closest(count, target)}
        except ValueError:
            if what == "hidden" or budget.heads == 1:
                raise
            return {what: budget.heads * closest(lambda n: count(n * budget.heads), target)}  # heads divide the width
    except ValueError as error:
        advice = "" if budget.hidden else "set budget.hidden (the width of a SwiGLU can be matched closely), "
        raise ValueError(
            f"its number of parameters cannot be matched by another {what}: {error}; {advice}give it other options, omit "
            'it, or set budget.match = "none"'
        ) from error


def closest(count: Callable[[int], int], target: int) -> int:
    """The roundest value ≥ 1 whose count is within the tolerance of the target; `count` must not decrease."""
    count = cache(count)  # each call builds a model
    low, high = 1, 2
    while count(high) < target:
        if high >= _LARGE and count(high) == count(1):
            raise ValueError(
                f"it is {count(1):,} for every value, not {target:,}: remove the option that fixes the size"
            )
        low, high = high, max(2 * high, min(_line(count, low, high, target), 16 * high))
    halve = False
    while high - low > 1:  # count(low) < target ≤ count(high), or low is 1
        middle = (low + high) // 2 if halve else min(max(_line(count, low, high, target), low + 1), high - 1)
        low, high = (middle, high) if count(middle) < target else (low, middle)
        halve = not halve
    best = min((low, high), key=lambda value: abs(count(value) - target))
    for step in _STEPS:
        fit = {value: abs(count(value) - target) for value in (step * max(1, best // step), step * (best // step + 1))}
        found = min(fit, key=lambda value: fit[value])
        if fit[found] <= TOLERANCE * target:
            return found
    raise ValueError(f"the closest to {target:,} is {count(best):,}")


def _line(count: Callable[[int], int], low: int, high: int, target: int) -> int:
    """Where a line through the counts of two values reaches the target: for the width of a SwiGLU, the answer."""
    return low + (target - count(low)) * (high - low) // max(1, count(high) - count(low))
