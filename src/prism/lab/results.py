"""Results as files: JSON with the machine and the command, and pictures drawn with matplotlib, both written atomically."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from prism.files import write_json
from prism.messages import install

COLORS = ("#2f5fd0", "#d9621e", "#1f9268", "#8a4fc4", "#c2316a", "#0f8aa3", "#8d6a1e", "#6b7280", "#b8860b", "#64b5cd")
"""Colours of the reports' light theme (page.css)."""


def machine() -> dict[str, Any]:
    """The machine that a result was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def write_results(path: Path, results: Any, **about: Any) -> Path:
    """Write results with the machine they come from; `about` (such as the command) is stored with them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"machine": machine(), **about, "results": results})
    return path


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files only, imported when first needed; says how to install it if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {install('plots')}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure: Any, path: Path) -> None:
    """Save a figure atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.stem + ".tmp" + path.suffix)
    figure.savefig(temporary, dpi=144)
    temporary.replace(path)


def recall_curve(results: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float, float, float]]:
    """Accuracy of a model by the number of pairs: (pairs, mean, lowest, highest over the seeds)."""
    accuracies = defaultdict(list)
    for result in results:
        if result["name"] == name:
            for pairs, accuracy in result["accuracy_by_pairs"].items():
                accuracies[int(pairs)].append(accuracy)
    return [(pairs, sum(found) / len(found), min(found), max(found)) for pairs, found in sorted(accuracies.items())]


def recall_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot accuracy against the number of pairs: a panel per setting, a line per model, bands over the seeds, the baseline."""
    plt = pyplot()
    settings = list(dict.fromkeys(r["setting"] for r in results))
    names = list(dict.fromkeys(r["name"] for r in results))
    columns = min(3, len(settings))
    rows = -(-len(settings) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns, 4.2 * rows), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, setting in zip(axes.flat, settings, strict=False):
        chosen = [r for r in results if r["setting"] == setting]
        for name, color in zip(names, COLORS * 9, strict=False):
            curve = recall_curve(chosen, name)
            if not curve:
                continue
            x, mean, low, high = zip(*curve, strict=True)
            axis.plot(x, mean, marker="o", color=color, label=name)
            axis.fill_between(x, low, high, color=color, alpha=0.18, lw=0)
        x, baseline = zip(*sorted(chosen[0]["baseline_by_pairs"].items()), strict=True)
        axis.plot(x, baseline, color="#6b7280", ls=":", label="baseline: any value shown")
        sizes = sorted({r["state_size"] for r in chosen if not r["grows"]})  # of caches it is the size of one token
        state = " to ".join(f"{size:,}" for size in dict.fromkeys((*sizes[:1], *sizes[-1:])))
        title = f"{setting}: {state} numbers of memory" if sizes else setting
        axis.set(title=title, xlabel="pairs to remember", ylim=(0, 1.03), xticks=x)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(settings) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("fraction of answers that are right")
    shown = {line.get_label(): line for axis in axes.flat for line in axis.lines}  # a panel may lack a model
    figure.legend(handles=shown.values(), loc="outside lower center", ncols=2 * columns, frameon=False)
    seeds = len({r["seed"] for r in results})
    figure.suptitle(f"Associative recall ({'one seed' if seeds == 1 else f'{seeds} seeds, bands span them'})")
    save(figure, path)
    plt.close(figure)
