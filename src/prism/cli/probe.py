"""`prism probe TASK`: compare rules on a synthetic task. `prism probe mqar` shows how many pairs a memory can recall."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from prism import rules as registry
from prism.cli.compare import run_plan
from prism.compare.findings import verdict
from prism.compare.plan import make_plan, parse_rule
from prism.compare.statistics import Estimate, estimate, paired
from prism.files import check_target
from prism.overrides import read_toml_value
from prism.probes.catalogue import task_class
from prism.probes.jobs import run_jobs
from prism.probes.model import ModelSettings, ProbeModel
from prism.probes.training import ProbeRun, train_probe
from prism.reports.results import pyplot, recall_picture, write_results


@dataclass(frozen=True)
class Recall:
    """A model of the recall probe: its label, and the numbers of pairs to train and to test with."""

    label: str
    run: ProbeRun
    pairs: int
    length: int
    test_pairs: tuple[int, ...]

    def with_pairs(self, pairs: int) -> Recall:
        tested = tuple(sorted({max(1, pairs * i // 4) for i in (1, 2, 3, 4)}))
        return replace(self, pairs=pairs, length=max(self.length, 4 * pairs), test_pairs=tested)

    def complete(self) -> Recall:
        """With the task's options and tests in the run."""
        tests = {str(n): {"pairs": n, "length": max(self.length, 4 * n)} for n in self.test_pairs}
        options = {"pairs": self.pairs, "length": self.length}
        return replace(self, run=replace(self.run, task_options=options, tests=tests))


SETTINGS = {
    "easy": Recall(
        "", ProbeRun("mqar", model=ModelSettings(key_dim=16), steps=600, batch=64, evaluations=1), 8, 32, (2, 4, 6, 8)
    ),
    "starved": Recall(
        "", ProbeRun("mqar", model=ModelSettings(key_dim=8), steps=900, batch=32, evaluations=1), 16, 64, (4, 8, 12, 16)
    ),
}
"""easy has room to spare; starved has twice as many pairs as key dimensions."""


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
    `prism probe mqar` has flags of its own. `prism compare` takes several tasks and every setting from a file.

    Args:
        task: One of mqar_mix, multi_pair, needle, regression, parity, modular, group, nine (mqar: `prism probe mqar --help`).
        rules: Rules to compare, with options after a colon: prism:steps=3,preset=paper. The first is the reference.
        seeds: Number of final models for each rule.
        learning_rates: Peak learning rates to try for every rule, on validation, with another seed.
        steps: Training steps.
        batch: Sequences in a step.
        layers: Layers of the model.
        width: Width of the model.
        heads: Heads of every layer.
        key_dim: Key widths of a head; the state size is heads · key width · value width · layers.
        set: Options of the task as name=value, of the budget as budget.name=value (budget.match=parameters gives every rule
            as many parameters as the reference), of the search as learning_rate.name=value.
        device: cpu, cuda and so on. auto: cuda if available, else cpu.
        jobs: Trainings side by side. None: one per core, or four on a GPU.
        output: Folder for results.jsonl, report.html and pictures. None: runs/probe-TASK.
        retry: Repeat runs that failed.
        dry_run: Show the runs with their parameters and state sizes, and train nothing.
    """
    if not rules:
        raise ValueError(f"rules is empty: name one or more of {', '.join(registry.names())}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    output = check_target(Path("runs") / f"probe-{task}" if output is None else output, folder=True)
    task_class(task)
    budget = {
        "steps": steps,
        "batch": batch,
        "layers": layers,
        "width": width,
        "heads": heads,
        "key_dim": list(key_dim),
    }
    sections: dict[str, dict[str, Any]] = {"task": {}, "budget": budget, "learning_rate": {}}
    for item in set:
        name, equals, value = item.partition("=")
        section, _, option = name.rpartition(".")
        if not equals or (section or "task") not in sections:
            raise ValueError(f"--set {item!r} must look like name=value, budget.name=value or learning_rate.name=value")
        sections[section or "task"][option] = read_toml_value(value)
    plan = make_plan(
        {
            "title": f"Rules on {task}",
            "rules": list(rules),
            "seeds": list(range(seeds)),
            "device": device,
            "budget": sections["budget"],
            "learning_rate": {"values": list(learning_rates), **sections["learning_rate"]},
            "tasks": [{"task": task, "options": sections["task"]}],
        },
        "flags",
    )
    return run_plan(plan, output, jobs, retry, dry_run=dry_run)


def mqar(
    rules: tuple[str, ...] = ("linear", "gated_delta", "prism:steps=2"),
    setting: Literal["easy", "starved", "both"] = "both",
    seeds: int = 3,
    pairs: int | None = None,
    key_dim: tuple[int, ...] = (),
    layers: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    jobs: int | None = None,
    output: Path = Path("runs/mqar"),
) -> None:
    """Train small models on multi-query associative recall and show how many pairs a memory of fixed size holds.

    Args:
        rules: rules to compare, with options after a colon: `prism:steps=3,preset=paper`. The first is the reference.
        setting: `easy` has room to spare, `starved` twice as many pairs as key dimensions.
        seeds: number of models for each rule and setting. The table shows mean ± standard error, and differences from the
            first rule, paired by seed; the picture shows mean and range.
        pairs: key-value pairs in a sequence (the length grows to 4 · pairs). None: the setting's value.
        key_dim: key widths to try; the state size is key width · value width · layers. Empty: the setting's width.
        layers: layers of the model. None: the setting's value.
        steps: training steps. None: the setting's value.
        learning_rate: peak learning rate. None: the setting's value.
        jobs: parallel runs. None: one per core.
        output: folder for recall.png and results.json, which is updated after every model.
    """
    if not rules:
        raise ValueError(f"rules is empty: name one or more of {', '.join(registry.names())}")
    least = {"seeds": seeds, "pairs": pairs, "layers": layers, "steps": steps, "jobs": jobs}
    for what, number in [*least.items(), *(("key_dim", width) for width in key_dim)]:
        if number is not None and number < 1:
            raise ValueError(f"{what} must be at least 1, got {number}")
    pyplot()  # fail now, not after the training, if matplotlib is missing
    check_target(output, folder=True)
    runs, labels = [], []
    for name in ("easy", "starved") if setting == "both" else (setting,):
        base = SETTINGS[name] if pairs is None else SETTINGS[name].with_pairs(pairs)
        given: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate}
        run = replace(base.run, **{k: v for k, v in given.items() if v is not None})
        for text in rules:
            rule, options = parse_rule(text)
            for size in key_dim or (run.model.key_dim,):
                sizes = {"key_dim": size, "layers": layers or run.model.layers}
                model = replace(run.model, rule=rule, options=options, **sizes)
                for seed in range(seeds):
                    runs.append(replace(base, label=text, run=replace(run, model=model, seed=seed)).complete())
                    labels.append(name)
    check_runs(runs)
    started = time.perf_counter()
    names = [f"{label} {one.label} seed {one.run.seed}" for label, one in zip(labels, runs, strict=True)]
    data, results = output / "results.json", list[dict[str, Any]]()

    def keep(found: list[Any]) -> None:  # after every model: an interrupt loses only the runs in progress
        results[:] = [{"setting": label, **result} for label, result in zip(labels, found, strict=True) if result]
        write_results(data, results, command=shlex.join(["prism", *sys.argv[1:]]))

    run_jobs(train_recall, runs, names, [one.run.steps for one in runs], jobs, keep)
    Console().print(_table(results, rules[0]))
    for sentence in _sentences(results, rules[0]):
        print(sentence)
    recall_picture(results, output / "recall.png")
    print(f"{len(runs)} models in {time.perf_counter() - started:.0f} s; results in {data}")
    print(f"picture: {(output / 'recall.png').resolve()}")


def check_runs(runs: list[Recall]) -> None:
    """Build every model once, so that a wrong name or option is refused before training."""
    for one in runs:
        ProbeModel(one.run.build_task(), one.run.model)


def train_recall(one: Recall, report: Callable[[int, float], None] = lambda step, loss: None) -> dict[str, Any]:
    """Train and test one model; returns its settings and its accuracy by the number of pairs."""
    result = train_probe(one.run, report)
    accuracy = {int(pairs): score for pairs, score in result["scores"].items()}
    settings = asdict(one.run)
    return {
        **settings.pop("model"),
        **{name: settings[name] for name in ("steps", "batch", "learning_rate", "seed", "test_sequences")},
        "task": asdict(one.run.build_task()),
        "test_pairs": list(one.test_pairs),
        "name": one.label,
        "accuracy": accuracy[one.pairs] if one.pairs in accuracy else max(accuracy.values()),
        "accuracy_by_pairs": accuracy,
        "state_size": result["state_size"],
        "parameters": result["parameters"],
        "final_loss": result["loss"],
    }


def _table(results: list[dict[str, Any]], reference: str) -> Table:
    table = Table(title="Associative recall: accuracy, mean ± standard error", header_style="bold")
    for column in ("setting", "rule"):
        table.add_column(column)
    for column in ("pairs", "state size", "parameters", "accuracy", f"difference to {reference}", "seeds"):
        table.add_column(column, justify="right")
    groups = _groups(results)
    for (setting, name, size), group in groups.items():
        difference = _difference(groups, setting, name, size, reference)
        table.add_row(
            setting,
            name,
            str(group[0]["task"]["pairs"]),
            f"{group[0]['state_size']:,}",
            f"{group[0]['parameters']:,}",
            estimate(result["accuracy"] for result in group).text(),
            "" if difference is None else f"{difference.text(sign=True)}{' *' if difference.significant else ''}",
            str(len(group)),
        )
    return table


def _sentences(results: list[dict[str, Any]], reference: str) -> list[str]:
    """The differences from the first rule in words."""
    groups, said = _groups(results), []
    several = len({size for _, _, size in groups}) > 1
    for setting, name, size in groups:
        difference = _difference(groups, setting, name, size, reference)
        if difference is not None:
            where = f"{setting}, key width {size}" if several else setting
            said.append(f"{where}, {name}: {verdict(difference, reference, lower=False)}")
    return said


Groups = dict[tuple[str, str, int], list[dict[str, Any]]]
"""Results of all seeds, by setting, rule and key width."""


def _groups(results: list[dict[str, Any]]) -> Groups:
    groups: Groups = {}
    for result in results:
        groups.setdefault((result["setting"], result["name"], result["key_dim"]), []).append(result)
    return groups


def _difference(groups: Groups, setting: str, name: str, size: int, reference: str) -> Estimate | None:
    """By how much a rule's accuracy exceeds the reference's at the same setting and key width, paired by seed."""
    other = groups.get((setting, reference, size))
    if name == reference or other is None:
        return None
    mine = groups[setting, name, size]
    return paired({r["seed"]: r["accuracy"] for r in mine}, {r["seed"]: r["accuracy"] for r in other})
