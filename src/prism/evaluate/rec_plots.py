"""Pictures of how a recommender does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism.evaluate.plots import COLORS, pyplot, save


def by_group_picture(groups: Sequence[Mapping[str, Any]], names: Sequence[str], label: str, path: Path) -> None:
    """Figures of groups of targets, with standard errors; under each group, how many targets it has."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8.4, 3.9))
    places = range(len(groups))
    for name, color in zip(names, COLORS, strict=False):
        values = [group["metrics"][name] for group in groups]
        errors = [group["standard_errors"][name] for group in groups]
        axis.errorbar(places, values, errors, color=color, marker="o", capsize=3, lw=1.6, label=name)
    axis.set_xticks(places, [f"{group['group']}\n({group['targets']:,})" for group in groups], fontsize=8)
    axis.set(xlabel=label, ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def loss_picture(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Training loss, and what was validated on, against the step."""
    plt = pyplot()
    validated = [key for key in dict.fromkeys(key for r in records for key in r) if key.startswith("validation_")]
    panels = [("loss", ["loss"]), *([("validation", validated)] if validated else [])]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.7), squeeze=False)
    for axis, (title, keys) in zip(axes[0], panels, strict=True):
        for key, color in zip(keys, COLORS, strict=False):
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            marker = "o" if key != "loss" and len(points) < 40 else None
            axis.plot(
                [step for step, _ in points],
                [value for _, value in points],
                color=color,
                marker=marker,
                ms=4,
                lw=1.6,
                label=key.removeprefix("validation_"),
            )
        axis.set(xlabel="step", title="Training loss" if title == "loss" else "Validation")
        axis.grid(alpha=0.3)
    axes[0][-1].legend(frameon=False)
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def popularity_picture(bias: Mapping[str, Any], k: str, path: Path) -> None:
    """Share of events and of recommendations that each tenth of the items has, the most popular first."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8.4, 3.7))
    places = range(1, 1 + len(bias["items_in_group"]))
    width = 0.4
    for shift, (label, shares) in enumerate(
        (("training events", bias["share_of_events"]), (f"top-{k[1:]} lists", bias["share_of_recommendations"][k]))
    ):
        axis.bar([p + (shift - 0.5) * width for p in places], shares, width, color=COLORS[shift], label=label)
    axis.set_xticks(places)
    axis.set(xlabel="tenth of the items, most popular first", ylabel="share")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(frameon=False)
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)
