"""Make the tables and pictures of docs/recommendation-results.md from the JSON files of the benchmarks.

python benchmarks/recommendation_page.py ml-1m benchmarks/results/recommenders.json         # a table and a picture
python benchmarks/recommendation_page.py lengths benchmarks/results/history_length.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prism.lab.results import COLORS, pyplot, save

IMAGES = Path(__file__).parent.parent / "docs" / "images"
NAMES = {
    "sasrec": "SASRec (softmax attention)",
    "hstu": "HSTU (pointwise attention)",
    "linear": "linear attention",
    "mamba2": "Mamba-2",
    "gated_delta": "Gated DeltaNet = PRISM, L = 1",
    "prism-2": "PRISM, L = 2",
    "prism-3": "PRISM, L = 3",
}


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error over seeds if there are several."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), error


def shown(values: Sequence[float]) -> str:
    mean, error = mean_and_error(values)
    digits = f"{mean:.4f}".lstrip("0")
    return digits if error is None else f"{digits} ± {error:.4f}".replace("± 0", "± ")


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """Validation and test scores of every model, and its differences from the two references, paired by seed."""
    lines = [
        "| model | parameters | validation NDCG@10 | test HR@10 | test NDCG@10 | − SASRec | − Gated DeltaNet |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in (name for name in NAMES if any(row["model"] == name for row in rows)):
        mine = by_seed(rows, model)
        cells = [shown([row["validation"]["NDCG@10"] for row in mine.values()])]
        cells += [shown([row["test"][name] for row in mine.values()]) for name in ("HR@10", "NDCG@10")]
        for other in ("sasrec", "gated_delta"):
            theirs = by_seed(rows, other)
            both = sorted(mine.keys() & theirs.keys())
            apart = [mine[s]["test"]["NDCG@10"] - theirs[s]["test"]["NDCG@10"] for s in both]
            mean, error = mean_and_error(apart) if apart and model != other else (None, None)
            spread = "" if error is None else f" ± {error:.4f}"
            cells.append("" if mean is None else f"{mean:+.4f}{spread}".replace("0.", "."))
        parameters = f"{next(iter(mine.values()))['parameters'] / 1e6:.2f} M"
        lines.append(f"| {NAMES[model]} | {parameters} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_seed(rows: Sequence[dict[str, Any]], model: str) -> dict[int, dict[str, Any]]:
    return {row["seed"]: row for row in rows if row["model"] == model}


def draw_results(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw test scores (a dot per seed, a bar for the mean) and validation curves."""
    plt = pyplot()
    figure, (figures, curves) = plt.subplots(1, 2, figsize=(11.0, 4.2), width_ratios=(1, 1.1))
    models = [name for name in NAMES if any(row["model"] == name for row in rows)]
    for place, (model, color) in enumerate(zip(models, COLORS, strict=False)):
        mine = by_seed(rows, model)
        values = [row["test"]["NDCG@10"] for row in mine.values()]
        figures.barh(place, statistics.mean(values), color=color, alpha=0.45)
        figures.plot(values, [place] * len(values), "o", color=color, ms=5)
        for i, row in enumerate(mine.values()):
            curves.plot(*zip(*row["curve"], strict=True), color=color, lw=1.3, label=None if i else NAMES[model])
    low = min(row["test"]["NDCG@10"] for row in rows)
    figures.set(
        yticks=range(len(models)), yticklabels=[NAMES[m] for m in models], xlabel="test NDCG@10, all items ranked"
    )
    figures.set_xlim(low * 0.95, None)
    figures.invert_yaxis()
    figures.grid(axis="x", alpha=0.3)
    curves.set(xlabel="training steps", ylabel="validation NDCG@10")
    curves.set_ylim(low * 0.85, None)
    curves.grid(alpha=0.3)
    curves.legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def lengths_table(rows: Sequence[dict[str, Any]]) -> str:
    lengths = sorted({row["length"] for row in rows})
    lines = ["| | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    wanted: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("training, million events/s", lambda r: f"{r['train_events_per_second'] / 1e6:.2f}"),
        ("reading again, ms", lambda r: f"{r['read_milliseconds']:.1f}"),
        ("one event, ms", lambda r: f"{r['one_event_milliseconds']:.1f}"),
        ("state of a user, KiB", lambda r: f"{r['state_bytes_a_user'] / 1024:,.0f}"),
    ]
    for what, cell in wanted:
        for model in dict.fromkeys(row["model"] for row in rows):
            cells = [cell(row) for row in rows if row["model"] == model]
            lines.append(f"| {model}: {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_lengths(rows: Sequence[dict[str, Any]], path: Path) -> None:
    plt = pyplot()
    panels = {
        "train_events_per_second": ("training, events/s", 1.0),
        "read_milliseconds": ("reading 16 histories again, ms", 1.0),
        "state_bytes_a_user": ("state of a user, KiB", 1 / 1024),
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(12.0, 3.8))
    for axis, (key, (title, scale)) in zip(axes, panels.items(), strict=True):
        for model, color in zip(dict.fromkeys(row["model"] for row in rows), COLORS, strict=False):
            points = [(row["length"], row[key] * scale) for row in rows if row["model"] == model and key in row]
            axis.plot(*zip(*points, strict=True), marker="o", color=color, label=model)
        axis.set(xscale="log", yscale="log", xlabel="events in a history", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="`lengths`, or the name of a data set")
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    written = json.loads(arguments.results.read_text())
    rows = written["results"]
    image = IMAGES / f"recommenders-{arguments.what}.png"
    if arguments.what == "lengths":
        print(lengths_table(rows))
        draw_lengths(rows, image)
    else:
        print(results_table(rows["rows"]))
        draw_results(rows["rows"], image)
    print(f"\n{written['command']}\n{written['machine']}\n{image}")


if __name__ == "__main__":
    main()
