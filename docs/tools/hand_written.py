"""Find measured figures on pages that no script wrote: a number with the unit of a measurement, or with a score's digits.

`claims.py --check` fails if there is one. Blocks that scripts write, code and formulas are left out, and so are bare counts
and sizes. A setting, a limit or somebody else's figure with such a unit stands in `ALLOWED`. A figure of ours belongs into a
block (from experiments/results, docs/figures.json or docs/tables.json), or is said in words.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_UNIT = (
    r"ms|[µμ]s|ns|s|(?:milli|micro)?seconds?|min|minutes?|hours?|%|per ?cent|times|fold|x|×(?! ?[\dA-Z])"
    r"|(?:k |thousand |million )?(?:tokens|events|requests|users)(?:/s| a second| per second)"
    r"|[KMGT]i?B(?:/s)?|[GTP]FLOPs?(?:/s)?|nats"
)
_MEASURED = re.compile(
    rf"(?<![\w.,])(?:\d[\d,]*)?\.?\d+[ -]?(?:{_UNIT})(?!\w)"  # 2.16 ms, 110 times, 3.9-fold
    r"|± ?\.?\d[\d.]*"  # .2039 ± .0008
    r"|(?<![\w.])0?\.\d{3,}(?!\w)"  # .2157
    r"|(?<![\w.])\d*\.\d+ (?:of|against) "  # 0.38 of the time
)
_LEFT_OUT = re.compile(
    r"<!-- claims:.*?<!-- end -->|<!-- rules: .*?<!-- end of rules -->|^ *```.*?^ *```$|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$"
    r"|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
ALLOWED: dict[str, tuple[str, ...]] = {
    "README.md": ("The paper's 174 ×",),
    "docs/claims.md": (
        "174 × test-time training",
        "174 times the throughput of an explicit solver",
        "(57 to 61 thousand tokens/s against 0.34 thousand",
        "at most 1 % of the score worse",
        "(perplexity 34.68 against 35.19 with 4.6 % more parameters)",
        "costs 18 % of HR@200 and 5 % of AUC",
        "Under 10 % more parameters",
        "at the lower end of the 95 % interval",
    ),
    "docs/concepts/prism.md": ("from .9 to .999 over the heads",),
    "docs/concepts/probes.md": (
        "right on 99 % of the positions",
        "the baseline is .502",  # computed, like the next: tests/lab/tasks/test_nine.py
        "right in 95.5 % of the cases",
    ),
    "docs/evidence/runs.md": ("an answer without memory gets .0625",),
    "docs/evidence/text.md": ("Parameters within 1 %",),
    "docs/howto/adapter.md": ("trains less than 1 % of them",),
    "docs/howto/compare.md": ("within 1 % of the reference", "If 1 % cannot be reached"),
    "docs/howto/convert.md": ("one output file (4 GB)",),
    "docs/howto/export.md": ("if they are above 1 GiB",),
    "docs/howto/fine-tune.md": ("log 2 = 0.693",),
    "docs/howto/many-gpus.md": ("that is 1 MiB each way",),
    "docs/howto/serve.md": ("follow within 5 seconds", "per request 4 MiB"),
    "docs/language-models.md": ("with parameters (within 1 %)", "above 64 MiB"),
    "docs/recommendation-results.md": (
        "the best published figures for SASRec with cross-entropy on this split (.315 / .182)",
        "HSTU-large's published .3294 / .1893",
        "RecTools' HSTU-large with .364 HR@10 and .216 NDCG@10",
        "slices of 16 MiB",
    ),
    "docs/recommendation.md": ("need more than 8 GiB to prepare",),
    "docs/rules.md": ("adds less than 10 % to the mixer's parameters",),
}
"""By page, phrases that are no measurements of ours: the paper's and other people's figures, settings, limits, arithmetic."""


def found(text: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """The measured figures in a page outside of what scripts write, each with a few words around it."""
    prose = " ".join(_LEFT_OUT.sub(" ", text).split())
    for phrase in allowed:
        prose = prose.replace(phrase, " ")
    return [prose[max(0, match.start() - 40) : match.end() + 20] for match in _MEASURED.finditer(prose)]


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that have no figures but those of scripts."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def by_hand(root: Path = ROOT) -> list[str]:
    """`PAGE: … figure …` for every hand-written figure."""
    texts = {page.relative_to(root).as_posix(): page.read_text(encoding="utf-8") for page in pages(root)}
    return [f"{name}: … {words} …" for name, text in texts.items() for words in found(text, ALLOWED.get(name, ()))]
