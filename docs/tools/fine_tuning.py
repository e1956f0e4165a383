"""What docs/howto/adapter.md says of adapters and LoRA at equal numbers of trained parameters."""

from __future__ import annotations

from typing import Any

from evidence import Evidence, Group
from wording import joined, number, paragraph, shown, table

KIND = "adapter"
TEXT = "adapter text"
NAMES = {"base": "base", "lora": "LoRA", "prism": "PRISM adapter", "both": "both, half each"}
OLD = "first text"
LIMIT = 1.3
"""Time of a step of the adapter, as a multiple of LoRA's, that must not be exceeded."""


def adapters(evidence: Evidence) -> str:
    """Verdict, table and step times."""
    tasks: dict[str, dict[str, Group]] = {}
    for group in evidence.of(KIND):
        tasks.setdefault(group.task, {})[group.rule] = group
    tasks = {task: tasks[task] for task in sorted(tasks, reverse=True) if {"lora", "prism"} <= tasks[task].keys()}
    if TEXT not in tasks:
        return "The comparison was not run yet."
    return joined(
        paragraph(*[verdict(name_of(task), groups) for task, groups in tasks.items()]),
        paragraph(conditions(tasks[TEXT]["lora"]), rates(tasks), spent(evidence)),
        *[results(task, groups) for task, groups in tasks.items()],
        paragraph(*speed(evidence)),
    )


def name_of(task: str) -> str:
    """What a task is called on the page."""
    kind, _, steps = task.removeprefix(f"{KIND} ").partition(", ")
    return "text of a new domain" if kind == "text" else f"recall after {steps} sequences"


def verdict(what: str, groups: dict[str, Group]) -> str:
    """How the adapter and both together differ from LoRA alone: significantly, or not."""
    said = []
    for rule, subject in (("prism", "the PRISM adapter"), ("both", "the combination of both")):
        if rule in groups:
            gain = groups[rule].gain(groups["lora"])
            relation = (
                ("beats" if gain.mean > 0 else "loses to") if gain.significant else "does not differ significantly from"
            )
            said.append(f"{subject} **{relation}** LoRA alone ({shown(gain, 3, sign=True)})")
    return f"On {what}, {', and '.join(said)}."


def conditions(group: Group) -> str:
    """How the models were trained."""
    s: dict[str, Any] = group.line["settings"]
    size = f"{(group.parameters or 0) / 1e6:.2f} M parameters"
    return (
        f"The setting is tiny: {s['layers']} layers of width {s['width']} ({size}, bytes), pretrained for"
        f" {s['pretraining_steps']} steps of {s['batch']} × {s['context']} on novels, fine-tuned for {s['steps']} steps on"
        f" documentation, or on recall of {s['pairs']} pairs of letters (a guess among the values shown:"
        f" {number(1 / s['pairs'], 2)}); {len(group.runs)} seeds, each"
        f" with a pretraining of its own; {len(s['learning_rates'])} learning rates tried by every method with the first seed."
    )


def rates(tasks: dict[str, dict[str, Group]]) -> str:
    """How many searches ended at the highest rate, where a higher one might be better still."""
    lines = [group.line for groups in tasks.values() for group in groups.values() if group.rule != "base"]
    highest = sum(line["learning_rate"] == max(line["settings"]["learning_rates"]) for line in lines)
    return f"The higher rate was chosen in {highest} of {len(lines)} cases." if highest else ""


def spent(evidence: Evidence) -> str:
    """The time of all trainings, which final lines of the first seed share with those of the search."""
    lines = [line for line in evidence.lines if line["task"].startswith(KIND) and line["phase"] != "speed"]
    seconds = {line["result"]["seconds"] for line in lines}
    return f"All of it took {sum(seconds) / 60:.0f} minutes on one busy core."


def results(task: str, groups: dict[str, Group]) -> str:
    """A row per method: trained parameters, scores, and differences from LoRA paired by seed; positive is better."""
    text, rows = task == TEXT, []
    for rule, group in ((rule, groups[rule]) for rule in NAMES if rule in groups):
        gain = "" if rule == "lora" else shown(group.gain(groups["lora"]), 3, sign=True)
        rows.append([NAMES[rule], f"{group.line['result']['trained']:,}", shown(group.score(), 3), gain])
        rows[-1] += [shown(group.score(OLD), 3)] if text else []
    header = [name_of(task), "trained", groups["lora"].metric, "better by"]
    return table([*header, "novels after"] if text else header, rows)


def speed(evidence: Evidence) -> list[str]:
    """Step times against the limit."""
    lines = [line["result"] for line in evidence.lines if line["task"] == "adapter step"]
    ratios = {line["width"]: line["ratio to lora"] for line in lines}
    if not ratios:
        return []
    said = " and ".join(f"{number(found['prism'], 2)} (width {width})" for width, found in ratios.items())
    both = " and ".join(number(found["both"], 2) for found in ratios.values())
    kept = all(found["prism"] <= LIMIT for found in ratios.values())
    return [
        f"A training step of the adapter takes {said} times as long as LoRA's at equal numbers of trained parameters,"
        f" in one process on one core: {'within' if kept else '**above**'} the limit of {LIMIT}. Both together take {both}."
    ]
