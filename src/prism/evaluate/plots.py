"""Pictures of results. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files only; a sentence if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'prism-sequence[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure: Any, path: Path) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.stem + ".tmp" + path.suffix)
    figure.savefig(temporary, dpi=144)
    temporary.replace(path)


def recall_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against the number of pairs, a panel for each setting, a line for each model; bands span the seeds."""
    plt = pyplot()
    settings = list(dict.fromkeys(r["setting"] for r in results))
    names = list(dict.fromkeys(r["name"] for r in results))
    figure, axes = plt.subplots(1, len(settings), figsize=(5.2 * len(settings), 4.2), squeeze=False, sharey=True)
    for axis, setting in zip(axes[0], settings, strict=True):
        chosen = [r for r in results if r["setting"] == setting]
        sizes = sorted({r["state_size"] for r in chosen})
        for name, color in zip(names, COLORS * 9, strict=False):
            curves = defaultdict(list)
            for result in chosen:
                if result["name"] == name:
                    for pairs, accuracy in result["accuracy_by_pairs"].items():
                        curves[int(pairs)].append(accuracy)
            if not curves:
                continue
            x = sorted(curves)
            mean = [sum(curves[n]) / len(curves[n]) for n in x]
            axis.plot(x, mean, marker="o", color=color, label=name)
            axis.fill_between(
                x, [min(curves[n]) for n in x], [max(curves[n]) for n in x], color=color, alpha=0.18, lw=0
            )
        state = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        axis.set(title=f"{setting}: {state} numbers of memory", xlabel="pairs to remember", ylim=(0, 1.03))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("questions answered right")
    axes[0][-1].legend(loc="lower left", frameon=False)
    seeds = len({r["seed"] for r in results})
    figure.suptitle(f"Associative recall ({'one seed' if seeds == 1 else f'{seeds} seeds, bands span them'})")
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def training_picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Training loss and validation against the tokens seen; a run has a `name`, a `log` and `tokens_per_step`."""
    plt = pyplot()
    figure, (losses, scores) = plt.subplots(1, 2, figsize=(10.4, 4.0))
    for run, color in zip(runs, COLORS, strict=False):
        for axis, key, marker in ((losses, "loss", None), (scores, "validation_bits_per_byte", "o")):
            points = [(r["step"] * run["tokens_per_step"], r[key]) for r in run["log"] if r.get(key) is not None]
            axis.plot(*zip(*points, strict=True), color=color, label=run["name"], marker=marker, lw=1.6)
    losses.set(xlabel="tokens of training text", ylabel="nats per token", title="Training loss")
    scores.set(xlabel="tokens of training text", ylabel="bits per byte", title="Held-out text")
    for axis in (losses, scores):
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
    scores.legend(frameon=False)
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)
