"""Tables of the comparisons on text: every model, longer contexts, starts, rivals, choices of PRISM, learning rates."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from evidence import LAMBADA, RARE, RATES, Evidence, Group, Pair, equal_starts, is_prism, is_rule
from wording import joined, number, paragraph, shown, table

from prism.lab.statistics import FEWEST, estimate, paired


def text(evidence: Evidence) -> str:
    """A table per corpus and size: how it was trained, nats, the gain over Gated DeltaNet, and recall in the wild."""
    parts = []
    for (file, task), groups in _by_task(evidence.of("text")).items():
        reference = next(filter(is_rule("gated_delta"), groups), None)
        rows = []
        for group in sorted(groups, key=lambda group: group.score().mean):
            gain = "" if reference in (None, group) else shown(group.gain(reference), 3, sign=True)
            rare = shown(group.score(RARE), 2) if group.values(RARE) else ""
            validation = shown(estimate(group.validation.values()), 2)
            rows.append([group.label, shown(group.score(), 3), gain, rare, validation])
        header = ["rule", "test", "better by", "rare bigrams", "validation"]
        parts.append(joined(paragraph(f"**{task}** (`{file}`): {training(groups)}."), table(header, rows)))
    return joined(*parts) or "No comparison on text is in the repository yet."


def overview(evidence: Evidence) -> str:
    """README's table: every model of the largest budget on text, the best first, with a column for each corpus.

    Models with fewer seeds than a verdict needs stand below those with enough.
    """
    groups = [group for group in evidence.of("text") if group.tokens]
    if not groups:
        return "No comparison on text is in the repository yet."
    most = max(group.tokens for group in groups)
    of_label: dict[str, dict[str, Group]] = defaultdict(dict)
    for group in groups:
        if group.tokens == most:
            of_label[group.label][group.task] = group
    tasks = sorted({task for found in of_label.values() for task in found}, reverse=True)
    whole = {label: found for label, found in of_label.items() if len(found) == len(tasks)}
    rows = []
    for label, found in whole.items():
        name = f"`{label}`" if label == found[tasks[0]].rule else label
        seeds = min(len(group.runs) for group in found.values())
        total = sum(group.score().mean for group in found.values())
        row = [name, *(shown(found[task].score(), 3) for task in tasks), str(seeds)]
        rows.append((seeds < FEWEST, total, row))
    said = f"Nats a token on held-out text: {training([g for found in whole.values() for g in found.values()])}."
    if any(few for few, *_ in rows):
        said += " Models with one or two seeds stand last: they decide nothing."
    return joined(paragraph(said), table(["model", *tasks, "seeds"], [row for *_, row in sorted(rows)]))


def contexts(evidence: Evidence) -> str:
    """Nats at contexts longer than those of training, and LAMBADA: a table per corpus that has them."""
    parts = []
    for (file, task), groups in _by_task(evidence.of("text")).items():
        labels = dict.fromkeys(label for group in groups for scores in group.runs.values() for label in scores)
        longer = [label for label in labels if label.startswith("nats at ")]
        if not longer:
            continue
        settings = groups[0].line["settings"]
        rows = []
        for group in sorted(groups, key=lambda group: group.score().mean):
            words = shown(group.score(LAMBADA), 3) if group.values(LAMBADA) else ""
            rows.append([group.label, *(shown(group.score(label), 3) for label in (None, *longer)), words])
        header = ["rule", f"{settings['context']:,}", *(label.removeprefix("nats at ") for label in longer), "LAMBADA"]
        keep = [column for column in range(len(header)) if any(row[column] for row in rows)]
        said = f"**{task}** (`{file}`), {training(groups)}:"
        shown_rows = [[row[column] for column in keep] for row in rows]
        parts.append(joined(paragraph(said), table([header[column] for column in keep], shown_rows)))
    return joined(*parts) or "No run with longer contexts is in the repository yet."


def recall_start(evidence: Evidence) -> str:
    """What `start="recall"` is worth: Gated DeltaNet with it and as published, and which of its parts help."""
    parts = []
    pairs = start_pairs(evidence)
    if pairs:
        rows = [
            [
                f"{pair.first.task}, {pair.first.tokens / 1e6:.0f} M tokens{what}",
                *(shown(group.score(label, pair.seeds), 3) for group in (pair.first, pair.second)),
                shown(pair.first.gain(pair.second, label), 3, sign=True),
                str(pair.gain.count),
            ]
            for label, what in ((None, ""), (RARE, ", rare bigrams"))
            for pair in pairs
        ]
        parts.append(table(["nats a token", '`start="recall"`', "as published", "better by", "seeds"], rows))
        parts.append(lead(pairs))
    found = evidence.single("recall_start")
    if found:
        values: dict[str, list[dict[str, float]]] = defaultdict(list)
        for row in found:
            values[row["rule"]].append(row)
        cells = [
            [label, *(shown(estimate(row[what] for row in rows), 3) for what in ("validation", "rare")), str(len(rows))]
            for label, rows in values.items()
        ]
        said = "Which parts help: models of 6 M parameters after 12.3 M tokens of code, nats on validation."
        parts.append(joined(said, table(["start", "all tokens", "rare bigrams", "seeds"], cells)))
    if rows := evidence.single("recommend_start"):
        scores = {
            start: {row["seed"]: row["validation"]["NDCG@10"] for row in rows if row["start"] == start}
            for start in ("drawn", "recall")
        }
        gain = paired(scores["recall"], scores["drawn"])
        said = paragraph(
            "Recommenders keep drawn weights: users seldom repeat what they did in the same order. On MovieLens-100K",
            f'(`recommend_start`, validation, {gain.count} seeds) `start="recall"` changes NDCG@10 by',
            f"{shown(gain, 4, sign=True)}.",
        )
        parts.append(said)
    if rows := evidence.single("bytes_gate"):
        nats = {
            gate: {row["seed"]: row["nats"] for row in rows if row["gate_by"] == gate} for gate in ("silu", "sigmoid")
        }
        loss = paired(nats["sigmoid"], nats["silu"])
        said = paragraph(
            "Models of bytes keep drawn weights and SiLU. With drawn weights a sigmoid as output gate costs",
            f"{shown(loss, 3)} nats a byte (`bytes_gate`, `prism train lm --preset tiny`, validation,",
            f"{loss.count} seeds).",
        )
        parts.append(said)
    return joined(*parts) or "No run of this is in the repository yet."


def lead(pairs: list[Pair]) -> str:
    """How the gain of the start changes with the tokens of training; empty where every corpus has one budget."""
    said = []
    for task in dict.fromkeys(pair.first.task for pair in pairs):
        found = sorted((pair for pair in pairs if pair.first.task == task), key=lambda pair: pair.first.tokens)
        both = (found[0], found[-1])
        seeds = both[0].seeds & both[1].seeds
        tokens = [f"{pair.first.tokens / 1e6:.0f}" for pair in both]
        if tokens[0] != tokens[1] and seeds:
            ends = [
                number(pair.second.score(None, seeds).mean - pair.first.score(None, seeds).mean, 2) for pair in both
            ]
            count = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
            said.append(f"{ends[0]} after {tokens[0]} M tokens and {ends[1]} after {tokens[1]} M on {task} ({count})")
    return paragraph(f"**The lead changes with training**: it is {', '.join(said)}.") if said else ""


def start_pairs(evidence: Evidence) -> list[Pair]:
    """Gated DeltaNet with PRISM's start, and as published; both with SiLU as output gate."""
    _, (_, recalls), *_ = equal_starts("text")
    return evidence.pairs(is_rule("gated_delta", **recalls), is_rule("gated_delta"), "text")


def rival_pairs(evidence: Evidence) -> list[Pair]:
    """Rules of other papers with PRISM's start, and the default PRISM; by tokens, comparison and score."""
    default, _ = equal_starts("text")[0]
    alike = {"start": "recall", "timescales": [1, 1024]}
    found = []
    for groups in _by_task(evidence.of("text")).values():
        ours = next(filter(is_prism(**default), groups), None)
        others = [group for group in groups if group.rule not in ("prism", "gated_delta")]
        rivals = [group for group in others if alike.items() <= group.options.items()]
        found += [] if ours is None else [Pair(rival, ours) for rival in rivals]
    return sorted(found, key=lambda pair: (pair.first.tokens, pair.first.file, pair.first.score().mean))


def ahead(evidence: Evidence) -> dict[str, list[Pair]]:
    """The rivals, by label, that are better than PRISM on every corpus on which both ran with the same start."""
    by_label: dict[str, list[Pair]] = defaultdict(list)
    for pair in rival_pairs(evidence):
        by_label[pair.first.label].append(pair)
    corpora = {pair.first.task for pairs in by_label.values() for pair in pairs}
    return {
        label: pairs
        for label, pairs in by_label.items()
        if {pair.first.task for pair in pairs} == corpora and all(beats(pair) for pair in pairs)
    }


def beats(pair: Pair) -> bool:
    """Whether the first rule is better than the second beyond the spread: significantly; or, with few seeds, with
    every one of its seeds better than every one of the second's."""
    if pair.gain.count >= FEWEST:
        return pair.gain.significant and pair.gain.mean > 0
    return max(pair.first.values().values()) < min(pair.second.values().values())


def rivals(evidence: Evidence) -> str:
    """Rules of other papers that start as PRISM does, against it."""
    pairs = rival_pairs(evidence)
    if not pairs:
        return "No run of this is in the repository yet."
    rows = [
        [
            f"{pair.first.task}, {pair.first.tokens / 1e6:.0f} M tokens, {pair.first.label}",
            *(shown(group.score(), 3) for group in (pair.first, pair.second)),
            shown(pair.gain, 3, sign=True),
            str(pair.gain.count),
        ]
        for pair in pairs
    ]
    best = [label.partition(",")[0] for label in ahead(evidence)]
    said = (
        f"**Better than PRISM on every corpus, with the same start: {' and '.join(best)}.** With fewer than three seeds"
        " this means that every seed of the rule is better than every seed of PRISM."
        if best
        else "With the same start no rule is better than PRISM on every corpus."
    )
    header = ["nats a token on test", "this rule", "prism 2", "better by", "seeds"]
    return joined(paragraph(said), table(header, rows))


def choices(evidence: Evidence) -> str:
    """What the search for a better PRISM found: each choice against the PRISM that starts alike, on validation."""
    parts = []
    for (file, task), groups in _by_task(evidence.of("text")).items():
        for start, _ in equal_starts("text"):
            default = next(filter(is_prism(**start), groups), None)
            others = [g for g in groups if g.rule == "prism" and g is not default and default_of(g) == start]
            if default is None or not others:
                continue
            gains = {group.label: paired(default.validation, group.validation) for group in others}
            rows = [
                [label, shown(gain, 3, sign=True), str(gain.count)]
                for label, gain in sorted(gains.items(), key=lambda item: -item[1].mean)
            ]
            better = [label for label, gain in gains.items() if gain.significant and gain.mean > 0]
            said = paragraph(
                f"**{task}** (`{file}`), nats a token by which a choice is better than *{default.label}* on validation.",
                f"Significantly better, with three seeds or more: {', '.join(better) if better else 'none'}.",
            )
            parts.append(joined(said, table(["choice", "better by", "seeds"], rows)))
    return joined(*parts) or "No choice was searched yet."


def default_of(group: Group) -> dict[str, Any]:
    """The start and gate of the PRISM that a choice is compared with: the choice's own. A choice that *is* another start,
    other timescales or another gate is compared with what it replaces."""
    default, silu, spread, drawn = (ours for ours, _ in equal_starts("text"))
    if group.options.get("preset") == "paper":  # that has no other start
        return drawn
    if group.options.get("gate_by") != "silu" or is_prism(**silu)(group):
        return default
    if is_prism(**spread)(group) or is_prism(**drawn)(group):
        return silu
    if group.options.get("timescales") == "drawn":
        return drawn
    return spread if group.options.get("start") == "drawn" else silu


def rates(evidence: Evidence) -> str:
    """Rules at other learning rates: nats on validation by corpus and rate, next to the same seeds at the plans' own rate."""
    runs: dict[tuple[str, str], dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    others = evidence.of(RATES)
    for group in others:
        corpus = group.task.partition(",")[0]
        runs[corpus, group.label][group.line["learning_rate"]] |= group.validation
    if not runs:
        return "No run of this is in the repository yet."
    tokens = {group.tokens for group in others}
    for group in evidence.of("text"):
        if (group.task, group.label) in runs and group.tokens in tokens:
            seeds = {seed for found in runs[group.task, group.label].values() for seed in found}
            kept = {seed: value for seed, value in group.validation.items() if seed in seeds}
            runs[group.task, group.label][group.line["learning_rate"]] |= kept
    columns = sorted({rate for found in runs.values() for rate in found})
    rows = [
        [f"{corpus}, {label}", *(shown(estimate(found.get(rate, {}).values()), 3) for rate in columns)]
        for (corpus, label), found in sorted(runs.items(), key=lambda item: item[0][0])
    ]
    seeds = min(len(values) for found in runs.values() for values in found.values())
    best = {min(found, key=lambda rate: estimate(found[rate].values()).mean) for found in runs.values()}
    said = paragraph(
        f"Nats on validation after {min(tokens) / 1e6:.0f} M tokens at other learning rates (`text_rates`), {seeds}",
        f"seed{'s' * (seeds > 1)} each. They are lowest at {' or '.join(f'{rate:g}' for rate in sorted(best))}.",
    )
    return joined(said, table(["corpus and rule", *(f"{rate:g}" for rate in columns)], rows))


def training(groups: list[Group]) -> str:
    """What the trainings of a table on text have in common, as far as their lines say it."""
    sizes = dict.fromkeys(f"{(group.parameters or 0) / 1e6:.1f}" for group in sorted(groups, key=_size))
    said = [f"{' to '.join([*sizes][:: max(1, len(sizes) - 1)])} M parameters"]
    seeds = sorted({len(group.runs) for group in groups})
    said.append(f"{' to '.join(map(str, seeds[:: max(1, len(seeds) - 1)]))} seed{'s' * (seeds[-1] > 1)}")
    settings, result = (groups[0].line.get(part, {}) for part in ("settings", "result"))
    if "tokens" in result:
        batch = f"{settings['steps']:,} steps of {settings['batch']} × {settings['context']}"
        said.append(f"{result['tokens'] / 1e6:.1f} M tokens ({batch})")
    rates = {group.line.get("learning_rate") for group in groups} - {None}
    if rates:
        said.append(
            f"learning rate {rates.pop()} for every rule" if len(rates) == 1 else "a learning rate for each rule"
        )
    said += ["CUDA graphs"] * bool(settings.get("graph"))
    machine = groups[0].line.get("machine", {}).get("gpu")
    return ", ".join([*said, *([machine] if machine else [])])


def _size(group: Group) -> int:
    return group.parameters or 0


def _by_task(groups: list[Group]) -> dict[tuple[str, str], list[Group]]:
    found: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in groups:
        found[group.file, group.task].append(group)
    return found
