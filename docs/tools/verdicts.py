"""What the results say of each claim of the paper: a verdict, a figure for the table, and text with a table.

The criteria are code, so that results cannot choose them: a difference, paired by seed, counts if it is significant at 5 %
by Student's t. Without results a verdict is "not run yet". claims.py writes the findings into the pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from criteria import (
    FAILS,
    HOLDS,
    NOT_RUN,
    NOTHING,
    PART,
    SHORT,
    UNSEEN,
    Finding,
    against,
    both_ways,
    judge,
    judge_equal,
    named_gains,
)
from evidence import (
    ELSEWHERE,
    RARE,
    SHARED,
    SILU,
    Evidence,
    Pair,
    default_start,
    equal_starts,
    is_default,
    is_prism,
    is_rule,
    largest,
    ranks,
    ranks_with,
)
from scripted import anchor, forgetting, parameters, rank
from wording import joined, paragraph, shown, table

from prism.lab.statistics import FEWEST, Estimate


def earlier(evidence: Evidence, model: str, other: str) -> Estimate:
    """An earlier difference in NDCG@10 on MovieLens-1M, of which only mean and error were kept."""
    figure = evidence.figures["recommenders"]
    place = {"sasrec": 2, "gated_delta": 4}[other]
    mean, error = figure["rows"][model][place : place + 2]
    return Estimate(mean, error, figure["seeds"])


VOCABULARY = 8192
"""Tokens of the BPE of experiments/novels.py and code_corpus.py."""
SIDE_FEATURES = "ml-100k-gaps"
"""The log of experiments/recommend.py with a feature next to the items: the paper's ablation is on such a log."""
EARLIER = "On MovieLens-1M (NDCG@10, three seeds, an earlier run of which means and errors were kept)"


def speed(evidence: Evidence) -> Finding:
    figure = evidence.figures["networks"]
    ours, *others = figure["rows"].items()
    ratios = {name: ours[1][0] / rate for name, (rate, _) in others}
    serial = next(ratio for name, ratio in ratios.items() if "serial" in name)
    verdict = HOLDS if serial >= figure["paper"] else FAILS
    text = paragraph(
        f"PRISM of rank 2 is {serial:.0f} times as fast as a serial TTT-MLP that is one fused kernel, not",
        f"{figure['paper']} times. One run on one H200, so without a spread.",
    )
    return Finding(verdict, f"{serial:.0f} × a serial form in one fused kernel", joined(text, networks(evidence)))


def networks(evidence: Evidence) -> str:
    """The table of memories that are networks."""
    rows = list(evidence.figures["networks"]["rows"].items())
    ours = rows[0][1][0]
    cells = [
        [name, f"{rate:g}", "" if rate == ours else f"{ours / rate:.2g}×", f"{memory} GiB"]
        for name, (rate, memory) in rows
    ]
    return table(["model", "thousand tokens/s", "PRISM is faster by", "peak memory"], cells)


def transformer(evidence: Evidence) -> Finding:
    pairs = evidence.pairs(is_default, is_rule("softmax"), "text", "recommendation")
    gains = [(pair.gain, pair.second.score().mean) for pair in largest(pairs)]
    said, parts = [], named_gains(pairs)
    if not any(pair.first.kind == "recommendation" for pair in pairs):
        old = earlier(evidence, "prism-2", "sasrec")  # the default, as on text
        gains.append((old, evidence.figures["recommenders"]["rows"]["prism-2"][0] - old.mean))
        parts.append(("ML-1M", old, 4))
        deeper, first = earlier(evidence, "prism-3", "sasrec"), earlier(evidence, "gated_delta", "sasrec")
        said.append(
            f"{EARLIER}, PRISM is better than SASRec by {shown(old)} (L = 3: {shown(deeper)}; Gated DeltaNet: {shown(first)})."
        )
    text = [pair.gain for pair in pairs if pair.first.kind == "text"]
    verdict = judge_equal(gains)
    if not any(gain.count >= FEWEST for gain in text):
        said.append("Text has too few seeds to decide." if text else "Text was not run yet.")
        verdict = PART if verdict == HOLDS else verdict
    return Finding(verdict, both_ways(parts), joined(against(pairs), paragraph(*said)))


def gated_delta(evidence: Evidence) -> Finding:
    """PRISM and Gated DeltaNet start alike, so that only the rank differs; where that was not run, as published."""
    kinds = ("text", "recommendation")
    published = evidence.pairs(is_default, is_rule("gated_delta"), *kinds)
    alike = ranks(evidence, *kinds)
    ran = {pair.first.kind if pair.first.kind == "text" else pair.first.task for pair in alike}
    apart = [pair for pair in published if not {pair.first.kind, pair.first.task} & ran]
    pairs = [*alike, *apart]
    said = []
    gains = [pair.gain for pair in largest(pairs)]
    parts = named_gains(pairs)
    if not any(pair.first.kind == "recommendation" for pair in pairs):
        olds = {L: earlier(evidence, f"prism-{L}", "gated_delta") for L in (2, 3)}
        gains += olds.values()
        cells = ", ".join(f"L = {L} {shown(old, sign=True)}" for L, old in olds.items())
        said.append(f"{EARLIER}: {cells}.")
        parts += [("ML-1M", old, 4) for old in olds.values()]
    elif any(pair.first.kind == "recommendation" for pair in apart):
        said.append(
            "In recommenders PRISM's decays are spread over the heads and Gated DeltaNet's drawn: not the rank alone."
        )
    verdict = judge(gains)
    if not any(pair.first.kind == "text" for pair in pairs):
        said.append("Text was not run yet.")
        verdict = {FAILS: UNSEEN, HOLDS: PART}.get(verdict, verdict)  # half of the evidence decides nothing
    whole = [pair for pair in published if pair.first.kind == "text" and default_start(pair) and pair not in pairs]
    why = paragraph(
        "The default `prism` also starts otherwise than Gated DeltaNet is published, and has another output gate. Together",
        "this is worth far more than the rank ([the start](text.md#an-untrained-layer-that-recalls), [the",
        "gate](search.md)):",
    )
    matched = [pair for pair in pairs if default_start(pair) or pair.first.kind == "recommendation"] or pairs
    others = [pair for pair in pairs if pair not in matched]
    tables = [against(matched), with_gates(evidence), paragraph(*said), on_probes(evidence)]
    older = "Rank 2 and rank 1 that both have an older start or gate:" if others else ""
    more = [older, against(others), *([why, against(whole)] if whole else []), all_probes(evidence)]
    return Finding(verdict, both_ways(parts), joined(*tables), joined(*more))


def with_gates(evidence: Evidence) -> str:
    """Rank 2 and rank 1 on text where both have decays per channel, or the older output gate; empty without results."""
    parts = []
    for what, options in SHARED.items():
        pairs = ranks_with(evidence, **options)
        if not pairs:
            continue
        better = sum(pair.gain.significant and pair.gain.mean > 0 for pair in pairs)
        said = f"Where both have {what}, rank 2 is significantly better on {better} of {len(pairs)}"
        if options == SILU:  # the page of evidence has their table
            parts.append(paragraph(f"{said} ([table](evidence/ranks.md))."))
            continue
        rows = [
            [
                f"{pair.first.task}, {pair.first.tokens / 1e6:.0f} M tokens, nats",
                *(shown(group.score(seeds=pair.seeds), 4) for group in (pair.first, pair.second)),
                shown(pair.gain, 4, sign=True),
                str(pair.gain.count),
            ]
            for pair in pairs
        ]
        parts += [paragraph(f"{said}:"), table(["task", "rank 2", "rank 1", "better by", "seeds"], rows)]
    return joined(*parts)


def probe_pairs(evidence: Evidence) -> tuple[list[Pair], list[Pair]]:
    """On synthetic tasks: rank 2 and rank 1 that start alike, and the default PRISM and Gated DeltaNet as published."""
    kinds = sorted({group.kind for group in evidence.groups} - set(ELSEWHERE))
    same = [pair for pair in ranks(evidence, *kinds) if default_start(pair)]
    return same, evidence.pairs(is_default, is_rule("gated_delta"), *kinds)


def on_probes(evidence: Evidence) -> str:
    """Where rank 2 is better or worse than rank 1 on synthetic tasks, both with the same start and gate."""
    same, published = probe_pairs(evidence)
    if not same and not published:
        return "Synthetic tasks were not run yet."
    if not same:
        return paragraph(f"Synthetic tasks, against Gated DeltaNet as published: {counted(published)}.")
    return paragraph(
        f"Synthetic tasks, with the same start and gate: {counted(same)}. Tasks that both solve, or in which neither does",
        "better than a guess, do not count ([all](evidence/ranks.md)).",
    )


def counted(pairs: list[Pair]) -> str:
    """On how many tasks that can show a difference the first rule is better or worse, and on which."""
    open_tasks = [pair for pair in pairs if not shows_no_difference(pair)]
    said = []
    for word, sign in (("better", 1), ("worse", -1)):
        found = [pair for pair in open_tasks if pair.gain.significant and sign * pair.gain.mean > 0]
        names = f" ({', '.join(map(named, found))})" if found else ""
        said.append(f"{word} on {len(found)} of {len(open_tasks)}{names}")
    return ", ".join(said)


def all_probes(evidence: Evidence) -> str:
    """The tables of both comparisons on synthetic tasks."""
    same, published = probe_pairs(evidence)
    parts = []
    if same:
        parts += ["Synthetic tasks, both with the same start and gate:", against(same)]
    if published:
        said = f"Synthetic tasks, against Gated DeltaNet as published (other decays and gate): {counted(published)}."
        parts += [paragraph(said), against(published)]
    return joined(*parts)


def retrieval(evidence: Evidence) -> Finding:
    """Recall tasks, on text repeated rare bigrams, and HR@200 on a log with side features, against the nats of all tokens.

    Both ranks start alike. What neither recalls better than about a guess does not count, nor a task that both solve. Only
    what rank 1 loses more of than of its nats speaks for the claim.
    """
    wide = evidence.pairs(is_prism(rank=32), is_rule("gated_delta", **equal_starts("recall")[0][1]), "recall")
    recall = [*ranks(evidence, "recall"), *wide]
    on_text = ranks(evidence, "text")
    text = largest(on_text)
    matched = [pair for pair in on_text if default_start(pair)] or text
    rare = [pair for pair in matched if has_rare(pair)]
    guess = [p for p in rare if min(g.score(RARE).mean for g in (p.first, p.second)) > 0.8 * math.log(VOCABULARY)]
    counted = [pair for pair in rare if pair not in guess]
    open_tasks = [pair for pair in (*largest(ranks(evidence, "recall")), *wide) if not shows_no_difference(pair)]
    logs = [pair for pair in ranks(evidence, "recommendation") if pair.first.task == SIDE_FEATURES]
    published = evidence.pairs(is_default, is_rule("gated_delta"), "recommendation")
    other_logs = [pair for pair in published if pair.first.task == SIDE_FEATURES]
    tests: list[tuple[Pair, str | None]] = [
        *((pair, None) for pair in open_tasks),
        *((pair, RARE) for pair in counted),
        *((pair, "HR@200") for pair in logs),
    ]
    if not (tests or guess) or not text:
        return Finding(NOT_RUN, "", joined("Runs on text and on recall with both ranks are needed.", against(recall)))

    def gain(pair: Pair, label: str | None = None) -> Estimate:
        return pair.first.gain(pair.second, label)

    def loss(pair: Pair, label: str | None = None) -> float:
        """By which share rank 1 is worse."""
        return gain(pair, label).mean / max(abs(group.score(label).mean) for group in (pair.first, pair.second))

    said = ["Recall tasks were not finished; on text, recall shows in repeated rare bigrams."] * (not recall)
    if guess:
        said.append(
            f"On {' and '.join(pair.first.task for pair in guess)} both are near {math.log(VOCABULARY):.2f} nats, the loss of a"
            f" uniform guess among {VOCABULARY:,} tokens: nothing is recalled there, so it does not count."
        )
    closed = [pair for pair in recall if default_start(pair) and shows_no_difference(pair)]
    if closed:
        said.append(f"Recall tasks that both solve or neither learns do not count: {'; '.join(map(named, closed))}.")
    of_text = against([pair for pair in matched if has_rare(pair)], RARE)
    on_log = [against(logs, "HR@200"), against(logs, "AUC")]
    text_of = joined(bigrams(rare), paragraph(*said), against(open_tasks), of_text, *on_log)
    older = [pair for pair in on_text if pair not in matched]
    with_rare = [pair for pair in older if has_rare(pair)]
    more = joined(
        "Rank 2 and rank 1 on recall, at every start that both had:",
        against(recall),
        "On text, at older starts and gates:" if older else "",
        against(older),
        against(with_rare, RARE),
        f"On {SIDE_FEATURES}, against Gated DeltaNet as published, which starts with other decays:"
        if other_logs
        else "",
        against(other_logs, "HR@200"),
        against(other_logs, "AUC"),
    )
    if not tests:
        return Finding(UNSEEN, "", text_of, more)
    most = max(loss(pair) for pair in matched)
    found = [gain(*test) for test in tests]
    speak = [one.significant and one.mean > 0 and loss(*test) > most for one, test in zip(found, tests, strict=True)]
    verdict = judge(found)
    if verdict in (HOLDS, PART):
        verdict = HOLDS if all(speak) else PART if any(speak) or verdict == HOLDS else UNSEEN
    parts = [
        (
            pair.first.task.removesuffix(" a token") if label is None else "rare bigrams" if label == RARE else label,
            one,
            2,
        )
        for one, (pair, label) in zip(found, tests, strict=True)
    ]
    return Finding(verdict, both_ways(parts), text_of, more)


def bigrams(pairs: list[Pair]) -> str:
    """What text says of recall: how much better rank 2 is on repeated rare bigrams; empty without runs."""
    if not pairs:
        return ""
    gains = [(pair, pair.first.gain(pair.second, RARE)) for pair in pairs]
    said = ", ".join(
        f"{pair.first.task} {shown(gain, 3, sign=True)} after {pair.first.tokens / 1e6:.0f} M tokens"
        for pair, gain in gains
    )
    better, worse = (sum(gain.significant and (gain.mean > 0) == up for _, gain in gains) for up in (True, False))
    count = f"significantly better on {better} of {len(gains)} and worse on {worse}"
    return (
        paragraph(f"On text it is not recall that improves: on repeated rare bigrams rank 2 is {count} ({said}).")
        if (better <= worse)
        else paragraph(f"On repeated rare bigrams rank 2 is {count} ({said}).")
    )


def named(pair: Pair) -> str:
    """The task, with its comparison if that is synthetic: two of them have tasks of the same name."""
    task = SHORT.get(pair.first.task, pair.first.task)
    return f"{task} (`{pair.first.file}`)" if pair.first.kind == "recall" else task


def has_rare(pair: Pair) -> bool:
    """Whether both rules have scores on repeated rare bigrams."""
    return bool(pair.first.values(RARE) and pair.second.values(RARE))


def shows_no_difference(pair: Pair) -> bool:
    """Whether a task can show no difference: both rules solve it, or neither learns more than to guess. Never on text.

    Of a token with m pairs a rule that finds the token, and guesses among its pairs, gets 1 of m right.
    """
    if pair.first.lower:
        return False
    if pair.solved:
        return True
    scores = [group.score().mean for group in (pair.first, pair.second)]
    options = pair.first.line.get("settings", {}).get("task_options") or {}
    several = options.get("pairs_per_token", 1)
    guess = max(pair.first.level("baseline") or 0.0, 1 / several if several > 1 else 0.0)
    return min(scores) > 0.99 or max(scores) < guess + 0.05


def shared_keys(evidence: Evidence) -> Finding:
    pairs = [
        pair
        for kind in ("text", "recall", "nine")
        for start in (*(ours for ours, _ in equal_starts(kind)), {"rank": 32})  # of the plan `pairs`
        for pair in evidence.pairs(is_prism(**start), is_prism(shared_key=True, **start), kind)
        if not shows_no_difference(pair)
    ]
    if not pairs:
        return Finding(NOT_RUN, "", NOTHING)
    return Finding(judge([pair.gain for pair in largest(pairs)]), both_ways(named_gains(pairs)), against(pairs))


def hybrid(evidence: Evidence) -> Finding:
    pairs = evidence.pairs(is_rule("prism+softmax"), is_rule("prism+prism"), "hybrid")
    if not pairs:
        return Finding(NOT_RUN, "", NOTHING)
    (pair,) = pairs[:1]
    stacks = evidence.of("hybrid")
    labels = list(pair.first.runs[next(iter(pair.first.runs))])
    cells = [[f"`{group.label}`", *[shown(group.score(label), 3) for label in labels]] for group in stacks]
    gains = [pair.first.gain(pair.second, label) for label in labels]
    both = [shown(group.score(labels[-1]), 2) for group in (pair.first, pair.second)]
    figure = f"{labels[-1]}: {' against '.join(both)}"
    verdict = judge(gains)
    why = f"At length {labels[-1].removeprefix('length ')} the hybrid is better by {shown(gains[-1], 3, sign=True)}."
    if pair.second.score(labels[0]).mean < 0.5:
        verdict = UNSEEN
        why = "The memory alone did not learn the task at any length, so nothing was lost that attention could restore."
    said = paragraph(
        f"Accuracy by length of the test, {len(pair.first.runs)} seeds; more pairs than the memory has room for.", why
    )
    return Finding(verdict, figure, joined(said, table(["stack", *labels], cells)))


@dataclass(frozen=True)
class Claim:
    slug: str
    title: str
    """The heading of its section on docs/claims.md."""
    check: Callable[[Evidence], Finding]


CLAIMS = (
    Claim("rank", "Writes of rank L", rank),
    Claim("speed", "174 × test-time training", speed),
    Claim("transformer", "Transformer-level quality", transformer),
    Claim("gated-delta", "Beats Gated DeltaNet", gated_delta),
    Claim("retrieval", "L = 1 hurts retrieval most", retrieval),
    Claim("shared-keys", "Shared keys hurt", shared_keys),
    Claim("parameters", "Under 10 % more parameters", parameters),
    Claim("forgetting", "Forgetting bounds errors", forgetting),
    Claim("anchor", "A wider anchor predicts more", anchor),
    Claim("hybrid", "Hybrids restore long range", hybrid),
)
