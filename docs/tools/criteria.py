"""The criteria of verdicts, and the tables of two rules that they rest on.

A difference, paired by seed, counts if it is significant at 5 % by Student's t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evidence import RARE, Group, Pair, largest
from wording import brief, joined, shown, table

from prism.lab.statistics import FEWEST, Estimate

NOTHING = "No run of this is in the repository yet."
HOLDS, PART, UNSEEN, FAILS, NOT_RUN = "holds", "holds in part", "not seen", "does not hold", "not run yet"

MARGIN = 0.01
"""Part of a score by which a rule may be worse and is still as good."""
SHORT = {"ml-1m": "ML-1M", "ml-100k-gaps": "ML-100K", "beauty": "Beauty", "beauty_bert4rec": "Beauty (BERT4Rec)"}
"""Logs of recommenders as figures name them."""


@dataclass(frozen=True)
class Finding:
    """What the results say of a claim."""

    verdict: str
    figure: str
    """For the table; empty if nothing was run."""
    text: str
    """Markdown: a paragraph, and perhaps a table."""
    more: str = ""
    """Markdown for the page of evidence: comparisons that the verdict does not rest on, or not alone."""


def digits_of(group: Group) -> int:
    return 4 if group.kind in ("text", "recommendation") else 3


def judge(gains: Sequence[Estimate]) -> str:
    """The verdict on "is better" from gains, where positive is better."""
    if not gains:
        return NOT_RUN
    better = [gain.significant and gain.mean > 0 for gain in gains]
    worse = [gain.significant and gain.mean < 0 for gain in gains]
    if all(better):
        return HOLDS
    if any(better):
        return PART
    return FAILS if any(worse) else UNSEEN


def judge_equal(gains: Sequence[tuple[Estimate, float]]) -> str:
    """The verdict on "is as good" from gains, each with the score it is over. Few seeds decide nothing.

    As good: at most `MARGIN` of the score worse, also at the lower end of its 95 % interval. So noise proves nothing.
    """
    known = [(gain, MARGIN * abs(score)) for gain, score in gains if gain.count >= FEWEST]
    if not gains:
        return NOT_RUN
    good = [gain.mean - gain.half_width >= -margin for gain, margin in known]
    worse = [gain.significant and gain.mean < 0 for gain, _ in known]
    if good and all(good):
        return HOLDS
    if any(good):
        return PART
    return FAILS if worse and all(worse) else UNSEEN


def where(group: Group, label: str | None = None) -> str:
    """Task, parameters, tokens and metric of a group. Of several pairs in a token, also the comparison: two have them."""
    metric = "rare bigrams" if label == RARE else label or group.metric
    size = f", {group.parameters / 1e6:.0f} M" if group.kind == "text" and group.parameters else ""
    if group.kind != "text" or not group.tokens:
        name = f"{group.task} (`{group.file}`)" if group.kind == "recall" else group.task
        return f"{name}{size}, {metric}"
    return f"{group.task}{size}, {group.tokens / 1e6:.0f} M tokens, {metric.removesuffix(' a token')}"


def against(pairs: Sequence[Pair], label: str | None = None) -> str:
    """A table for every two rules: their scores (the main ones, or those with a label) and the gain; empty without pairs."""
    tables: dict[tuple[str, str], list[list[str]]] = {}
    for pair in pairs:
        digits = 3 if label == RARE else digits_of(pair.first)
        gain = pair.first.gain(pair.second, label)
        seeds = pair.first.values(label).keys() & pair.second.values(label).keys()
        scores = [shown(group.score(label, seeds), digits) for group in (pair.first, pair.second)]
        row = [where(pair.first, label), *scores, shown(gain, digits, sign=True), str(gain.count)]
        tables.setdefault((pair.first.label, pair.second.label), []).append(row)
    return joined(*(table(["task", *names, "better by", "seeds"], rows) for names, rows in tables.items()))


def named_gains(pairs: Sequence[Pair]) -> list[tuple[str, Estimate, int]]:
    """Task, gain and its digits of the largest pairs, text first."""
    ordered = sorted(largest(pairs), key=lambda pair: pair.first.kind != "text")
    return [(pair.first.task, pair.gain, digits_of(pair.first)) for pair in ordered]


def phrase(task: str, gain: Estimate, digits: int = 4) -> str:
    """`novels +.0130 ± .0024`"""
    return f"{SHORT.get(task, task)} {shown(gain, digits, sign=True)}"


def both_ways(gains: Sequence[tuple[str, Estimate, int]]) -> str:
    """Gains in short: one that counts, then losses that count and what does not count, so that these are not cut off."""
    better, worse = ([g for g in gains if g[1].significant and (g[1].mean > 0) == up] for up in (True, False))
    level = [named for named in gains if not named[1].significant]
    return brief(*(phrase(*named) for named in (*better[:1], *worse, *level, *better[1:])))
