"""What a comparison has found so far: for every entry of the plan its scores, and its differences from the reference.

Seeds that failed are part of a finding. A mean without them is shown with how many there are, and no difference from or to it
is called better or worse: those that are left may be the lucky ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism.lab.entries import Entry
from prism.lab.grid import Records, best_rate
from prism.lab.plan import Plan
from prism.lab.statistics import FEWEST, Estimate, estimate, paired

CHANCE, LEARNED = 0.02, 0.1
"""Parts of the way from the baseline to the ceiling: what a mean may reach by luck, and more than a single seed does."""
LAMBADA = "LAMBADA accuracy"
"""Label of the share of last words that a language model predicts: higher is better, although of nats lower is."""


@dataclass(frozen=True)
class Finding:
    """The results of one entry."""

    entry: Entry
    rate: float | None
    """The chosen learning rate; None if there is none yet, or every run of the search failed."""
    runs: dict[int, dict[str, Any]]
    """Results of the finished final trainings, by seed."""
    lost: list[int]
    """Seeds whose final training failed."""
    failures: list[dict[str, Any]]
    """Lines of trainings that failed or were stopped."""
    validations: dict[float, Estimate]
    """What the search has measured, by learning rate."""

    @property
    def labels(self) -> list[str]:
        """Labels of the tests, the main one first."""
        return list(dict.fromkeys(label for result in self.runs.values() for label in scores_of(result)))

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate is the smallest or largest of those tried: a better one may lie beyond.

        Of two it always is: the report says that once, and not of every rule.
        """
        values = self.entry.rates.values
        return len(values) > 2 and self.rate in (min(values), max(values))

    @property
    def seeds(self) -> str:
        """How many seeds have a result: `4`, `3 of 4`, or `3 of 4, 1 failed`."""
        wanted, failed = len(self.entry.seeds), f", {len(self.lost)} failed" if self.lost else ""
        return f"{wanted}" if len(self.runs) == wanted else f"{len(self.runs)} of {wanted}{failed}"

    def lower(self, label: str) -> bool:
        """Whether lower scores of a test are better."""
        return label != LAMBADA and self.first("better") == "lower"

    def values(self, label: str) -> dict[int, float]:
        """Scores of a test, by seed."""
        scores = {seed: scores_of(result).get(label) for seed, result in self.runs.items()}
        return {seed: score for seed, score in scores.items() if score is not None}

    def unscored(self, label: str) -> list[int]:
        """The seeds that were trained and have no score of a test: they failed, or the score is not finite."""
        values = self.values(label)
        return sorted([*self.lost, *(seed for seed in self.runs if seed not in values)])

    def score(self, label: str) -> Estimate:
        return estimate(self.values(label).values())

    def score_text(self, label: str) -> str:
        """The mean with its error, and of how many seeds it is, if some have no score."""
        score, without = self.score(label), self.unscored(label)
        some = f" ({score.count} of {score.count + len(without)} seeds)" if without and score.count else ""
        return f"{score.text()}{some}"

    def difference(self, reference: Finding, label: str) -> Estimate:
        """By how much this entry's score exceeds the reference's, paired by seed."""
        return paired(self.values(label), reference.values(label))

    def difference_text(self, reference: Finding, label: str) -> str:
        """The difference with its error; * if it is significant, no seed of either side is without a score, and one of them is
        better than a guess."""
        difference, whole = self.difference(reference, label), not (self.unscored(label) or reference.unscored(label))
        star = difference.significant and whole and not at_chance(self, reference, label)
        return f"{difference.text(sign=True)}{' *' if star else ''}"

    def first(self, key: str, default: Any = None) -> Any:
        """An item of the results that is the same for every seed."""
        return next((result[key] for result in self.runs.values() if key in result), default)


@dataclass(frozen=True)
class Findings:
    """The results of all entries."""

    plan: Plan
    found: list[Finding]
    commands: list[str]
    """The commands that the runs come from."""
    machines: list[dict[str, Any]] = field(default_factory=list)
    """The machines that they were made on."""

    def task(self, task: str) -> list[Finding]:
        """The findings of a task that have finished runs, in the order of the plan's rules."""
        return [finding for finding in self.found if finding.entry.task == task and finding.runs]

    def reference(self, finding: Finding) -> Finding | None:
        """The reference's finding on the same task and at the same size; None if it has none, or is the reference."""
        if finding.entry.rule == self.plan.reference:
            return None
        wanted = (finding.entry.task, self.plan.reference, finding.entry.size)
        same = (f for f in self.found if (f.entry.task, f.entry.rule, f.entry.size) == wanted)
        return next((f for f in same if f.runs), None)

    def sentences(self) -> list[str]:
        """The differences from the reference in each task's main score, one sentence each."""
        said = []
        for finding in self.found:
            reference = self.reference(finding)
            if reference is None or not finding.labels:
                continue
            label = finding.labels[0]
            difference, lower = finding.difference(reference, label), finding.lower(label)
            missing = [
                f"{seeds_text(seeds)} of {side.entry.rule}"
                for side in (finding, reference)
                if (seeds := side.unscored(label))
            ]
            chance = at_chance(finding, reference, label)
            if chance and difference.significant and not missing:  # who guesses better is no verdict
                words = f"{difference.text(sign=True)} against {self.plan.reference}"
            else:
                words = verdict(difference, self.plan.reference, lower, missing)
            more = chance or uneven(finding, reference, label)
            said.append(f"{finding.entry.name}: {words}{f'; {more}' if more else ''}")
        return said

    def without_score(self, task: str) -> list[Finding]:
        """The findings of a task of which runs failed and no final one has finished: tables cannot show them."""
        return [
            finding
            for finding in self.found
            if finding.entry.task == task and not finding.runs and any(map(has_failed, finding.failures))
        ]


def has_failed(line: Mapping[str, Any]) -> bool:
    """Whether a line is about a training that failed. One that was stopped is continued by the same command."""
    return bool(line["status"] == "failed")


def scores_of(result: Mapping[str, Any]) -> dict[str, float | None]:
    """The scores of a result by label, with those that only runs on text have."""
    words = result.get("text", {}).get("lambada")
    return {**result["scores"], **({} if words is None else {LAMBADA: words["accuracy"]})}


def seeds_text(seeds: Sequence[int]) -> str:
    """`seed 3` or `seeds 3, 4`."""
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"


def verdict(difference: Estimate, reference: str, lower: bool, missing: Sequence[str] = ()) -> str:
    """A difference in words.

    Args:
        missing: the seeds of either side that failed, in words. With any of them there is no verdict.
    """
    seeds = f"{difference.count} seed{'s' * (difference.count != 1)}"
    if missing:
        shown = f"{difference.text(sign=True)} against {reference} ({seeds})"
        return f"{shown}; no verdict, because {' and '.join(missing)} failed"
    if difference.count < FEWEST:
        few = "is" if difference.count == 1 else "are"
        return f"{difference.text(sign=True)} against {reference}; {seeds} {few} too few for a verdict"
    better = (difference.mean < 0) == lower and difference.mean != 0
    if not difference.significant:
        return f"{difference.text(sign=True)} against {reference}, not significant ({seeds})"
    size = Estimate(abs(difference.mean), difference.error, difference.count).text()
    return f"{'better' if better else 'worse'} than {reference} by {size}, significant ({seeds})"


def at_chance(finding: Finding, reference: Finding, label: str) -> str:
    """In words, that not even the better score is better than a guess; empty if it is, or there is no baseline.

    Seeds often either solve a task or guess, so that their mean has a large error: one seed that has learned is enough.
    """
    baseline = finding.first("baseline", {}).get(label)
    if baseline is None or any(learned(side, label, LEARNED) for side in (finding, reference)):
        return ""
    sign = -1.0 if finding.lower(label) else 1.0
    best = max((finding.score(label), reference.score(label)), key=lambda score: sign * score.mean)
    luck = CHANCE * abs(finding.first("ceiling", {}).get(label, baseline) - baseline)
    if sign * (best.mean - baseline) > max(luck, best.half_width if best.count >= FEWEST else 0.0):
        return ""
    return f"both are at chance: the better score, {best.text()}, is not better than the baseline of {baseline:.3f}"


def uneven(finding: Finding, reference: Finding, label: str) -> str:
    """In words, how many seeds of either rule guess while others learn the task: then a mean describes none of them."""
    said = []
    for side in (finding, reference):
        seeds, better = len(side.values(label)), len(learned(side, label, LEARNED))
        if better < seeds and learned(side, label, 0.5):
            verb = "does" if seeds - better == 1 else "do"
            said.append(f"{seeds - better} of {seeds} seeds of {side.entry.rule} {verb} not learn the task")
    return ", ".join(said)


def learned(finding: Finding, label: str, part: float) -> list[int]:
    """The seeds whose score exceeds a part of the way from the baseline to the ceiling; none where these are not known."""
    baseline, ceiling = (finding.first(level, {}).get(label) for level in ("baseline", "ceiling"))
    if baseline is None or ceiling is None or baseline == ceiling:
        return []
    return [seed for seed, score in finding.values(label).items() if (score - baseline) / (ceiling - baseline) > part]


def findings(plan: Plan, records: Records) -> Findings:
    """Collect what a results file holds of a plan."""
    lines = [line for entry in plan.entries for line in _lines(entry, records)]  # others may be in the file too
    commands = dict.fromkeys(str(line["command"]) for line in lines if "command" in line)
    machines: list[dict[str, Any]] = []
    for line in lines:
        if line.get("machine") and line["machine"] not in machines:
            machines.append(line["machine"])
    return Findings(plan, [_finding(entry, records) for entry in plan.entries], list(commands), machines)


def _lines(entry: Entry, records: Records) -> list[dict[str, Any]]:
    """What the file holds of an entry's trainings: the search, and those at the chosen learning rate."""
    rate = best_rate(entry, records)
    trainings = (*entry.search(), *(() if rate is None else entry.final(rate)))
    return [records.lines[training.key] for training in trainings if training.key in records.lines]


def _finding(entry: Entry, records: Records) -> Finding:
    search, rate = entry.search(), best_rate(entry, records)
    final = [] if rate is None else entry.final(rate)
    lines = _lines(entry, records)
    validations: dict[float, list[float]] = {value: [] for value in entry.rates.values if search}
    for training in search:
        result = records.result(training)
        if result is not None and result["validation"] is not None:
            validations[training.about["learning_rate"]].append(result["validation"])
    results = {training.about["seed"]: records.result(training) for training in final}
    return Finding(
        entry,
        rate,
        {seed: result for seed, result in results.items() if result is not None},
        [training.about["seed"] for training in final if records.status(training) == "failed"],
        [line for line in lines if line["status"] in ("failed", "stopped")],
        {value: estimate(found) for value, found in validations.items()},
    )
