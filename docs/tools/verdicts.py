"""What the results say of each claim of the paper: a verdict, a figure for the table, and text with a table.

The criteria are code, so that results cannot choose them: a difference counts if it exceeds two standard errors of the
differences paired by seed. Without results a verdict is "not run yet". claims.py writes the findings into the pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from criteria import (
    FAILS,
    HOLDS,
    NOT_RUN,
    PART,
    UNSEEN,
    Finding,
    against,
    gains_of,
    judge,
    judge_equal,
)
from evidence import (
    RARE,
    Evidence,
    Pair,
    default_start,
    equal_starts,
    is_default,
    is_prism,
    is_rule,
    largest,
    ranks,
)
from wording import brief, joined, number, paragraph, shown, table

from prism.compare.statistics import Estimate, estimate


def earlier(evidence: Evidence, model: str, other: str) -> Estimate:
    """An earlier difference in NDCG@10 on MovieLens-1M, of which only mean and error were kept."""
    figure = evidence.figures["recommenders"]
    place = {"sasrec": 2, "gated_delta": 4}[other]
    mean, error = figure["rows"][model][place : place + 2]
    return Estimate(mean, error, figure["seeds"])


VOCABULARY = 8192
"""Tokens of the BPE of experiments/novels.py and code_corpus.py."""
NOTHING = "No run of this is in the repository yet."
EARLIER = "On MovieLens-1M (NDCG@10, three seeds, an earlier run of which means and errors were kept)"


def rank(evidence: Evidence) -> Finding:
    rows = evidence.single("write_rank")
    if rows is None:
        return Finding(NOT_RUN, "", NOTHING)
    own = [row for row in rows if not row["shared_key"]]
    exact = all(row["rank"] == [row["L"]] * 2 for row in own)
    one = all(row["rank"] == [1, 1] for row in rows if row["shared_key"])

    def effective(weights: str, preset: str, L: int) -> Estimate:
        chosen = [r for r in own if (r["weights"], r["preset"], r["L"]) == (weights, preset, L)]
        return estimate(row["effective"] for row in chosen)

    kinds = [("`lm`, random weights", "random", "lm"), ("`paper`, random weights", "random", "paper")]
    kinds += [("`lm`, trained on text", "trained", "lm")] if any(r["weights"] == "trained" for r in own) else []
    cells = [[name, *[shown(effective(*kind, L), 2) for L in (2, 3, 4)]] for name, *kind in kinds]
    seeds = len({row["seed"] for row in rows})
    last = next(found for kind in ("trained", "random") if (found := effective(kind, "lm", 4)).count)
    small = effective("trained", "lm", 4).count > 0 and last.mean < 1.2
    text = [
        f"The rank is {'exactly L at every token' if exact else 'not L at every token'}, for L = 1 to 4, both presets and",
        f"{seeds} seeds. With a shared key it is {'1' if one else 'not 1'}. But the parts are not equal: the effective",
        "rank (Σσ²)² / Σσ⁴ is smaller than L.",
        "In trained models it is near 1: the extra writes are small next to the first." if small else "",
    ]
    figure = f"rank L; effective rank {shown(last, 2)} of 4"
    verdict = HOLDS if exact else FAILS
    return Finding(verdict, figure, joined(paragraph(*text), table(["effective rank", "L = 2", "3", "4"], cells)))


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
    gains = [pair.gain for pair in largest(pairs)]
    said, parts = [], []
    if not any(pair.first.kind == "recommendation" for pair in pairs):
        old = earlier(evidence, "prism-2", "sasrec")  # the default, as on text
        gains.append(old)
        parts.append(f"MovieLens-1M {shown(old, sign=True)}")
        deeper, first = earlier(evidence, "prism-3", "sasrec"), earlier(evidence, "gated_delta", "sasrec")
        said.append(
            f"{EARLIER}, PRISM is better than SASRec by {shown(old)} (L = 3: {shown(deeper)}; Gated DeltaNet: {shown(first)})."
        )
    text = [pair.gain for pair in pairs if pair.first.kind == "text"]
    verdict = judge_equal(gains)
    if not any(gain.count > 1 for gain in text):
        said.append("Text has one seed, which decides nothing." if text else "Text was not run yet.")
        verdict = PART if verdict == HOLDS else verdict
    return Finding(verdict, brief(*gains_of(pairs), *parts), joined(against(pairs), paragraph(*said)))


def gated_delta(evidence: Evidence) -> Finding:
    """On text, PRISM and Gated DeltaNet start alike, so that only the rank differs; where that was not run, as published."""
    kinds = ("text", "recommendation")
    published = evidence.pairs(is_default, is_rule("gated_delta"), *kinds)
    pairs = [*ranks(evidence, "text"), *evidence.pairs(is_default, is_rule("gated_delta"), "recommendation")]
    pairs = pairs if any(pair.first.kind == "text" for pair in pairs) else published
    said = []
    gains = [pair.gain for pair in largest(pairs)]
    parts = gains_of(pairs)
    if not any(pair.first.kind == "recommendation" for pair in pairs):
        olds = {L: earlier(evidence, f"prism-{L}", "gated_delta") for L in (2, 3)}
        gains += olds.values()
        cells = ", ".join(f"L = {L} {shown(old, sign=True)}" for L, old in olds.items())
        said.append(f"{EARLIER}: {cells}.")
        parts += [f"ML-1M {shown(old, sign=True)}" for old in olds.values()]
    verdict = judge(gains)
    if not any(pair.first.kind == "text" for pair in pairs):
        said.append("Text was not run yet.")
        verdict = {FAILS: UNSEEN, HOLDS: PART}.get(verdict, verdict)  # half of the evidence decides nothing
    whole = [pair for pair in published if pair.first.kind == "text" and default_start(pair) and pair not in pairs]
    why = paragraph(
        "The default `prism` also starts otherwise than Gated DeltaNet is published, which is worth far more than the rank",
        "([an untrained layer that recalls](#an-untrained-layer-that-recalls)):",
    )
    tables = [against(pairs), *([why, against(whole)] if whole else []), paragraph(*said), on_probes(evidence)]
    return Finding(verdict, both_ways(parts), joined(*tables))


def both_ways(parts: Sequence[str]) -> str:
    """Gains in short; where some are positive and some negative, one of each comes first, so that neither side is cut off."""
    ups, downs = ([part for part in parts if (" −" in part) == down] for down in (False, True))
    firsts = [*ups[:1], *downs[:1]]
    return brief(*firsts, *(part for part in parts if part not in firsts))


def on_probes(evidence: Evidence) -> str:
    """Where rank 2 is better or worse than rank 1 on synthetic tasks."""
    kinds = {group.kind for group in evidence.groups} - {"text", "recommendation", "hybrid", "adapter"}
    pairs = [pair for pair in evidence.pairs(is_default, is_rule("gated_delta"), *kinds) if not pair.solved]
    if not pairs:
        return "Synthetic tasks were not run yet."
    counts = {1: 0, -1: 0}
    for gain in (pair.gain for pair in pairs if pair.gain.significant):
        counts[1 if gain.mean > 0 else -1] += 1
    said = f"Synthetic tasks: better on {counts[1]} of {len(pairs)}, worse on {counts[-1]}, beyond two standard errors."
    same = [pair for pair in ranks(evidence, *kinds) if default_start(pair) and not pair.solved]
    if not same:
        return joined(said, against(pairs))
    why = paragraph(
        "How much of this is the start of the decays, which PRISM spreads over the heads and Gated DeltaNet draws? Where",
        "Gated DeltaNet ran with the same start too, only the rank differs:",
    )
    return joined(said, against(pairs), why, against(same))


def retrieval(evidence: Evidence) -> Finding:
    """Recall tasks and, on text, repeated rare bigrams, against the nats of all tokens.

    Both ranks start alike. What neither recalls better than about a guess does not count, nor a task that
    both solve.
    """
    recall = ranks(evidence, "recall")
    text = largest(ranks(evidence, "text"))
    rare = [pair for pair in text if any(pair.first.values(RARE)) and any(pair.second.values(RARE))]
    guess = [p for p in rare if min(g.score(RARE).mean for g in (p.first, p.second)) > 0.8 * math.log(VOCABULARY)]
    counted = [pair for pair in rare if pair not in guess]
    open_tasks = [pair for pair in recall if not shows_no_difference(pair)]
    tests: list[tuple[Pair, str | None]] = [*((pair, None) for pair in open_tasks), *((pair, RARE) for pair in counted)]
    if not (tests or guess) or not text:
        return Finding(NOT_RUN, "", joined("Runs on text and on recall with both ranks are needed.", against(recall)))

    def gain(pair: Pair, label: str | None = None) -> Estimate:
        return pair.first.gain(pair.second, label)

    def loss(pair: Pair, label: str | None = None) -> float:
        """By which share rank 1 is worse."""
        return gain(pair, label).mean / max(abs(group.score(label).mean) for group in (pair.first, pair.second))

    said = ["Recall tasks were not finished; on text, recall shows in repeated rare bigrams."] * (not recall)
    if left_out := [pair.first.task for pair in recall if pair not in open_tasks]:
        said.append(f"Recall tasks that both solve or neither learns do not count: {'; '.join(left_out)}.")
    if guess:
        said.append(
            f"On {' and '.join(pair.first.task for pair in guess)} both are near {math.log(VOCABULARY):.2f} nats, the loss of a"
            f" uniform guess among {VOCABULARY:,} tokens: nothing is recalled there, so it does not count."
        )
    text_of = joined(paragraph(*said), against(recall), against(text), against(rare, RARE))
    if not tests:
        return Finding(UNSEEN, "", text_of)
    most = max(loss(pair) for pair in text)
    verdict = judge([gain(*test) for test in tests])
    if verdict == HOLDS and not all(loss(*test) > most for test in tests):
        verdict = PART
    word = "worse"
    worst, label = max(tests, key=lambda test: loss(*test))
    if loss(worst, label) < 0:
        word = "better"
        worst, label = min(tests, key=lambda test: loss(*test))
    what = f"{worst.first.task}, rare bigrams" if label else worst.first.task
    figure = brief(f"{what}: L = 1 {word} by {abs(loss(worst, label)):.1%}", f"nats worse by {most:.1%}")
    return Finding(verdict, figure, text_of)


def shows_no_difference(pair: Pair) -> bool:
    """Whether a task can show no difference: both rules solve it, or neither is better than its baseline."""
    if pair.solved:
        return True
    scores = [group.score().mean for group in (pair.first, pair.second)]
    guess = pair.first.line.get("result", {}).get("baseline", {}).get(pair.first.main, 0.0)
    return min(scores) > 0.99 or max(scores) < guess + 0.05


def shared_keys(evidence: Evidence) -> Finding:
    pairs = [
        pair
        for kind in ("text", "recall", "nine")
        for start, _ in equal_starts(kind)
        for pair in evidence.pairs(is_prism(**start), is_prism(shared_key=True, **start), kind)
        if not pair.solved
    ]
    if not pairs:
        return Finding(NOT_RUN, "", NOTHING)
    return Finding(judge([pair.gain for pair in largest(pairs)]), brief(*gains_of(pairs)), against(pairs))


def parameters(evidence: Evidence) -> Finding:
    rows = evidence.single("parameters")
    if rows is None:
        return Finding(NOT_RUN, "", NOTHING)
    added: dict[str, list[float]] = {
        preset: [r["mixer_over_gated_delta"] for r in rows if r.get("preset") == preset and r["steps"] > 1]
        for preset in ("lm", "paper")
    }
    below = [max(values) < 0.1 for values in added.values()]
    verdict = HOLDS if all(below) else PART if any(below) else FAILS
    cells = []
    for preset in ("lm", "paper"):
        for L in (2, 3, 4):
            chosen = [row for row in rows if row.get("preset") == preset and row["steps"] == L]
            columns = [[row[f"{what}_over_gated_delta"] for row in chosen] for what in ("mixer", "model")]
            cells.append([f"`{preset}`, L = {L}", *[f"{min(c):.1%} to {max(c):.1%}" for c in columns]])
    sizes = [row["size"] for row in rows if row["rule"] == "gated_delta"]
    text = paragraph(
        f"Parameters that PRISM has more than Gated DeltaNet, over the sizes {', '.join(sizes)} of `prism train lm`. With",
        "low-rank maps (`lm`) the claim holds up to L = 4; with the full maps of the paper's equations (`paper`) it does not.",
    )
    figure = f"+{min(added['lm']):.0%} to +{max(added['lm']):.0%}; with full maps +{max(added['paper']):.0%}"
    return Finding(verdict, figure, joined(text, table(["", "of the layer", "of the whole model"], cells)))


def forgetting(evidence: Evidence) -> Finding:
    results = evidence.single("forgetting")
    if results is None:
        return Finding(NOT_RUN, "", NOTHING)
    cells, stable, free, ratios = [], [], [], []
    for row in results["cases"]:
        last = estimate([seed[-1] for seed in row["norm"] if seed[-1] is not None])
        growth = None if row["diverges"] else estimate(row["growth"])
        bounded = growth is not None and growth.mean < 0.1
        ratios += [last.mean / row["bound"]] if row["bound"] else []
        within = row["bound"] is None or last.mean <= 1.1 * row["bound"]
        if row["decay"] < 1 and row["erase"] == "sigmoid":
            stable.append(bounded and within)
        if row["erase"] == "none":
            free.append(growth is not None and growth.mean > 0.4)
        size = f"{last.mean:.0e}" if growth is None else f"{last.mean:,.0f}" if last.mean > 100 else f"{last.mean:.1f}"
        bound = "" if row["bound"] is None else f"{row['bound']:.1f}"
        cells.append([row["case"], "diverges" if growth is None else shown(growth, 2), size, bound])
    tokens, seeds = results["tokens"][-1], results["seeds"]
    over = max([0.0, *(ratio - 1 for ratio in ratios)])
    verdict = HOLDS if all(stable) and all(free) else PART if all(stable) or all(free) else FAILS
    text = paragraph(
        f"Growth is the exponent of the error in the length (0: bounded, ½: random walk, 1: proportional); {seeds} seeds,",
        f"{tokens:,} tokens, float64. The decay bounds the error, at most {over:.0%} above the theorem's bound (for",
        "independent errors that is a bound on the mean square). The erase alone bounds it only for",
        "keys that are erased sometimes. And β must be bounded: linear as in the paper's Eq. 11 the memory diverges.",
    )
    header = ["memory", "growth", f"‖error‖ after {tokens:,}", "bound"]
    pick = {row["case"]: cell for row, cell in zip(results["cases"], cells, strict=True)}
    figure = f"growth {pick['PRISM, α = .99'][1]}; without decay {pick['no forgetting'][1]}"
    return Finding(verdict, figure, joined(text, table(header, cells)))


def anchor(evidence: Evidence) -> Finding:
    rows = evidence.single("anchor_error")
    if rows is None:
        return Finding(NOT_RUN, "", NOTHING)
    widths = sorted({row["conv_size"] for row in rows})
    wide = [row for row in rows if any(name.startswith("window_") for name in row)]

    def of(name: str, width: int) -> Estimate:
        return estimate(row[name] for row in rows if row["conv_size"] == width)

    window = {w: estimate(row[f"window_{w}"] for row in wide) for w in widths if wide and f"window_{w}" in wide[0]}
    cells = [
        [str(w), shown(of("own", w), 2), shown(of("fitted", w), 2), shown(window[w], 2) if w in window else ""]
        for w in widths
    ]
    grows = bool(window) and window[widths[-1]].mean > window[widths[0]].mean
    predicts = max(of("own", w).mean for w in widths) > 0
    verdict = NOT_RUN if not window else HOLDS if grows and predicts else PART if grows else FAILS
    first, last = widths[0], widths[-1]
    seeds = len({row["seed"] for row in rows})
    said = [
        "Share of the variance of the memory's answer Sᵀk that is explained on held-out text (1: all; 0: its mean; negative:",
        f"worse than its mean); small byte-level models, {seeds} seed{'s' * (seeds > 1)}.",
    ]
    if grows:
        peak = max(window, key=lambda w: window[w].mean)
        said.append(
            f"A wider window can predict more: the best linear map of the last w inputs gains up to w = {peak}."
        )
    if not predicts:
        said.append(
            "But what the model subtracts, W_u u, is worse than the mean at every width: training does not make"
        )
        said.append("the anchor an estimate of Sᵀk.")
    header = ["width w", "the model's own, W_u u", "best linear map of u", "best linear map of w inputs"]
    own = number(max(of("own", w).mean for w in widths), 2)
    ends = " → ".join(number(window[w].mean, 2) for w in (first, last)) if window else ""
    figure = brief(f"window {first} → {last}: {ends}" if ends else "", f"own anchor ≤ {own}")
    return Finding(verdict, figure, joined(paragraph(*said), table(header, cells)))


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
    verdict, why = judge(gains), ""
    if verdict == HOLDS and pair.second.score(labels[0]).mean < 0.5:
        verdict = PART
        why = "The memory alone had not learned the task at any length: this shows recall restored, not range."
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
