"""Evaluate a recommender: rank held-out events and compute the metrics, in total and by group.

For each target the model reads the last `max_length` events before it and ranks items:

- all items ("full", the default), or the target among `sampled` others. Sampled metrics carry the word "sampled" in their
  names: they are cheap and common, but not comparable with full ones and may order models differently.
- without the items that the user already had (`filter_seen`), looked up in the whole history and not only in the events
  that were read. The target itself is always ranked. If it was seen before too, it has fewer rivals than in a system that
  shows seen items: the number of such targets is counted and printed.

A mean over all targets hides who is served and what is shown. So metrics are also given by length of history and by
popularity of the target, and the top-k lists by popularity of the items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from prism.recommend.events.histories import Histories, contexts
from prism.recommend.events.split import Split, Targets
from prism.recommend.lists import TopKCounts, serendipity
from prism.recommend.model import PrismForRecommendation
from prism.recommend.ranking import EVENTS_AT_ONCE, SCORES_AT_ONCE, Ranking, candidates, count, ranks
from prism.recommend.scorer import ModelScorer, Scorer

Progress = Callable[[int, int], None]
"""Called with (targets done, targets in total)."""
BATCH = 256
_LENGTHS = (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_DECILES = 10


@dataclass(frozen=True)
class Sampled:
    """Rank a target among `count` sampled items instead of all."""

    count: int
    by: Literal["uniform", "popularity"] = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"sampled must be at least 1 item, got {self.count}")
        if self.by not in ("uniform", "popularity"):
            raise ValueError(f"sampled_by must be 'uniform' or 'popularity', got {self.by!r}")


@torch.no_grad()
def rank_targets(
    model: PrismForRecommendation | Scorer,
    targets: Targets,
    histories: Histories,
    *,
    max_length: int,
    filter_seen: bool = True,
    batch: int = BATCH,
    sampled: Sampled | None = None,
    popularity: np.ndarray | None = None,
    recommended: TopKCounts | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Rank each target, in the order of `targets`.

    Args:
        model: a model, or a baseline.
        batch: targets at once; fewer if histories are very long or items very many. It does not change the result.
        popularity: `[N + 1]`, for `sampled` by popularity.
        recommended: counts the top-k lists of all items.
    """
    for name, value in (("max_length", max_length), ("batch", batch), ("the number of targets", len(targets))):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    training = isinstance(model, PrismForRecommendation) and model.training
    scorer = ModelScorer(model.eval()) if isinstance(model, PrismForRecommendation) else model
    num_items = scorer.num_items
    found = np.empty((2, len(targets)), dtype=np.int64)
    others = None if sampled is None else sampler(sampled, num_items, popularity)
    order = np.argsort(targets.ends, kind="stable")  # similar lengths together: little padding
    batch = min(batch, max(1, SCORES_AT_ONCE // (num_items + 1)))
    done = 0
    while done < len(targets):
        rows = order[done : done + batch]
        longest = min(int(targets.ends[rows[-1]]), max_length)
        rows = rows[: max(1, EVENTS_AT_ONCE // longest)]
        part = targets.take(rows)
        scores = scorer.scores(part, histories, max_length)
        wanted = torch.from_numpy(part.items).to(scores.device)
        seen = _seen(part, histories).to(scores.device) if filter_seen else None
        candidate_mask = candidates(num_items, wanted, seen)
        if recommended is not None:
            recommended.add(scores, candidate_mask, rows)
        if others is not None:
            candidate_mask = others(candidate_mask, wanted, rows)
        found[0, rows] = ranks(scores, wanted, candidate_mask=candidate_mask).cpu().numpy()
        found[1, rows] = count(candidate_mask).cpu().numpy()
        done += len(rows)
        if progress is not None:
            progress(done, len(targets))
    if isinstance(model, PrismForRecommendation):
        model.train(training)
    return Ranking(found[0], found[1])


def evaluate_ranking(
    model: PrismForRecommendation | Scorer, targets: Targets, histories: Histories, **how: Any
) -> dict[str, Any]:
    """The results of `measure`."""
    return measure(model, targets, histories, **how)[1]


def measure(
    model: PrismForRecommendation | Scorer,
    targets: Targets,
    histories: Histories,
    *,
    max_length: int,
    filter_seen: bool = True,
    batch: int = BATCH,
    sampled: Sampled | None = None,
    train: Histories | None = None,
    progress: Progress | None = None,
) -> tuple[Ranking, dict[str, Any]]:
    """The ranking, and all metrics with standard errors: in total, by history length, by the target's popularity, of lists.

    Args:
        train: the events of training: how popular items are, and which are alike. None: all of `histories`.
    """
    num_items = model.config.num_items if isinstance(model, PrismForRecommendation) else model.num_items
    train = histories if train is None else train
    popularity = train.counts(num_items)
    recommended = TopKCounts(num_items, targets=len(targets))
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

    def metrics_of(of: Ranking) -> dict[str, Any]:
        return {
            "targets": len(of),
            "metrics": {label + name: value for name, value in of.metrics().items()},
            "standard_errors": {label + name: value for name, value in of.standard_errors().items()},
        }

    def grouped(groups: list[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
        return [{"group": name, **metrics_of(ranking.take(rows))} for name, rows in groups if rows.any()]

    ranked = (
        f"all {num_items:,} items" if sampled is None else f"target and {sampled.count:,} sampled items ({sampled.by})"
    )
    hits = serendipity(ranking, targets.items, popularity)  # of the ranking, so sampled where that is
    results = {
        "protocol": {
            "ranked": ranked,
            "label": label,
            "filter_seen": filter_seen,
            "targets_seen_before": int(_repeats(targets, histories).sum()),
            "max_length": max_length,
            "ties": "count against the target",
            "items": num_items,
        },
        **metrics_of(ranking),
        "coverage": recommended.coverage(),
        "novelty": recommended.novelty(popularity),
        "diversity": recommended.diversity(train, num_items),
        "serendipity": {label + name: value for name, value in hits.items()},
        "by_history_length": grouped(history_lengths(targets.ends)),
        "by_popularity": grouped(item_popularity(targets.items, popularity)),
        "popularity_bias": popularity_bias(popularity, recommended.counts),
    }
    return ranking, results


def evaluate_split(
    model: PrismForRecommendation | Scorer, split: Split, part: Literal["test", "validation"] = "test", **how: Any
) -> dict[str, Any]:
    """`evaluate_ranking` on one part of a split; popularity is that of the training events."""
    return measure_split(model, split, part, **how)[1]


def measure_split(
    model: PrismForRecommendation | Scorer, split: Split, part: Literal["test", "validation"] = "test", **how: Any
) -> tuple[Ranking, dict[str, Any]]:
    """`measure` on one part of a split."""
    if part not in ("test", "validation"):
        raise ValueError(f"part must be 'test' or 'validation', got {part!r}")
    targets = split.test if part == "test" else split.validation
    ranking, results = measure(model, targets, split.histories, train=split.train, **how)
    results["protocol"] |= {"split": split.name, "cuts": split.cuts, "part": part}
    return ranking, {**results, "split": split.counts}


def protocol_line(protocol: Mapping[str, Any]) -> str:
    """The protocol in one line, to be shown with every metric."""
    words = [protocol[key] for key in ("part", "split") if key in protocol]
    words.append(f"ranked: {protocol['ranked']}")
    repeats = f" ({again:,} targets seen before)" if (again := protocol["targets_seen_before"]) else ""
    words.append(("seen items left out" if protocol["filter_seen"] else "seen items ranked too") + repeats)
    words.append(f"at most {protocol['max_length']:,} events read")
    return ", ".join(words)


def sampler(
    sampled: Sampled, num_items: int, popularity: np.ndarray | None
) -> Callable[[Tensor, Tensor, np.ndarray], Tensor]:
    """A function that keeps the target and `count` other candidates, drawn without replacement by seed and row."""
    if sampled.count > num_items:
        raise ValueError(f"sampled must be at most the number of items, {num_items:,}, got {sampled.count:,}")
    weights = np.ones(num_items + 1)
    if sampled.by == "popularity":
        if popularity is None:
            raise ValueError("sampling by popularity needs the argument popularity, the counts of the items")
        weights = np.maximum(popularity, 1e-9).astype(np.float64)
    log_weights = torch.from_numpy(np.log(weights))

    def keep(candidate_mask: Tensor, wanted: Tensor, rows: np.ndarray) -> Tensor:
        # Gumbel top-k: the largest log-weights with noise are a weighted draw without replacement
        noise = np.stack(
            [np.random.default_rng((sampled.seed, row)).gumbel(size=num_items + 1) for row in rows.tolist()]
        )
        keys = (log_weights + torch.from_numpy(noise)).to(candidate_mask.device)
        free = candidate_mask.scatter(1, wanted[:, None], False)
        keys = keys.masked_fill(~free, -torch.inf)
        drawn = keys.topk(sampled.count, dim=1).indices
        kept = torch.zeros_like(candidate_mask).scatter_(1, drawn, True) & free
        return kept.scatter_(1, wanted[:, None], True)

    return keep


def history_lengths(lengths: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Groups of targets by the number of events before each, int `[M]`: (name, bool `[M]`)."""
    groups = [(f"{low + 1:,} to {high:,}", (lengths > low) & (lengths <= high)) for low, high in pairwise(_LENGTHS)]
    return [*groups, (f"over {_LENGTHS[-1]:,}", lengths > _LENGTHS[-1])]


def item_popularity(items: np.ndarray, popularity: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Groups of targets by how often their items occur in training: (name, bool `[M]`).

    head, middle and tail are the most, the next and the least popular items, each with a third of the events.
    """
    by_rank = np.argsort(-popularity[1:], kind="stable") + 1
    before = np.cumsum(popularity[by_rank]) - popularity[by_rank]
    third = np.zeros(len(popularity), dtype=np.int64)
    third[by_rank] = np.minimum(3 * before // max(1, popularity.sum()), 2)
    third[popularity == 0] = 3
    names = ("head", "middle", "tail", "never in training")
    return [(name, third[items] == group) for group, name in enumerate(names)]


def popularity_bias(popularity: np.ndarray, recommended: dict[int, np.ndarray]) -> dict[str, Any]:
    """Ten groups of equally many items, the most popular first: their fractions of the events and of the top-k lists."""
    by_rank = np.argsort(-popularity[1:], kind="stable") + 1
    groups = np.array_split(by_rank, min(_DECILES, len(by_rank)))

    def shares(counts: np.ndarray) -> list[float]:
        return [float(counts[group].sum() / max(1, counts.sum())) for group in groups]

    return {
        "items_in_group": [len(group) for group in groups],
        "share_of_events": shares(popularity),
        "share_of_recommendations": {f"@{k}": shares(counts) for k, counts in recommended.items()},
    }


def _seen(part: Targets, histories: Histories) -> Tensor:
    """All items of the whole history before each target, int64 `[B, E]`, padded with 0."""
    return torch.from_numpy(contexts(histories, part.users, part.ends, int(part.ends.max())).items)


def _repeats(targets: Targets, histories: Histories) -> np.ndarray:
    """Which targets' items already are in their contexts, bool `[M]`."""
    repeats = np.zeros(len(targets), dtype=bool)
    order = np.argsort(targets.users, kind="stable")
    of_user = targets.users[order]
    for first, last in histories.blocks():
        rows = order[np.searchsorted(of_user, first) : np.searchsorted(of_user, last)]
        start = histories.offsets[first]
        items = histories.items[start : histories.offsets[last]]
        stride = int(items.max(initial=0)) + 1
        pairs = np.repeat(np.arange(last - first), histories.lengths[first:last]) * stride + items
        _, first_seen, each = np.unique(pairs, return_index=True, return_inverse=True)
        places = histories.offsets[targets.users[rows]] + targets.ends[rows] - start
        repeats[rows] = first_seen[each[places]] < places  # the pair of user and item occurred earlier
    return repeats
