"""How well a recommender predicts held-out events.

For each target the model reads the last `max_length` events before it and ranks items:

- all items ("full", the default); or the target among `sampled` others (every figure then carries the word "sampled":
  such figures are not comparable with full ones, nor do they always order models alike);
- without the items the user has had before (`filter_seen`), looked up in the whole history, not only in what was read.
  The target itself always takes part. If it was seen before too, it then meets fewer rivals than a system would have
  that shows seen items: how many targets that concerns is counted and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from prism.data.interactions.histories import Histories
from prism.data.interactions.samples import contexts
from prism.data.interactions.split import Split, Targets
from prism.evaluate.groups import history_lengths, item_popularity, popularity_bias
from prism.evaluate.ranking import CUTOFFS, SCORES_AT_ONCE, Ranking, candidates, count, ranks, top_k
from prism.evaluate.sampled import Sampled, sampler
from prism.models import PrismForRecommendation

Progress = Callable[[int, int], None]
"""Is told how many of how many targets are done."""
BATCH = 256
EVENTS_AT_ONCE = 2**17
"""Most events read at a time, whatever the batch: histories may have thousands of events."""


class Recommended:
    """Counts what is in the top-k lists: int64 `[N + 1]` for every cutoff."""

    def __init__(self, num_items: int, cutoffs: tuple[int, ...] = CUTOFFS) -> None:
        self.cutoffs = tuple(k for k in cutoffs if k <= num_items) or (num_items,)
        self.counts = {k: np.zeros(num_items + 1, dtype=np.int64) for k in self.cutoffs}

    def add(self, scores: Tensor, taking_part: Tensor) -> None:
        lists = top_k(scores, taking_part, self.cutoffs[-1]).cpu().numpy()
        for k, counts in self.counts.items():
            counts += np.bincount(lists[:, :k].ravel(), minlength=len(counts))
            counts[0] = 0

    def coverage(self) -> dict[str, float]:
        return {f"coverage@{k}": float((counts[1:] > 0).mean()) for k, counts in self.counts.items()}


@torch.no_grad()
def rank_targets(
    model: PrismForRecommendation,
    targets: Targets,
    histories: Histories,
    *,
    max_length: int,
    filter_seen: bool = True,
    batch: int = BATCH,
    sampled: Sampled | None = None,
    popularity: np.ndarray | None = None,
    recommended: Recommended | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Where each target lands; in the order of `targets`.

    Args:
        batch: targets at once, fewer where histories are very long or items very many. The result is the same.
        popularity: `[N + 1]`, for `sampled` by popularity.
        recommended: is told the top-k lists of all items.
    """
    for name, value in (("max_length", max_length), ("batch", batch), ("the number of targets", len(targets))):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    num_items = model.config.num_items
    found = np.empty((2, len(targets)), dtype=np.int64)
    others = None if sampled is None else sampler(sampled, num_items, popularity)
    order = np.argsort(targets.ends, kind="stable")  # rows of one length: little padding
    batch = min(batch, max(1, SCORES_AT_ONCE // (num_items + 1)))
    training = model.training
    model.eval()
    done = 0
    while done < len(targets):
        rows = order[done : done + batch]
        longest = min(int(targets.ends[rows[-1]]), max_length)
        rows = rows[: max(1, EVENTS_AT_ONCE // longest)]
        part = targets.take(rows)
        scores = _scores(model, part, histories, max_length)
        wanted = torch.from_numpy(part.items).to(scores.device)
        seen = _seen(part, histories).to(scores.device) if filter_seen else None
        taking_part = candidates(num_items, wanted, seen)
        if recommended is not None:
            recommended.add(scores, taking_part)
        if others is not None:
            taking_part = others(taking_part, wanted, rows)
        found[0, rows] = ranks(scores, wanted, taking_part=taking_part).cpu().numpy()
        found[1, rows] = count(taking_part).cpu().numpy()
        done += len(rows)
        if progress is not None:
            progress(done, len(targets))
    model.train(training)
    return Ranking(found[0], found[1])


def evaluate_ranking(
    model: PrismForRecommendation,
    targets: Targets,
    histories: Histories,
    *,
    max_length: int,
    filter_seen: bool = True,
    batch: int = BATCH,
    sampled: Sampled | None = None,
    popularity: np.ndarray | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Every figure, with its standard error; by history length and by the target's popularity; and what is recommended.

    Args:
        popularity: how often each item occurs in what was learned from, int64 `[N + 1]`; all of `histories` unless given.
    """
    num_items = model.config.num_items
    popularity = histories.counts(num_items) if popularity is None else popularity
    recommended = Recommended(num_items)
    ranking = rank_targets(
        model,
        targets,
        histories,
        max_length=max_length,
        filter_seen=filter_seen,
        batch=batch,
        sampled=sampled,
        popularity=popularity,
        recommended=recommended,
        progress=progress,
    )
    label = "" if sampled is None else "sampled "

    def figures(of: Ranking) -> dict[str, Any]:
        return {
            "targets": len(of),
            "metrics": {label + name: value for name, value in of.metrics().items()},
            "standard_errors": {label + name: value for name, value in of.standard_errors().items()},
        }

    def grouped(groups: list[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
        return [{"group": name, **figures(ranking.take(rows))} for name, rows in groups if rows.any()]

    ranked = (
        f"all {num_items:,} items" if sampled is None else f"target and {sampled.count:,} sampled items ({sampled.by})"
    )
    return {
        "protocol": {
            "ranked": ranked,
            "label": label,
            "filter_seen": filter_seen,
            "targets_seen_before": int(_repeats(targets, histories).sum()),
            "max_length": max_length,
            "ties": "count against the target",
            "items": num_items,
        },
        **figures(ranking),
        "coverage": recommended.coverage(),
        "by_history_length": grouped(history_lengths(targets.ends)),
        "by_popularity": grouped(item_popularity(targets.items, popularity)),
        "popularity_bias": popularity_bias(popularity, recommended.counts),
    }


def evaluate_split(
    model: PrismForRecommendation, split: Split, part: Literal["test", "validation"] = "test", **how: Any
) -> dict[str, Any]:
    """`evaluate_ranking` of a part of a split, which the results name; popularity is that of the training events."""
    if part not in ("test", "validation"):
        raise ValueError(f"the part to evaluate on must be 'test' or 'validation', got {part!r}")
    targets = split.test if part == "test" else split.validation
    popularity = split.train.counts(model.config.num_items)
    results = evaluate_ranking(model, targets, split.histories, popularity=popularity, **how)
    results["protocol"] |= {"split": split.name, "cuts": split.cuts, "part": part}
    return {**results, "split": split.counts}


def protocol_line(protocol: Mapping[str, Any]) -> str:
    """What must stand beside every figure."""
    words = [protocol[key] for key in ("part", "split") if key in protocol]
    words.append(f"ranked: {protocol['ranked']}")
    repeats = f" ({again:,} targets seen before)" if (again := protocol["targets_seen_before"]) else ""
    words.append(("seen items left out" if protocol["filter_seen"] else "seen items ranked too") + repeats)
    words.append(f"at most {protocol['max_length']:,} events read")
    return ", ".join(words)


def _scores(model: PrismForRecommendation, part: Targets, histories: Histories, max_length: int) -> Tensor:
    """Of all items after each context, `[B, N + 1]`."""
    events = contexts(histories, part.users, part.ends, max_length)
    device = model.item_counts.device
    gaps = None
    if model.config.time_gaps:
        if events.gaps is None:
            raise ValueError("the model knows how long after one another events came: the log needs times")
        gaps = torch.from_numpy(events.gaps).to(device)
    lengths = torch.from_numpy(events.mask.sum(1)).to(device)
    return model.scores(model.last_hidden(torch.from_numpy(events.items).to(device), lengths, gaps))


def _seen(part: Targets, histories: Histories) -> Tensor:
    """Every item of the whole history before each target, int64 `[B, E]`, filled up with 0."""
    return torch.from_numpy(contexts(histories, part.users, part.ends, int(part.ends.max())).items)


def _repeats(targets: Targets, histories: Histories) -> np.ndarray:
    """Which targets' items are in their contexts already, bool `[M]`."""
    stride = int(histories.items.max(initial=0)) + 1
    pairs = np.repeat(np.arange(len(histories)), histories.lengths) * stride + histories.items
    _, first, each = np.unique(pairs, return_index=True, return_inverse=True)  # the pair's first place, for every event
    places = histories.offsets[targets.users] + targets.ends
    return first[each[places]] < places
