"""Synthetic events: users with several drifting interests, in a catalogue of series. A function of the seed.

Items form clusters (a genre, a department). Inside a cluster they form a ring (episodes of a series) and have a Zipf
popularity that is independent of the ring. A user follows a few clusters at a time, with unequal weights, and takes
no item twice. At each event

    drift    with probability `drift`, and when all of a cluster is taken, that interest is given up for another cluster
             (popular clusters more often);
    switch   with probability 1 - `stay`, the user turns to one of the interests, by their weights;
    choose   with probability `follow`, the next free item after the one last taken in that cluster, however long ago that
             was; otherwise (and in a new cluster) a free item of the cluster by its popularity.

Events of one sitting are minutes apart, a switch comes after about a day. So the last item predicts something (the ring),
but what a user will take on returning to an interest is known only to a model that remembers where it was left.
"""

from __future__ import annotations

import numpy as np

from prism.recommend.events.dataset import Dataset
from prism.recommend.events.histories import Histories
from prism.recommend.events.ids import Catalogue, Feature, Users

_SHORTEST = 5
_START = 1_700_000_000
_YEAR = 365 * 86_400


def synthetic_dataset(
    users: int = 600,
    items: int = 400,
    events: int = 40_000,
    seed: int = 0,
    *,
    cluster: int = 20,
    interests: int = 4,
    stay: float = 0.6,
    follow: float = 0.8,
    drift: float = 0.02,
) -> Dataset:
    """Make a dataset of exactly `events` events. Histories have very different lengths, from 5 to half of the items.

    Args:
        items: items to choose from; those that no user takes are not in the catalogue.
        cluster: items in a cluster.
        interests: clusters that a user follows at a time.
    """
    if users < 1 or events < users * _SHORTEST:
        raise ValueError(f"events must be at least {_SHORTEST} for each of {users} users, got {events}")
    clusters = items // cluster
    if clusters <= interests:
        raise ValueError(f"items must fill more than {interests} clusters of {cluster}, got {items}")
    random = np.random.default_rng(seed)
    longest = clusters * cluster // 2
    if events > users * longest:
        raise ValueError(
            f"events must be at most {longest} (half of the items) for each of {users} users, got {events}"
        )
    lengths = _lengths(users, events, longest, random)
    chosen, gaps = _events(lengths, clusters, cluster, interests, stay, follow, drift, random)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    taken, places = np.unique(chosen, return_inverse=True)
    elapsed = np.cumsum(gaps)
    first = elapsed[offsets[:-1]]
    begin = _START + random.random(users) * _YEAR
    times = np.floor(elapsed + np.repeat(begin - first, lengths))
    names = [f"series{item // cluster + 1:03d}-{item % cluster + 1:02d}" for item in taken.tolist()]
    series, of_item = np.unique(taken // cluster, return_inverse=True)
    feature = Feature([None, *(f"series{number + 1:03d}" for number in series.tolist())], np.append(0, of_item + 1))
    manifest = {
        "counts": {"users": users, "items": len(taken), "events": events},
        "notes": [f"synthetic events, seed {seed}"],
        "times": True,
    }
    return Dataset(
        Histories(offsets, places.astype(np.int64) + 1, times),
        Catalogue(names, {"series": feature}),
        Users([f"user{n + 1:05d}" for n in range(users)]),
        manifest,
    )


def _lengths(users: int, events: int, longest: int, random: np.random.Generator) -> np.ndarray:
    """Lengths of histories: log-normal, from _SHORTEST to `longest`, with the sum `events`; int64 `[users]`."""
    weights = random.lognormal(0, 0.8, users)
    ends = np.round(np.cumsum(weights) / weights.sum() * (events - users * _SHORTEST)).astype(np.int64)
    lengths = np.minimum(np.diff(ends, prepend=0) + _SHORTEST, longest)
    while over := events - lengths.sum():  # give the events that were cut off to the shortest, one each
        shortest = np.argsort(lengths, kind="stable")[:over]
        lengths[shortest[lengths[shortest] < longest]] += 1
    return lengths


def _events(
    lengths: np.ndarray,
    clusters: int,
    cluster: int,
    interests: int,
    stay: float,
    follow: float,
    drift: float,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Items 0 … clusters·cluster - 1 and seconds since the previous event, user after user: `[N]` both.

    All users take their t-th event together; those with long histories continue when the others have ended.
    """
    order = np.argsort(-lengths, kind="stable")  # active users are then always the first rows
    active_at = np.searchsorted(-lengths[order], -np.arange(lengths.max()), "left")  # users with more than t events
    users = len(lengths)
    cluster_odds = np.log(_zipf(clusters))
    item_odds = np.log(random.permuted(np.tile(_zipf(cluster), (clusters, 1)), axis=1))
    followed = np.argsort(random.gumbel(size=(users, clusters)) + cluster_odds, axis=1)[:, -interests:]
    weights = np.cumsum(random.dirichlet(np.full(interests, 2.0), users), axis=1)
    current = np.zeros(users, dtype=np.int64)
    left_at = np.full((users, clusters), -1)
    free = np.ones((users, clusters, cluster), dtype=bool)
    steps_items, steps_gaps = [], []
    for active in active_at.tolist():
        rows = np.arange(active)
        turning = random.random(active) >= stay
        by_weight = (random.random((active, 1)) > weights[:active, :-1]).sum(1)
        slot = current[:active] = np.where(turning, by_weight, current[:active])
        leaving = np.flatnonzero((random.random(active) < drift) | ~free[rows, followed[rows, slot]].any(1))
        # the largest of log-odds with Gumbel noise is a draw by those odds
        draw = random.gumbel(size=(len(leaving), clusters)) + cluster_odds
        # clusters that are already followed: only if nothing else is left
        draw[np.arange(len(leaving))[:, None], followed[leaving]] -= 1e6
        draw[free[leaving].sum(2) == 0] = -np.inf
        followed[leaving, slot[leaving]] = draw.argmax(1)
        where = followed[rows, slot]
        left = left_at[rows, where]
        ahead = (left[:, None] + 1 + np.arange(cluster)) % cluster
        following = ahead[rows, free[rows[:, None], where[:, None], ahead].argmax(1)]
        noise = random.gumbel(size=(active, cluster)) + item_odds[where]
        popular = np.where(free[rows, where], noise, -np.inf).argmax(1)
        item = np.where((random.random(active) < follow) & (left >= 0), following, popular)
        left_at[rows, where] = item
        free[rows, where, item] = False
        steps_items.append(where * cluster + item)
        steps_gaps.append(random.exponential(np.where(turning, 86_400.0, 300.0)))
    step = np.repeat(np.arange(len(active_at)), active_at)
    user = order[np.concatenate([np.arange(active) for active in active_at.tolist()])]
    by_user = np.lexsort((step, user))
    return np.concatenate(steps_items)[by_user], np.concatenate(steps_gaps)[by_user]


def _zipf(size: int) -> np.ndarray:
    odds = 1 / np.arange(1, size + 1)
    return odds / odds.sum()
