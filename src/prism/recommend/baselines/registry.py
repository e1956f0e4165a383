"""Baselines by name, with options, and how they are fitted."""

from __future__ import annotations

import inspect
import re
import time
from importlib import import_module
from typing import Any

from prism.messages import did_you_mean
from prism.recommend.baselines.base import Baseline
from prism.recommend.events.histories import Histories

_HOMES = {
    "popular": "prism.recommend.baselines.popular:Popular",
    "recent_popular": "prism.recommend.baselines.popular:RecentPopular",
    "item_knn": "prism.recommend.baselines.neighbours:ItemNeighbours",
    "ease": "prism.recommend.baselines.ease:Ease",
    "als": "prism.recommend.baselines.factors:AlternatingLeastSquares",
    "bpr": "prism.recommend.baselines.factors:PairwiseRanking",
}
NAMES = tuple(_HOMES)


def parse_baseline(text: str) -> Baseline:
    """A baseline from its name, with options in brackets: "ease(regularization=100)"."""
    parts = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    name = parts[1] if parts else text
    if parts is None or name not in _HOMES:
        raise ValueError(f"unknown baseline {text!r}{did_you_mean(name, NAMES)}: choose from {', '.join(NAMES)}, all")
    module, _, cls = _HOMES[name].partition(":")
    kind: type[Baseline] = getattr(import_module(module), cls)
    known = inspect.signature(kind).parameters
    options: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in (parts[2] or "").split(","))):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in known:
            raise ValueError(
                f"{name} has no option {key!r}{did_you_mean(key, known)}: it has {', '.join(known) or 'none'}"
            )
        try:
            options[key] = type(known[key].default)(value)
        except ValueError:
            raise ValueError(f"{name}: {key} must be a number such as {known[key].default}, got {value!r}") from None
        if options[key] < 0 or (isinstance(known[key].default, int) and options[key] < 1):
            raise ValueError(f"{name}: {key} must not be so small, got {value}; the default is {known[key].default}")
    return kind(**options)


def fit_baseline(baseline: Baseline | str, train: Histories, num_items: int, seed: int = 0) -> Baseline:
    """Fit a baseline, also given by name, on the events of training, and note the time."""
    fitted = parse_baseline(baseline) if isinstance(baseline, str) else baseline
    started = time.perf_counter()
    fitted.num_items = num_items
    fitted.fit(train, num_items, seed)
    fitted.fit_seconds = time.perf_counter() - started
    return fitted
