"""`prism probe TASK`: compare rules on a synthetic task. Its helpers serve `prism probe mqar` too (probe_mqar.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from prism import rules as registry
from prism.cli.compare import run_plan
from prism.files import check_target
from prism.lab.kinds import TEXT
from prism.lab.plan import FLAGS, make_plan
from prism.lab.tasks.catalogue import task_class
from prism.overrides import read_toml_value


def probe(
    task: Annotated[Positional[str], arg(metavar="TASK")],
    rules: tuple[str, ...] = ("gated_delta", "prism:steps=2"),
    seeds: int = 3,
    learning_rates: tuple[float, ...] = (3e-3, 1e-2),
    steps: int = 600,
    batch: int = 64,
    layers: int = 1,
    width: int = 64,
    heads: int = 1,
    key_dim: tuple[int, ...] = (16,),
    set: tuple[str, ...] = (),
    device: str = "auto",
    jobs: int | None = None,
    output: Path | None = None,
    retry: bool = False,
    dry_run: bool = False,
) -> int:
    """Compare rules on a synthetic task: a learning rate for each rule, several seeds, differences with their errors.

    Finished runs are kept: the same command after an interrupt continues, and more seeds are added to those there are.
    `prism probe mqar` has named settings. `prism compare` takes several tasks and every setting from a file.

    Args:
        task: One of mqar_mix, multi_pair, needle, regression, parity, modular, group, nine (mqar: `prism probe mqar --help`).
        rules: Rules to compare, with options after a colon: prism:steps=3,preset=paper. The first is the reference.
        seeds: Number of final models for each rule; their seeds are 0, 1, …
        learning_rates: Peak learning rates to try for every rule, on validation, with another seed.
        steps: Training steps.
        batch: Sequences in a step.
        layers: Layers of the model.
        width: Width of the model.
        heads: Heads of every layer.
        key_dim: Key widths of a head; the state size is heads · key width · value width · layers.
        set: Options of the task as name=value, of the budget as budget.name=value (budget.match=parameters gives every rule
            as many parameters as the reference; budget.tokens goes before --steps), of the search as learning_rate.name=value.
        device: cpu, cuda and so on. auto: cuda if available, else cpu.
        jobs: Trainings side by side. None: one per core, or four on a GPU.
        output: Folder for results.jsonl, report.html and pictures. None: runs/probe-TASK.
        retry: Repeat runs that failed.
        dry_run: Show the runs with their parameters and state sizes, and train nothing.
    """
    sizes = {"steps": steps, "batch": batch, "layers": layers, "width": width, "heads": heads}
    check_flags(rules, key_dim, learning_rates, seeds=seeds, jobs=jobs, **sizes)
    output = check_target(Path("runs") / f"probe-{task}" if output is None else output, folder=True)
    if task == TEXT:
        raise ValueError("text is no synthetic task: `prism compare FILE.toml` compares rules on text")
    task_class(task)
    given = read_set(set)
    budget = {**sizes, "key_dim": list(key_dim), **given["budget"]}
    if "tokens" in budget:
        del budget["steps"]
    plan = make_plan(
        {
            "title": f"Rules on {task}",
            "rules": list(rules),
            "seeds": list(range(seeds)),
            "device": device,
            "budget": budget,
            "learning_rate": {"values": list(learning_rates), **given["learning_rate"]},
            "tasks": [{"task": task, "options": given["task"]}],
        },
        FLAGS,
    )
    return run_plan(plan, output, jobs, retry, dry_run=dry_run)


def check_flags(
    rules: Sequence[str], key_dim: Sequence[int], learning_rates: Sequence[float], **numbers: int | None
) -> None:
    """Refuse an empty list of rules, rates that are not positive, and numbers below 1, by the names of their flags.

    A number that is None is not given.
    """
    if not rules:
        raise ValueError(f"--rules is empty: name one or more of {', '.join(registry.names())}")
    for name, number in [*numbers.items(), *(("key_dim", width) for width in key_dim)]:
        if number is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    for rate in learning_rates:
        if not 0 < rate < math.inf:
            raise ValueError(f"--learning-rates must be above 0, got {rate:g}")


def read_set(items: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `--set` changes: options of the task, of the budget, and of the search for a learning rate."""
    found: dict[str, dict[str, Any]] = {"task": {}, "budget": {}, "learning_rate": {}}
    for item in items:
        name, equals, value = item.partition("=")
        section, _, option = name.rpartition(".")
        if not equals or (section or "task") not in found:
            raise ValueError(f"--set {item!r} must look like name=value, budget.name=value or learning_rate.name=value")
        found[section or "task"][option] = read_toml_value(value)
    return found
