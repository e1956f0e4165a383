"""What docs/howto/adapter.md says of adapters and LoRA at equal numbers of trained parameters."""

from __future__ import annotations

from typing import Any

from evidence import Evidence, Group
from wording import joined, number, paragraph, shown, table

KIND = "adapter"
TEXT, RECALL = "adapter text", "adapter recall"
NAMES = {"base": "base", "lora": "LoRA", "prism": "PRISM adapter", "both": "both, half each"}
OLD = "first text"
LIMIT = 1.3
"""Time of a step of the adapter, as a multiple of LoRA's, that must not be exceeded."""


def adapters(evidence: Evidence) -> str:
    """Verdict, table and step times."""
    tasks = {task: {g.rule: g for g in evidence.of(KIND) if g.task == task} for task in (TEXT, RECALL)}
    if not all({"lora", "prism"} <= groups.keys() for groups in tasks.values()):
        return "The comparison was not run yet."
    verdicts = [verdict(what, tasks[task]) for task, what in ((TEXT, "text of a new domain"), (RECALL, "recall"))]
    return joined(
        paragraph(*verdicts),
        paragraph(conditions(tasks[TEXT]["lora"]), spent(evidence)),
        results(tasks),
        paragraph(*speed(evidence)),
    )


def verdict(what: str, groups: dict[str, Group]) -> str:
    """How the adapter and both together differ from LoRA alone: beyond two standard errors, or not."""
    said = []
    for rule, subject in (("prism", "the PRISM adapter"), ("both", "both together")):
        if rule in groups:
            gain = groups[rule].gain(groups["lora"])
            relation = ("beats" if gain.mean > 0 else "loses to") if gain.significant else "cannot be told from"
            said.append(f"{subject} **{relation}** LoRA alone ({shown(gain, 3, sign=True)})")
    return f"On {what}, {', and '.join(said)}."


def conditions(group: Group) -> str:
    """How the models were trained."""
    s: dict[str, Any] = group.line["settings"]
    size = f"{(group.parameters or 0) / 1e6:.2f} M parameters"
    return (
        f"The setting is tiny: {s['layers']} layers of width {s['width']} ({size}, bytes), pretrained for"
        f" {s['pretraining_steps']} steps of {s['batch']} × {s['context']} on novels, fine-tuned for {s['steps']} steps on"
        f" documentation, and for {s['recall_steps']} on recall of {s['pairs']} pairs of letters; {len(group.runs)} seeds, each"
        f" with a pretraining of its own; {len(s['learning_rates'])} learning rates tried by every method with the first seed."
    )


def spent(evidence: Evidence) -> str:
    """The time of all trainings, which final lines of the first seed share with those of the search."""
    lines = [line for line in evidence.lines if line["task"].startswith(KIND) and line["phase"] != "speed"]
    seconds = {line["result"]["seconds"] for line in lines}
    return f"All of it took {sum(seconds) / 60:.0f} minutes on one busy core."


def results(tasks: dict[str, dict[str, Group]]) -> str:
    """A row per method: trained parameters, scores, and differences from LoRA paired by seed; positive is better."""
    rows = []
    for rule, name in NAMES.items():
        cells = [name]
        for task, digits in ((TEXT, 3), (RECALL, 3)):
            group = tasks[task].get(rule)
            if group is None:
                cells += ["", ""] if task == RECALL else ["", "", ""]
                continue
            if task == TEXT:
                cells.append(f"{group.line['result']['trained']:,}")
            cells += [shown(group.score(), digits)]
            cells.append("" if rule == "lora" else shown(group.gain(tasks[task]["lora"]), digits, sign=True))
            if task == TEXT:
                cells.append(shown(group.score(OLD), digits))
        rows.append(cells)
    return table(["", "trained", "nats a byte", "better by", "novels after", "recall", "better by"], rows)


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
