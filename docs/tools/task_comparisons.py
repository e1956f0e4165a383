"""Tables of the comparisons on synthetic tasks: scores, steps to learn, searches; and what of any comparison did not finish."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from evidence import ELSEWHERE, Evidence, Group, Test, is_rule
from wording import joined, number, paragraph, shown, table

from prism.lab.statistics import FEWEST, estimate

COLUMNS = 4
"""Tasks side by side in a table, so that its lines fit."""
COLUMNS_WIDTH = 84
"""Characters of their names."""
RANK_1, RANK_2, SHARED_KEY = "rank 1", "rank 2, maps of rank 32", "rank 1 with these maps"
_SPREAD = {"timescales": [1, 1024], "gate_by": "sigmoid"}
FACTS: dict[str, Test] = {
    RANK_1: is_rule("gated_delta", **_SPREAD),
    SHARED_KEY: is_rule("prism", steps=2, shared_key=True, rank=32),
    "rank 2, maps of rank 8": is_rule("prism", steps=2),
    "rank 2, only keys of rank 32": is_rule("prism", steps=2, key_rank=32),
    RANK_2: is_rule("prism", steps=2, rank=32),
    "rank 3, maps of rank 32": is_rule("prism", steps=3, rank=32),
    "rank 4, maps of rank 32": is_rule("prism", steps=4, rank=32),
}
"""Rules in the order of the table of several facts in one token; all have one start and one output gate."""
WORDS = {2: "two", 4: "four", 8: "eight"}
LEVELS = ("ceiling", "baseline")
"""What an oracle scores, and what a guess does."""


def probes(evidence: Evidence) -> str:
    """A table per comparison: rules by synthetic tasks, each task's main score, with what an oracle and a guess score."""
    files: dict[str, list[Group]] = defaultdict(list)
    for group in evidence.groups:
        if group.kind not in ELSEWHERE:
            files[group.file].append(group)
    parts = []
    for file, groups in files.items():
        tasks: dict[str, Group] = {}
        for group in groups:
            tasks.setdefault(group.task, group)
        rules = list(dict.fromkeys(group.label for group in groups))
        metrics: dict[str, list[str]] = defaultdict(list)
        for task, group in tasks.items():
            metrics[group.metric].append(task)
        named = [f"{metric} ({', '.join(on)})" for metric, on in metrics.items()]
        measured = ", ".join(named if len(named) > 1 else metrics)
        cells: dict[tuple[str, str], list[str]] = defaultdict(list)
        for group in sorted(groups, key=lambda group: group.size):
            cells[group.label, group.task].append(shown(group.score(), 3))
        for task, group in tasks.items():
            for what in LEVELS:
                if (level := group.level(what)) is not None:
                    cells[f"*{what}*", task].append(number(level, 3))
        seeds = max(len(group.runs) for group in groups)
        for start, columns in enumerate(_columns([*tasks])):
            rows = [
                [rule, *["; ".join(cells[rule, task]) for task in columns]]
                for rule in (*rules, *map("*{}*".format, LEVELS))
            ]
            said = "" if start else paragraph(f"**`{file}`**, {measured}, up to {seeds} seeds; {budget(groups)}:")
            parts.append(joined(said, table(["rule", *columns], [row for row in rows if any(row[1:])])))
    return joined(*parts) or "No comparison on synthetic tasks is in the repository yet."


def budget(groups: list[Group]) -> str:
    """How the models of a comparison were trained, as far as its lines say it: `1 layer of width 64, 1,500 steps of 64 …`."""
    settings = [group.line["settings"] for group in groups]
    known = [one for one in settings if isinstance(one, dict) and {"layers", "width"} <= one.get("model", {}).keys()]
    if not known:
        return "settings are not stored"

    def span(values: list[Any]) -> str:
        ends = dict.fromkeys((min(values), max(values)))
        return " to ".join(f"{value:,}" for value in ends)

    layers, widths = (span([one["model"][name] for one in known]) for name in ("layers", "width"))
    steps = span([one["steps"] for one in known])
    batches = span([one["batch"] for one in known])
    rates = span([one["learning_rate"] for one in known])
    said = (
        f"{layers} layer{'s' * (layers != '1')} of width {widths}, {steps} steps of {batches}, learning rates {rates}"
    )
    numbers = [group.parameters for group in groups if group.parameters]
    if numbers:
        said += f", {span([round(number / 1000) for number in numbers])} thousand parameters"
        of_task: dict[str, list[int]] = defaultdict(list)
        for group in groups:
            of_task[group.task] += [group.parameters] if group.parameters else []
        unequal = any(max(found) > 1.02 * min(found) for found in of_task.values() if found)
        said += " (not matched)" if unequal else " (equal in a task)"
    return f"{said}, states of {span([group.size for group in groups])} numbers"


def _columns(tasks: list[str]) -> list[list[str]]:
    """Tasks by table, so that its lines fit."""
    found: list[list[str]] = [[]]
    for task in tasks:
        if len(found[-1]) == COLUMNS or sum(len(name) + 3 for name in (*found[-1], task)) > COLUMNS_WIDTH:
            found.append([])
        found[-1].append(task)
    return [columns for columns in found if columns]


def learning(evidence: Evidence) -> str:
    """Steps until a task was solved, in the comparison of several pairs in one token."""
    groups = [group for group in evidence.groups if group.file == "pairs"]
    goal = next((group.line["settings"].get("stop_at") for group in groups), None)
    if goal is None:
        return "No run of this is in the repository yet."
    tasks, rules = (list(dict.fromkeys(getattr(group, what) for group in groups)) for what in ("task", "label"))
    rows = {rule: [""] * len(tasks) for rule in rules}
    for group in groups:
        solved = [group.steps[seed] for seed, score in group.validation.items() if score >= goal]
        # A mean of the seeds that made it would flatter a rule of which others did not.
        whole = len(solved) == len(group.validation)
        some = f"{len(solved)} of {len(group.validation)} ({shown(group.score(), 2)})"
        cell = shown(estimate(solved), 0) if whole else some
        rows[group.label][tasks.index(group.task)] = cell
    header = ["rule", *tasks]
    seeds = max(len(group.runs) for group in groups)
    said = paragraph(
        f"Steps until {number(goal, 3)} of the answers on validation are right, at the learning rate that was best in the",
        f"search, up to {seeds} seeds, one head, no convolution. Where a seed did not get there: how many did, and the mean",
        "accuracy of all on test.",
    )
    return joined(said, table(header, [[rule, *cells] for rule, cells in rows.items()]))


def facts(evidence: Evidence) -> dict[str, dict[int, Group]]:
    """Recall of several facts in one token: by the name of a line in the picture, the runs of a rule by facts a token."""
    found: dict[str, dict[int, Group]] = {}
    for name, wanted in FACTS.items():
        groups = [group for group in evidence.groups if group.file == "pairs" and wanted(group)]
        of_count = {
            _facts_a_token(group): group for group in groups if group.line["settings"]["model"]["conv_size"] == 1
        }
        if of_count:
            found[name] = dict(sorted(of_count.items()))
    return found


def _facts_a_token(group: Group) -> int:
    return int(group.line["settings"]["task_options"]["pairs_per_token"])


def facts_sentence(evidence: Evidence, count: int = 4) -> str:
    """What ranks recall where a token carries four facts; empty without enough seeds of both."""
    found = facts(evidence)
    groups = [found.get(name, {}).get(count) for name in (RANK_2, RANK_1)]
    ours, theirs = (None if group is None else group.score() for group in groups)
    if ours is None or theirs is None or min(ours.count, theirs.count) < FEWEST:
        return ""
    guess = ", a guess among them" if abs(theirs.mean - 1 / count) < 0.02 else ""
    said = f"Where a token carries {WORDS[count]} facts, rank 2 with full keys recalls {shown(ours, 2)} of them and"
    said += f" rank 1 {shown(theirs, 2)}{guess}"
    shared = found.get(SHARED_KEY, {}).get(count)
    if shared is not None and shared.score().count >= FEWEST:
        said += f"; along one key, rank 2's maps give {shown(shared.score(), 2)}"
    return f"{said} ({min(ours.count, theirs.count)} seeds)."


def facts_table(evidence: Evidence) -> str:
    """Accuracy by facts a token: a row per rule of the picture, with how many seeds learned the task."""
    found = facts(evidence)
    counts = sorted({count for groups in found.values() for count in groups})
    if not counts:
        return "No run of this is in the repository yet."
    rows = []
    for name, groups in found.items():
        cells = []
        for count in counts:
            group = groups.get(count)
            values = [] if group is None else [*group.values().values()]
            # Above .9: a guess among the facts of the right token gets half at most.
            cells.append(
                "" if group is None else f"{shown(group.score(), 2)}, {sum(v > 0.9 for v in values)}/{len(values)}"
            )
        rows.append([name, *cells])
    said = paragraph(
        "Accuracy on test after at most 3,000 steps, and how many seeds recall more than nine tenths (`pairs`, 16 facts in",
        "all, one head with keys of 32, no convolution, equal parameters and state). Learning rates as in the search.",
    )
    header = ["facts in a token", *map(str, counts)]
    return joined(said, table(header, rows))


def searches(evidence: Evidence) -> str:
    """Of rules without a final run on a task, the best score on validation in the search for a learning rate."""
    final = {(group.file, group.task, group.label) for group in evidence.groups}
    best: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for line in evidence.lines:
        place = (line["rule"], line["task"])
        if line["status"] != "done" or line.get("phase") != "search" or (line["file"], *reversed(place)) in final:
            continue
        value, found = line["result"].get("validation"), best[line["file"]]
        choose = min if line["result"].get("better") == "lower" else max
        if value is not None:
            found[place] = choose(value, found.get(place, value))
    parts = []
    for file, found in best.items():
        tasks, rules = (list(dict.fromkeys(place[i] for place in found)) for i in (1, 0))
        for start, columns in enumerate(_columns(tasks)):
            rows = [
                [rule, *[number(found[rule, t], 3) if (rule, t) in found else "" for t in columns]] for rule in rules
            ]
            said = "" if start else f"`{file}`:"
            parts.append(joined(said, table(["rule", *columns], [row for row in rows if any(row[1:])])))
    return joined(*parts) or "Every search was followed by final runs."


def unfinished(evidence: Evidence) -> str:
    """What failed or was stopped, counted by comparison and task."""
    counts: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for line in evidence.unfinished:
        why = str(line.get("error", ""))[:40].replace("|", "/").replace("KeyboardInterrupt", "interrupted")
        counts[line["file"], line["task"], line["status"], why].append(str(line["rule"]))
    if not counts:
        return "No run of the stored results failed or was stopped."
    rows = [[f"`{file}`, {task}", status, why, str(len(rules))] for (file, task, status, why), rules in counts.items()]
    return table(["comparison and task", "status", "why", "runs"], rows, left=3)
