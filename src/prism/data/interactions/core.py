"""The k-core of a log: what is left when users and items with few events are taken out until none is left."""

from __future__ import annotations

import numpy as np

from prism.data.interactions.log import Log, codes


def k_core(log: Log, users: int = 1, items: int = 1) -> Log:
    """Every user has at least `users` events and every item at least `items`, repeated events counted each."""
    for name, least in (("users", users), ("items", items)):
        if least < 1:
            raise ValueError(f"{name} must be at least 1, got {least}")
    coded = [codes(log.frame[name], log.frame[name].unique().sort()).to_numpy() for name in ("user", "item")]
    kept = core_mask(coded[0], coded[1], users, items)
    if not kept.any():
        raise ValueError(f"no event is left with at least {users} events of each user and {items} of each item")
    before = [len(np.unique(column)) for column in coded]
    after = [len(np.unique(column[kept])) for column in coded]
    return log.keep(
        kept,
        {
            "users_dropped": before[0] - after[0],
            "items_dropped": before[1] - after[1],
            "events_dropped": int((~kept).sum()),
        },
    )


def core_mask(users: np.ndarray, items: np.ndarray, least_user: int, least_item: int) -> np.ndarray:
    """Which events stay, bool `[N]`; users and items are small integers `[N]`."""
    kept = np.ones(len(users), dtype=bool)
    while True:
        enough = (np.bincount(users[kept], minlength=users.max() + 1) >= least_user)[users]
        enough &= (np.bincount(items[kept], minlength=items.max() + 1) >= least_item)[items]
        if (enough | ~kept).all():
            return kept
        kept &= enough
