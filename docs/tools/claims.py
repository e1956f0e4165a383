"""Write what docs/claims.md, README and other pages say of results, from the results themselves.

    python docs/tools/claims.py             # rewrites the blocks
    python docs/tools/claims.py --check     # fails if a page says something else (`make docs-check`, and tests)

A block is `<!-- claims:NAME -->` … `<!-- end -->`. Its text comes from experiments/results, docs/figures.json and
docs/tables.json alone: evidence.py and tables.py read them, verdicts.py judges them by criteria.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package

import drop_ins
import fine_tuning
import generating
import gpu_results
import hand_written
import headlines
import recommending
import serving
import task_comparisons
import text_comparisons
from criteria import NOT_RUN, Finding, judge
from evidence import ROOT, SHARED, Evidence, Pair, default_start, equal_starts, is_prism, is_rule, ranks_with
from evidence import ranks as ranks_of
from verdicts import CLAIMS, networks
from wording import number, paragraph, shown, table

import tables as stored_tables
from prism.lab.statistics import FEWEST, Estimate

_BLOCK = re.compile(r"(<!-- claims:([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def summary(findings: dict[str, Finding]) -> str:
    """The table of all claims."""
    rows = [[claim.title, f"**{findings[claim.slug].verdict}**", findings[claim.slug].figure] for claim in CLAIMS]
    return table(["claim of the paper", "verdict", "figure"], rows, left=3)


def section(finding: Finding) -> str:
    """The end of a claim's section: the verdict and what it rests on."""
    return f"**Verdict: {finding.verdict}.**\n\n{finding.text}"


def known(findings: dict[str, Finding]) -> str:
    """What the page on PRISM says of the central claims."""
    said = ["That a rank-$L$ write is cheap [holds](../performance.md)."]
    names = {"gated-delta": "That it is better than rank 1", "retrieval": "That rank 1 hurts retrieval most"}
    for slug, what in names.items():
        found = findings[slug]
        verb = {"not seen": "was **not seen**", NOT_RUN: "was **not run yet**"}.get(
            found.verdict, f"**{found.verdict}**"
        )
        said.append(f"{what} {verb}{f' ({found.figure})' if found.figure else ''}.")
    said.append("[Claims](../claims.md) has all of them, with figures and commands.")
    return paragraph(*said)


def highlights(evidence: Evidence) -> str:
    """The README's list of what the library is good for, as far as it has figures."""
    figures = evidence.figures
    ranks = figures["ranks"]["rows"]["ours, rank 2"]
    low, high = gpu_results.channel_span()
    step = figures["decoding"]["rows"]["PRISM, rank 2"][0]
    items = [
        f"- **Fast**: forward and backward of rank 2 take {min(ranks):.2f} to {max(ranks):.2f} of the time of"
        f" flash-linear-attention's rank 1, and rules with a decay per channel (KDA, GLA, RWKV-7) {low:.2f} to {high:.2f} of"
        " its kernels for them (H200, [benchmark](docs/performance.md)).",
        f"- **Constant memory**: {step:.2f} ms per token for 32 rows (118 M parameters, H200) after any context."
        " CUDA-graph decoding is built in.",
    ]
    if starts := text_comparisons.start_pairs(evidence):
        items.append(
            "- **Recall from the first step**: with the start of `prism`, a Gated DeltaNet saves, over its published start and"
            f" at equal cost, {at_most_tokens(starts, 2)} ([claims](docs/evidence/text.md#an-untrained-layer-that-recalls))."
        )
    if said := task_comparisons.facts_sentence(evidence):
        items.append(
            f"- **Writes of rank L**: {said[0].lower()}{said[1:]}"
            f" [Evidence](docs/evidence/tasks.md#several-facts-in-one-token).{on_text(evidence)}"
        )
    if per_channel := channels(evidence):
        items.append(per_channel)
    return "\n".join(paragraph(item, indent="  ") for item in items)


def short(evidence: Evidence) -> str:
    """What follows from all comparisons of ranks, in a few sentences; empty without runs on text."""
    alike = [pair for pair in ranks_of(evidence, "text") if default_start(pair)]
    if not alike:
        return ""
    said = [f"**In short.** With equal start and gate, rank 2 saves {at_most_tokens(alike)} over rank 1."]
    if per_channel := ranks_with(evidence, **SHARED["decays per channel"]):
        said.append(f"Where both have a decay per channel, it adds {at_most_tokens(per_channel)}.")
    if facts := task_comparisons.facts_sentence(evidence):
        said.append(facts)
    if starts := text_comparisons.start_pairs(evidence):
        said.append(
            f"How weights and decays start is worth more than the rank: {at_most_tokens(starts)} for a Gated DeltaNet."
        )
    return paragraph(*said)


def on_text(evidence: Evidence) -> str:
    """A sentence on what rank 2 saves on text over rank 1 that starts alike; empty without results."""
    pairs = [pair for pair in ranks_of(evidence, "text") if default_start(pair)]
    said = f" On text it saves {at_most_tokens(pairs)}, over rank 1 with the same start and gate"
    return f"{said} ([claims](docs/claims.md#beats-gated-deltanet))." if pairs else ""


def channels(evidence: Evidence) -> str:
    """README's item on decays per channel: what they gain, what rank 2 then adds, and how rank 1 with them does."""
    default, _ = equal_starts("text")[0]
    pairs = evidence.pairs(is_prism(**default, forget="channel"), is_prism(**default), "text")
    if not pairs:
        return ""
    said = (
        f'- **Decays per channel**: `forget="channel"` saves {at_most_tokens(pairs)}, at a price in speed and memory.'
    )
    if ranks := ranks_with(evidence, **SHARED["decays per channel"]):
        unclear = not any(pair.gain.significant for pair in ranks)
        said += f" Rank 2 then adds {at_most_tokens(ranks)}{', which is not significant' * unclear}."
    _, alike = equal_starts("text")[0]
    if simpler := evidence.pairs(is_rule("gated_delta", **alike, forget="channel"), is_prism(**default), "text"):
        said += f" Rank 1 with them saves {at_most_tokens(simpler)} over the default rank 2."
    return f"{said} [Rivals](docs/evidence/text.md#rivals-with-the-same-start)."


def at_most_tokens(pairs: list[Pair], digits: int = 3) -> str:
    """The gains at the largest budget that has three seeds or more; three digits or more have their spread."""
    return budget(most_tokens(pairs), lambda gain: shown(gain, digits) if digits > 2 else number(gain.mean, digits))


def most_tokens(pairs: list[Pair]) -> list[Pair]:
    """The pairs of the largest budget that has three seeds or more of every pair, else of the largest."""
    budgets = list(by_budget(pairs).values())
    enough = [some for some in budgets if all(pair.gain.count >= FEWEST for pair in some)]
    return (enough or budgets)[-1]


def by_budget(pairs: list[Pair]) -> dict[tuple[int, int], list[Pair]]:
    """Pairs on text by their millions of parameters and tokens, fewest first."""
    found: dict[tuple[int, int], list[Pair]] = {}
    for pair in pairs:
        found.setdefault((round((pair.first.parameters or 0) / 1e6), round(pair.first.tokens / 1e6)), []).append(pair)
    return dict(sorted(found.items()))


def budget(pairs: list[Pair], write: Callable[[Estimate], str]) -> str:
    """`.15 nats a token on novels and .43 on code (30 M parameters, 33 M tokens, 5 seeds)`, of pairs with one budget."""
    first, *others = pairs
    gains = [f"{write(first.gain)} nats a token on {first.first.task}"]
    gains += [f"{write(pair.gain)} on {pair.first.task}" for pair in others]
    seeds = min(pair.gain.count for pair in pairs)
    size = f"{(first.first.parameters or 0) / 1e6:.0f} M parameters, {first.first.tokens / 1e6:.0f} M tokens"
    return f"{' and '.join(gains)} ({size}, {seeds} seed{'s' * (seeds > 1)})"


def library(evidence: Evidence) -> str:
    """Claims of the library's own: speed, and how weights start."""
    ranks, contexts = evidence.figures["ranks"]["rows"], evidence.figures["contexts"]
    spans = {L: (min(found := ranks[f"ours, rank {L}"]), max(found)) for L in (2, 4)}
    count = len(contexts["contexts"])
    ours, attention = (contexts["rows"][name][:count] for name in ("PRISM, rank 2", "Transformer"))
    rows = [
        ["rank L costs what rank 1 costs", *cost(spans)],
        [
            "speed does not fall with context",
            "**holds**" if ours[-1] > 0.95 * ours[0] else "**does not hold**",
            f"{ours[0]} → {ours[-1]}; Transformer {attention[0]} → {attention[-1]} ²",
        ],
    ]
    if pairs := text_comparisons.start_pairs(evidence):
        starts = most_tokens(pairs)
        gains = "; ".join(f"{pair.first.task} {shown(pair.gain, 3, sign=True)}" for pair in starts)
        rows.append(["a start that recalls is better", f"**{judge([pair.gain for pair in starts])}**", f"{gains} ³"])
    return table(["claim of the library", "verdict", "figure"], rows, left=3)


def cost(spans: dict[int, tuple[float, float]]) -> list[str]:
    """Verdict and figure on the cost of writes: at most that of the peer's rank 1 at every shape, up to a fifth more."""
    verdict = "holds" if all(high <= 1.2 for _, high in spans.values()) else "does not hold"
    said = ", ".join(f"rank {L}: {low:.2f} to {high:.2f}" for L, (low, high) in spans.items())
    return [f"**{verdict}**", f"{said} ¹"]


def blocks(evidence: Evidence) -> dict[str, Callable[[], str]]:
    """What writes each block."""
    findings = {claim.slug: claim.check(evidence) for claim in CLAIMS}
    found: dict[str, Callable[[], str]] = {
        "table": lambda: summary(findings),
        "highlights": lambda: highlights(evidence),
        "library": lambda: library(evidence),
        "short": lambda: short(evidence),
        "known": lambda: known(findings),
        "networks": lambda: networks(evidence),
        "text": lambda: text_comparisons.text(evidence),
        "contexts": lambda: text_comparisons.contexts(evidence),
        "overview": lambda: text_comparisons.overview(evidence),
        "rivals": lambda: text_comparisons.rivals(evidence),
        "recall-start": lambda: text_comparisons.recall_start(evidence),
        "text-choices": lambda: text_comparisons.choices(evidence),
        "text-rates": lambda: text_comparisons.rates(evidence),
        "learning": lambda: task_comparisons.learning(evidence),
        "facts": lambda: task_comparisons.facts_table(evidence),
        "probes": lambda: task_comparisons.probes(evidence),
        "searches": lambda: task_comparisons.searches(evidence),
        "unfinished": lambda: task_comparisons.unfinished(evidence),
        "adapters": lambda: fine_tuning.adapters(evidence),
        "dropin-cpu": lambda: drop_ins.cpu(evidence),
        "dropin-gpu": lambda: drop_ins.gpu(evidence),
    }
    found |= gpu_results.blocks() | headlines.blocks(evidence)
    found |= {"serving": serving.measured, "generation": generating.against_llama}
    found |= recommending.blocks()
    found |= {name: (lambda text=text: text) for name, text in stored_tables.blocks().items()}
    found |= {f"{slug}-more": (lambda text=finding.more: text) for slug, finding in findings.items() if finding.more}
    return found | {slug: (lambda finding=finding: section(finding)) for slug, finding in findings.items()}


def rewritten(text: str, evidence: Evidence) -> str:
    """A page with every block as the results have it."""
    known_blocks = blocks(evidence)

    def write(match: re.Match[str]) -> str:
        if match[2] not in known_blocks:
            raise ValueError(f"there is no block {match[2]!r}: choose from {', '.join(known_blocks)}")
        return f"{match[1]}\n{known_blocks[match[2]]()}\n\n{match[4]}"

    return _BLOCK.sub(write, text)


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that have blocks."""
    found = [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]
    return [page for page in found if _BLOCK.search(page.read_text(encoding="utf-8"))]


def stale(evidence: Evidence | None = None, root: Path = ROOT) -> list[Path]:
    """The pages that say something else than the results."""
    evidence = evidence or Evidence()
    texts = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    return [page for page, text in texts.items() if rewritten(text, evidence) != text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    arguments = parser.parse_args()
    evidence = Evidence()
    old = stale(evidence)
    names = ", ".join(page.relative_to(ROOT).as_posix() for page in old)
    if arguments.check:
        said = [f"{names}: out of date; run `python docs/tools/claims.py`"] if old else []
        if typed := hand_written.by_hand():
            said += ["These figures are written by hand (see docs/tools/hand_written.py):", *typed]
        sys.exit("\n".join(said) or 0)
    for page in old:
        page.write_text(rewritten(page.read_text(encoding="utf-8"), evidence), encoding="utf-8")
    print(f"rewritten: {names}" if old else "all pages are up to date")


if __name__ == "__main__":
    main()
