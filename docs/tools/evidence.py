"""Read the results that claims rest on: those in experiments/results, and docs/figures.json.

NAME.json is one result (`{"machine", "command", "results"}`). NAME.jsonl and NAME/results.jsonl have the lines of a comparison,
as `prism compare` and the scripts of experiments/ write them: the last line of a training counts, but one that is finished
stays finished (files of several machines may be joined), and one that was started and never ended was stopped.
docs/figures.json has figures of earlier runs whose raw results were not kept, with the command that measured them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from prism.lab.statistics import FEWEST, Estimate, estimate, paired
from prism.lab.tasks.catalogue import build_task

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("text", "rates", "recommendation", "hybrid", "adapter")
"""Kinds of results that are no synthetic tasks."""
SIZES = {"key_dim", "value_dim", "head_dim", "conv_size", "heads"}
"""Options that a budget sets, which do not tell rules apart."""
RARE = "repeated rare bigrams"
"""A score of text: nats of tokens that complete a bigram which is rare in training and was seen before in the context."""
LAMBADA = "LAMBADA"
"""A score of text: the share of last words of LAMBADA that are predicted."""
RECALL = ("mqar", "mqar_mix", "multi_pair", "needle")
RATES = "rates"
"""The kind of runs on text at other learning rates (text_rates.toml): the same corpora again, which decide no claim."""
SILU = {"gate_by": "silu"}
"""The output gate of Gated DeltaNet as published, and of PRISM before its default became a sigmoid."""
SHARED = {"SiLU as output gate": SILU, "decays per channel": {"forget": "channel"}}
"""Options that PRISM shares with Gated DeltaNet, and with which both were compared."""
RECOMMENDERS = {
    "sasrec": ("softmax", {}),
    "gated_delta": ("gated_delta", {}),
    "prism-1": ("gated_delta", {"timescales": [1, 1024]}),
    "prism-2": ("prism", {"steps": 2, **SILU}),  # the default of recommenders
    "prism-3": ("prism", {"steps": 3, **SILU}),
}


@dataclass
class Group:
    """All finished final trainings of one rule on one task at one state size."""

    file: str
    task: str
    kind: str
    """`text`, `rates`, `recall`, `recommendation`, `hybrid`, or the name of another synthetic task."""
    label: str
    rule: str
    options: dict[str, Any]
    size: int
    parameters: int | None = None
    tokens: int = 0
    """Tokens that each training read; 0 where lines do not say it."""
    lower: bool = False
    """Whether lower scores are better."""
    metric: str = ""
    runs: dict[int, dict[str, float]] = field(default_factory=dict)
    """Scores by seed."""
    validation: dict[int, float] = field(default_factory=dict)
    """Main scores on the split validation, by seed."""
    steps: dict[int, int] = field(default_factory=dict)
    """Training steps by seed: fewer than planned where a training stopped because it had solved its task."""
    commands: set[str] = field(default_factory=set)
    line: dict[str, Any] = field(default_factory=dict)
    """The line of one of the trainings, for what they have in common."""

    @property
    def main(self) -> str:
        """Label of the main score."""
        return next(iter(next(iter(self.runs.values()))))

    def values(self, label: str | None = None) -> dict[int, float]:
        wanted = self.main if label is None else label
        return {seed: scores[wanted] for seed, scores in self.runs.items() if scores.get(wanted) is not None}

    def score(self, label: str | None = None, seeds: Collection[int] | None = None) -> Estimate:
        """Mean over the seeds; or those of `seeds` alone."""
        return estimate(value for seed, value in self.values(label).items() if seeds is None or seed in seeds)

    def level(self, what: str) -> float | None:
        """The `ceiling` or the `baseline` of the main score; None if lines do not have it.

        Lines of the nine probes have older baselines, which did not guess among the values shown.
        """
        if self.kind == "nine" and what == "baseline":
            return build_task("nine", self.line["settings"].get("task_options", {})).baseline()
        found: float | None = self.line.get("result", {}).get(what, {}).get(self.main)
        return found

    def gain(self, other: Group, label: str | None = None) -> Estimate:
        """By how much this rule is better than another, paired by seed; positive is better, whatever the metric."""
        found = paired(self.values(label), other.values(label))
        return Estimate(-found.mean, found.error, found.count) if self.lower else found


@dataclass(frozen=True)
class Pair:
    """Two rules on one task at equal state size."""

    first: Group
    second: Group

    @property
    def gain(self) -> Estimate:
        return self.first.gain(self.second)

    @property
    def seeds(self) -> set[int]:
        """The seeds that both have."""
        return self.first.values().keys() & self.second.values().keys()

    @property
    def solved(self) -> bool:
        """Whether all trainings of both stopped because they had solved the task: then their scores say nothing."""
        goals = [group.line.get("settings", {}).get("stop_at") for group in (self.first, self.second)]
        return all(
            goal is not None and min(group.validation.values(), default=0.0) >= goal
            for group, goal in zip((self.first, self.second), goals, strict=True)
        )

    @property
    def scale(self) -> tuple[bool, bool, int, int, int]:
        """Which of two pairs on the same task says more: enough seeds first, then the default start, parameters, seeds,
        tokens."""
        seeds = self.gain.count
        return seeds >= FEWEST, default_start(self), self.first.parameters or 0, seeds, self.first.tokens


def largest(pairs: Iterable[Pair]) -> list[Pair]:
    """Of the pairs on the same task, at the same place of state size, the one whose `scale` is largest; the rest stays."""
    best: dict[tuple[str, int], Pair] = {}
    for pair in pairs:
        place = (pair.first.task, pair.first.size if pair.first.kind != "text" else 0)
        if place not in best or pair.scale > best[place].scale:
            best[place] = pair
    return list(best.values())


Test = Callable[[Group], bool]


def equal_starts(kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Options of PRISM and of Gated DeltaNet with which both start alike, with the same output gate: the default first, then
    those of older runs: with SiLU, with drawn weights too, and with drawn decays too.

    The models of synthetic tasks have the convolution in front of the mixer, where the option `start` does nothing.
    """
    spread, drawn, sigmoid = {"timescales": [1, 1024]}, {"timescales": "drawn"}, {"gate_by": "sigmoid"}
    if kind != "text":
        return [({}, {**spread, **sigmoid}), (SILU, spread), ({**SILU, **drawn}, {})]
    recall, weights = {"start": "recall"}, {"start": "drawn"}
    return [
        ({}, {**spread, **recall, **sigmoid}),
        (SILU, {**spread, **recall}),
        ({**SILU, **weights}, spread),
        ({**SILU, **drawn, **weights}, {}),
    ]


def is_default(group: Group) -> bool:
    """PRISM as `prism` builds it, or with L = 2 spelled out; with an older start or gate where that was not run."""
    options = {name: value for name, value in group.options.items() if (name, value) != ("steps", 2)}
    return group.rule == "prism" and options in [ours for ours, _ in equal_starts(group.kind)]


def is_rule(name: str, **options: Any) -> Test:
    """A test for one rule with exactly these options."""
    return lambda group: group.rule == name and group.options == options


def is_prism(**options: Any) -> Test:
    """A test for PRISM of rank 2 with these options and no others."""
    return lambda group: group.rule == "prism" and {"steps": 2, **group.options} == {"steps": 2, **options}


class Evidence:
    """Everything that was measured. `results` and `figures` are the folder and the file to read."""

    def __init__(self, results: Path | None = None, figures: Path | None = None) -> None:
        self.folder = ROOT / "experiments" / "results" if results is None else results
        self.figures_file = ROOT / "docs" / "figures.json" if figures is None else figures

    @cached_property
    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.figures_file.read_text(encoding="utf-8"))
        return found

    def single(self, name: str) -> Any:
        """The results of `name`.json; None if there is no such file."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else None

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The last line of every training, with the name of its file."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for path in [*sorted(self.folder.glob("*.jsonl")), *sorted(self.folder.glob("*/results.jsonl"))]:
            name = path.stem if path.parent == self.folder else path.parent.name
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                if "key" not in line:  # of a script that is no comparison (recommending.py reads it)
                    continue
                if line["status"] == "started":
                    line |= {"status": "stopped", "error": "killed"}
                known = found.get((name, line["key"]))
                if known is None or known["status"] != "done" or line["status"] == "done":
                    found[name, line["key"]] = {**line, "file": name}
        return list(found.values())

    @cached_property
    def unfinished(self) -> list[dict[str, Any]]:
        """Lines of trainings that failed or were stopped."""
        return [line for line in self.lines if line["status"] in ("failed", "stopped")]

    @cached_property
    def groups(self) -> list[Group]:
        found: dict[tuple[Any, ...], Group] = {}
        for line in self.lines:
            if line["status"] != "done" or line.get("phase", "final") != "final":
                continue
            rule, options = identity(line)
            size = int(line.get("state_size") or 0)
            place = (line["file"], line["task"], line["rule"], size)
            if place not in found:
                found[place] = Group(*place[:2], kind_of(line), line["rule"], rule, options, size)
            group, result = found[place], line["result"]
            if group.line and group.line.get("learning_rate") != line.get("learning_rate"):
                raise ValueError(
                    f"{line['file']} has final runs of {line['rule']} on {line['task']} at two learning rates: keep those that "
                    "its search chooses"
                )
            group.runs[int(line["seed"])] = {**result["scores"], **_words(result)}
            group.parameters, group.metric = result.get("parameters"), result.get("metric", "")
            group.tokens = result.get("tokens", 0)
            group.lower = result.get("better") == "lower"
            if result.get("validation") is not None:
                group.validation[int(line["seed"])] = result["validation"]
            if "steps" in result:
                group.steps[int(line["seed"])] = result["steps"]
            group.commands.add(line.get("command", ""))
            group.line = line
        return [group for group in found.values() if any(group.runs.values())]

    def of(self, *kinds: str) -> list[Group]:
        return [group for group in self.groups if group.kind in kinds]

    def pairs(self, first: Test, second: Test, *kinds: str) -> list[Pair]:
        """Two rules on every task of these kinds that has both, size by size in increasing order.

        Sizes may differ between rules (a cache has that of one token): then the sizes of one rule are paired with the
        other's in their order. If one rule has fewer sizes, because runs are missing, only equal sizes are paired.
        """
        tasks: dict[tuple[str, str], list[Group]] = defaultdict(list)
        for group in self.of(*kinds):
            tasks[group.file, group.task].append(group)
        found = []
        for groups in tasks.values():
            sides = [sorted(filter(test, groups), key=lambda g: (g.size, len(g.options))) for test in (first, second)]
            one, two = (list({group.size: group for group in reversed(side)}.values())[::-1] for side in sides)
            if len(one) == len(two):
                found += [Pair(a, b) for a, b in zip(one, two, strict=True)]
            else:
                found += [Pair(a, b) for a in one for b in two if a.size == b.size]
        return found


def ranks(evidence: Evidence, *kinds: str) -> list[Pair]:
    """PRISM of rank 2 and Gated DeltaNet, its rank 1, that start alike: only the rank differs. The default start first."""
    return [
        pair
        for number in range(4)
        for kind in kinds
        for ours, theirs in equal_starts(kind)[number : number + 1]
        for pair in evidence.pairs(is_prism(**ours), is_rule("gated_delta", **theirs), kind)
    ]


def ranks_with(evidence: Evidence, **options: Any) -> list[Pair]:
    """PRISM of rank 2 and its rank 1 on text, that start as the default does and both have these options."""
    ours, theirs = ({**start, **options} for start in equal_starts("text")[0])
    if theirs.get("gate_by") == "silu":  # as published: plans do not write it
        del theirs["gate_by"]
    return evidence.pairs(is_prism(**ours), is_rule("gated_delta", **theirs), "text")


def default_start(pair: Pair) -> bool:
    """Whether PRISM has no option that says how it starts, nor another output gate."""
    return not {"timescales", "start", "gate_by"} & pair.first.options.keys()


def _words(result: dict[str, Any]) -> dict[str, float]:
    """The score on LAMBADA, if a result on text has it."""
    measured = result.get("text", {}).get("lambada")
    return {} if measured is None else {LAMBADA: measured["accuracy"]}


def identity(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of a line's rule, without sizes, however it is labelled."""
    settings, label = line.get("settings", {}), str(line["rule"])
    if label in RECOMMENDERS and isinstance(settings, list):
        return RECOMMENDERS[label]
    model = settings.get("model") if isinstance(settings, dict) else None
    if not isinstance(model, dict):
        return label, {}
    name, pattern, by_rule = model.get("rule") or model.get("layers") or label, None, model.get("rule_options", {})
    if name not in by_rule and len(by_rule) == 1:  # a pattern of layers with options of one rule
        name, pattern = next(iter(by_rule)), name
    options = dict(model.get("options") or by_rule.get(name) or {})
    more = {"layers": pattern, "optimizer": settings.get("optimizer")}
    options |= {key: value for key, value in more.items() if value}
    return str(name), {key: value for key, value in options.items() if key not in SIZES}


def kind_of(line: dict[str, Any]) -> str:
    """What a line's task is about."""
    settings = line.get("settings", {})
    if isinstance(settings, list):
        return "recommendation"
    if str(line.get("function", "")).endswith(":train_text"):
        return RATES if line.get("file") == "text_rates" else "text"
    task = str(settings.get("task") or line["task"])
    return "recall" if task in RECALL else task.split()[0]
