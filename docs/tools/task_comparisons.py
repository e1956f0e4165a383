"""Tables of the comparisons on synthetic tasks: scores, steps to learn, searches; and what of any comparison did not finish."""

from __future__ import annotations

from collections import defaultdict

from evidence import ELSEWHERE, Evidence, Group, Pair, ranks
from wording import joined, number, paragraph, shown, table

from prism.compare.statistics import FEWEST, estimate

COLUMNS = 4
"""Tasks side by side in a table, so that its lines fit."""
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
            said = "" if start else paragraph(f"`{file}`, {measured}, up to {seeds} seeds:")
            parts.append(joined(said, table(["rule", *columns], [row for row in rows if any(row[1:])])))
    return joined(*parts) or "No comparison on synthetic tasks is in the repository yet."


def _columns(tasks: list[str]) -> list[list[str]]:
    """Tasks by table, so that its lines fit."""
    return [tasks[start : start + COLUMNS] for start in range(0, len(tasks), COLUMNS)]


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
        f"search, {seeds} seeds, one head, no convolution. Where a seed did not get there: how many did, and the mean",
        "accuracy of all on test.",
    )
    return joined(said, table(header, [[rule, *cells] for rule, cells in rows.items()]))


def learning_gain(evidence: Evidence) -> str:
    """`rank 2 learns … in .39 of the steps of rank 1`, of two pairs in a token; empty without results."""
    found = (p for p in ranks(evidence, "recall") if p.first.file == "pairs" and p.first.task == "2 pairs a token")
    pair = next((pair for pair in found if pair.gain.count >= FEWEST), None)
    if pair is None:
        return ""
    settings = pair.first.line["settings"]
    ours, theirs = (
        {seed: group.steps[seed] for seed, score in group.validation.items() if score >= settings["stop_at"]}
        for group in (pair.first, pair.second)
    )
    of = len(pair.second.validation)
    if len(ours) < len(pair.first.validation):
        every = len(pair.first.validation)
        return f"rank 2 learns to recall them with {len(ours)} of {every} seeds, rank 1 with {len(theirs)} of {of}"
    if len(theirs) == of:
        ratio = estimate(ours.values()).mean / estimate(theirs.values()).mean
        return f"rank 2 learns to recall them in {ratio:.2f} of the steps of rank 1 ({min(len(ours), of)} seeds)"
    steps = shown(estimate(ours.values()), 0)
    within = f"{len(theirs)} of {of} seeds in {settings['steps']:,}"
    return f"rank 2 learns to recall them in {steps} steps, and rank 1 with {within}"


def unlearned(evidence: Evidence) -> Pair | None:
    """Rank 2 and rank 1 that start alike, with four pairs in a token: neither gets all right. None without results."""
    found = (p for p in ranks(evidence, "recall") if p.first.file == "pairs" and p.first.task == "4 pairs a token")
    return next((pair for pair in found if pair.gain.count >= FEWEST), None)


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
