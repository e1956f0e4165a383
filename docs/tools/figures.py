"""Draw pictures of published figures: `docs/figures.json` holds the numbers, with the command that measured them.

    python docs/tools/figures.py            # docs/images/{ranks,kernels,state,cpu,positions,contexts,facts}.png

`positions`, `contexts` and `facts` are drawn from experiments/results. docs/images/drawn.json has a hash of what each picture
was drawn from, so that a test sees a picture that is out of date. Pictures that need the raw results of a benchmark are drawn
by `benchmarks/tables.py` and `benchmarks/recommendation_page.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
from evidence import Evidence
from task_comparisons import RANK_1, RANK_2, SHARED_KEY, facts

DOCS = Path(__file__).parents[1]
BLUES, PEERS = ("#b3cde8", "#4c72b0", "#1f3a63"), ("#dd8452", "#c9b29b")


def ranks(figure: dict[str, Any], axes: Any) -> None:
    """Bars per shape, relative to the peer, which is the line at 1."""
    names = list(figure["rows"])
    colors = dict(zip(names, (*BLUES, *PEERS), strict=True))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        ratios = enumerate(figure["rows"][name])
        shown = [(shape + (place - 2) * width, ratio) for shape, ratio in ratios if ratio is not None]
        bars = axes.bar(*zip(*shown, strict=True), width=0.92 * width, color=colors[name], label=name)
        axes.bar_label(bars, [f"{ratio:.2f}" for _, ratio in shown], fontsize=7, padding=1)
    axes.axhline(1, color="#555", lw=0.8, ls=":")
    axes.set_xticks(range(len(figure["shapes"])), figure["shapes"])
    axes.set(xlabel="(batch, tokens, heads, head size)", ylabel="time, flash-linear-attention's rank 1 = 1")
    axes.set_title("Forward and backward of one memory: lower is faster")
    axes.legend(fontsize=8, frameon=False)


def kernels(figure: dict[str, Any], axes: Any) -> None:
    """Two bars a pass: its floor and its time."""
    for place, (floor, measured) in enumerate(figure["rows"].values()):
        axes.barh(place + 0.2, measured, height=0.38, color=BLUES[1], label=None if place else "measured")
        axes.barh(place - 0.2, floor, height=0.38, color=PEERS[1], label=None if place else "floor")
    axes.set_yticks(range(len(figure["rows"])), list(figure["rows"]))
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title="Each pass and the least time its bytes and operations take")
    axes.legend(fontsize=8, frameon=False)


def state(figure: dict[str, Any], axes: Any) -> None:
    """A line per model, with its last value."""
    for (name, sizes), color in zip(figure["rows"].items(), (BLUES[1], "#55a868", PEERS[0]), strict=True):
        axes.plot(figure["contexts"], sizes, "o-", ms=4, color=color, label=name)
        axes.annotate(f"{sizes[-1]:,} MiB", (figure["contexts"][-1], sizes[-1]), (0, 6), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="context", ylabel="MiB per row", title="State kept for decoding")
    axes.set_xticks(figure["contexts"], [f"{n // 1024}K" for n in figure["contexts"]], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)


def cpu(figure: dict[str, Any], axes: Any) -> None:
    for place, ((name, times), color) in enumerate(
        zip(figure["rows"].items(), (BLUES[1], BLUES[0], PEERS[0]), strict=True)
    ):
        bars = axes.bar([n + (place - 1) * 0.27 for n in range(len(times))], times, 0.25, color=color, label=name)
        axes.bar_label(bars, [f"{ms:,}" for ms in times], fontsize=8, padding=1)
    axes.set_xticks(range(len(figure["tokens"])), [f"{n:,} tokens" for n in figure["tokens"]])
    axes.set(ylabel="milliseconds", title="Forward and backward on 2 CPU cores")
    axes.legend(fontsize=8, frameon=False)


STARTS = {
    "transformer": ("Transformer", "#55a868"),
    "gated_delta": ("Gated DeltaNet, as published", PEERS[0]),
    "gated_delta, sigmoid, recall start": ("Gated DeltaNet, PRISM's start and gate", BLUES[0]),
    "prism 2": ("PRISM, rank 2 (default)", BLUES[2]),
}
"""Rules of the picture of positions, by their label in the plans."""


Curves = dict[str, list[list[dict[str, float]]]]
"""By rule, the positions of each seed: bins with `up_to` and `nats_per_token`."""


def curves(evidence: Evidence, plan: str, task: str, context: int) -> Curves:
    """Loss by position in held-out text that is read in pieces of `context` tokens, of the final runs of `STARTS`."""
    found: Curves = {label: [] for label in STARTS}
    for line in evidence.lines:
        wanted = (line["file"], line["task"], line["status"], line.get("phase", "final")) == (
            plan,
            task,
            "done",
            "final",
        )
        if wanted and line["rule"] in found:
            found[line["rule"]].append(line["result"]["text"]["test"][str(context)]["positions"])
    return found


def positions(found: Curves, task: str, axes: Any) -> None:
    """A line per rule, mean over seeds."""
    for label, (name, color) in STARTS.items():
        runs = found[label]
        places = [bin_["up_to"] for bin_ in runs[0]]
        means = [sum(bin_["nats_per_token"] for bin_ in bins) / len(runs) for bins in zip(*runs, strict=True)]
        seeds = f", {len(runs)} seed{'s' * (len(runs) > 1)}"
        axes.plot(places[2:], means[2:], "o-", ms=3, color=color, label=name + seeds)
    axes.set(xscale="log", xlabel="position in the text", title=f"held-out {task}")
    axes.set_xticks(places[2::2], [f"{n:,}" for n in places[2::2]], minor=False)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


DRAW: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "ranks": ranks,
    "kernels": kernels,
    "state": state,
    "cpu": cpu,
}


POSITIONS: dict[str, tuple[dict[str, str], int]] = {
    "positions": ({"novels": "text_30m", "code": "text_code"}, 1024),
    "contexts": ({"novels": "text_rivals", "code": "text_rivals"}, 16384),
}
"""Pictures of `positions`: the corpora with the plans that have them, and the context."""
FACT_LINES = {
    RANK_1: ("rank 1", PEERS[0], "o-"),
    SHARED_KEY: ("rank 1 with the maps of rank 2", PEERS[1], "s--"),
    RANK_2: ("rank 2", BLUES[1], "o-"),
    "rank 4, maps of rank 32": ("rank 4", BLUES[2], "^-"),
}
"""Rules in the picture of several facts in one token: label, colour and line."""
DRAWN = DOCS / "images" / "drawn.json"


def inputs(evidence: Evidence) -> dict[str, Any]:
    """What each picture is drawn from."""
    found: dict[str, Any] = {name: evidence.figures[name] for name in DRAW}
    for name, (plans, context) in POSITIONS.items():
        found[name] = {task: curves(evidence, plan, task, context) for task, plan in plans.items()}
    found["facts"] = {
        name: {str(count): sorted(group.values().values()) for count, group in groups.items()}
        for name, groups in facts(evidence).items()
        if name in FACT_LINES
    }
    return found


def draw_facts(found: dict[str, dict[str, list[float]]], axes: Any) -> None:
    """Every seed's accuracy against the facts in a token, the mean as a line, and what a guess among the facts gets."""
    counts = sorted({int(count) for values in found.values() for count in values})
    axes.plot(counts, [1 / count for count in counts], color="#555", lw=0.8, ls=":", label="a guess among the facts")
    for place, (name, values) in enumerate(found.items()):
        label, color, line = FACT_LINES[name]
        shift = 1.03 ** (place - (len(found) - 1) / 2)
        known = sorted(int(count) for count in values)
        means = [sum(values[str(count)]) / len(values[str(count)]) for count in known]
        axes.plot([count * shift for count in known], means, line, color=color, ms=5, label=label)
        for count in known:
            scores = values[str(count)]
            axes.plot([count * shift] * len(scores), scores, ".", color=color, ms=4, alpha=0.6)
    axes.set(xscale="log", xlabel="facts in one token", ylabel="accuracy", ylim=(0, 1.03))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_title("Recall of 16 facts: how many come in one token")
    axes.legend(fontsize=8, frameon=False, loc="lower left")


def hashes(given: dict[str, Any]) -> dict[str, str]:
    """A short hash of what each picture is drawn from."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in given.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def main() -> None:
    given = inputs(Evidence())
    for name, draw in DRAW.items():
        picture, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
        draw(given[name], axes)
        axes.spines[["top", "right"]].set_visible(False)
        save(picture, name)
    for name in POSITIONS:
        picture, both = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
        for (task, found), axes in zip(given[name].items(), both, strict=True):
            positions(found, task, axes)
        both[0].set_ylabel("nats a token")
        both[1].legend(fontsize=8, frameon=False)
        save(picture, name)
    picture, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    draw_facts(given["facts"], axes)
    axes.spines[["top", "right"]].set_visible(False)
    save(picture, "facts")
    DRAWN.write_text(json.dumps(hashes(given), indent=2) + "\n", encoding="utf-8")


def save(picture: Any, name: str) -> None:
    """Write a picture without the version of matplotlib, so that it changes only with its figures."""
    picture.savefig(DOCS / "images" / f"{name}.png", dpi=144, metadata={"Software": None})
    plt.close(picture)


if __name__ == "__main__":
    main()
