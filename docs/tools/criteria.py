"""The criteria of verdicts, and the tables of two rules that they rest on.

A difference counts if it exceeds two standard errors of the differences paired by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evidence import Group, Pair, largest
from wording import joined, shown, table

from prism.compare.statistics import Estimate

HOLDS, PART, UNSEEN, FAILS, NOT_RUN = "holds", "holds in part", "not seen", "does not hold", "not run yet"


@dataclass(frozen=True)
class Finding:
    """What the results say of a claim."""

    verdict: str
    figure: str
    """For the table; empty if nothing was run."""
    text: str
    """Markdown: a paragraph, and perhaps a table."""


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


def judge_equal(gains: Sequence[Estimate]) -> str:
    """The verdict on "is as good": nowhere worse by more than two standard errors. One seed decides nothing."""
    known = [gain for gain in gains if gain.count > 1]
    if not gains:
        return NOT_RUN
    if not known:
        return UNSEEN
    worse = [gain.significant and gain.mean < 0 for gain in known]
    return FAILS if all(worse) else PART if any(worse) else HOLDS


def where(group: Group, label: str | None = None) -> str:
    """Task, size and metric of a group."""
    size = f", {group.parameters / 1e6:.0f} M" if group.kind == "text" and group.parameters else ""
    return f"{group.task}{size}, {label or group.metric}"


def against(pairs: Sequence[Pair], label: str | None = None) -> str:
    """A table for every two rules: their scores (the main ones, or those with a label) and the gain; empty without pairs."""
    tables: dict[tuple[str, str], list[list[str]]] = {}
    for pair in pairs:
        digits = digits_of(pair.first)
        gain = pair.first.gain(pair.second, label)
        seeds = pair.first.values(label).keys() & pair.second.values(label).keys()
        scores = [shown(group.score(label, seeds), digits) for group in (pair.first, pair.second)]
        row = [where(pair.first, label), *scores, shown(gain, digits, sign=True), str(gain.count)]
        tables.setdefault((pair.first.label, pair.second.label), []).append(row)
    return joined(*(table(["task", *names, "better by", "seeds"], rows) for names, rows in tables.items()))


def gains_of(pairs: Sequence[Pair]) -> list[str]:
    """The gains of the largest pairs as short phrases, text first."""
    ordered = sorted(largest(pairs), key=lambda pair: pair.first.kind != "text")
    return [f"{pair.first.task} {shown(pair.gain, digits_of(pair.first), sign=True)}" for pair in ordered]
