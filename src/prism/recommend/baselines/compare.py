"""Fit and rank baselines as the model was ranked, and compare them with it, target by target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from prism.recommend.baselines.base import Baseline
from prism.recommend.baselines.registry import NAMES, fit_baseline, parse_baseline
from prism.recommend.evaluate import measure_split
from prism.recommend.events.split import Split
from prism.recommend.ranking import Ranking

KEPT = ("targets", "metrics", "standard_errors", "coverage", "novelty", "diversity", "serendipity", "popularity_bias")


def named(names: Sequence[str]) -> list[Baseline]:
    """Baselines by name; "all" stands for all of them, with their default options."""
    found = [parse_baseline(one) for name in names for one in (NAMES if name == "all" else (name,))]
    texts = [str(one) for one in found]
    if double := next((text for text in texts if texts.count(text) > 1), None):
        raise ValueError(f"the baseline {double} is named twice: name it once")
    return found


def compare_baselines(
    baselines: Sequence[Baseline],
    split: Split,
    num_items: int,
    part: Literal["test", "validation"] = "test",
    model: Ranking | None = None,
    started: Callable[[str], Any] = lambda name: None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Fit each baseline on the training events of the split and rank its targets; returns their results, in order.

    Args:
        model: ranking of the same targets by the model; differences from it are then given, paired target by target.
        started: called with the name of each baseline.
        how: as in `measure`.
    """
    results = []
    for baseline in baselines:
        started(str(baseline))
        fitted = fit_baseline(baseline, split.train, num_items)
        ranking, found = measure_split(fitted, split, part, **how)
        result = {"name": str(baseline), "fit_seconds": fitted.fit_seconds, **{name: found[name] for name in KEPT}}
        if model is not None:
            result["minus_model"] = difference(ranking, model, found["protocol"]["label"])
        results.append(result)
    return results


def difference(one: Ranking, other: Ranking, label: str = "") -> dict[str, tuple[float, float]]:
    """Mean of one minus the other over the targets, and its standard error, for every metric."""
    theirs = other.per_target()
    apart = {name: values - theirs[name] for name, values in one.per_target().items()}
    root = np.sqrt(len(one))
    return {label + name: (float(x.mean()), float(x.std(ddof=len(x) > 1) / root)) for name, x in apart.items()}
