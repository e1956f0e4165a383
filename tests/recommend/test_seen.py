"""States remember which items their users had: exactly, after any order of events, restarts, picking and joining."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend import Recommender, UserStates
from prism.recommend.events import Histories
from prism.recommend.seen import SeenItems
from tests.recommend.test_recommender import ITEMS, NAMES, recommender

IT = recommender()
EVENTS = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=4), min_size=3, max_size=3)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), EVENTS),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("pick"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
        st.tuples(st.just("join"), st.integers(0, 2)),
    ),
    max_size=8,
)


def restarted(states: UserStates, path: Path) -> tuple[Recommender, UserStates]:
    """What another process has: a recommender from its folder, states from their file."""
    states.save(path / "states.safetensors")
    return recommender(), UserStates.load(path / "states.safetensors")


@settings(max_examples=25, deadline=None)
@given(ACTIONS)
@torch.no_grad()
def test_no_seen_item_is_recommended_unless_asked(actions: list[tuple[str, Any]]) -> None:
    it, states = IT, IT.start(3)
    had: list[set[str]] = [set(), set(), set()]
    with tempfile.TemporaryDirectory() as folder:
        for action, what in actions:
            if action == "observe":
                events = [[NAMES[item] for item in row] for row in what]
                states = it.observe(states, events)
                had = [old | set(new) for old, new in zip(had, events, strict=True)]
            elif action == "restart":
                it, states = restarted(states, Path(folder))
            elif action == "pick":
                states, had = states.index_select(what), [had[user] for user in what]
            else:
                others = [user for user in range(3) if user != what]
                states = UserStates.concatenate([states.index_select([what]), states.index_select(others)])
                had = [had[user] for user in (what, *others)]
            found = it.recommend(states, k=ITEMS)
            assert [set(items) for items in found.items] == [set(NAMES) - items for items in had]
            everything = it.recommend(states, k=ITEMS, filter_seen=False)
            assert [set(items) for items in everything.items] == [set(NAMES)] * 3


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 300), max_size=6), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_seen_items_are_sets(batches: list[list[list[int]]]) -> None:
    seen, expected = SeenItems.none(4), [set[int]() for _ in range(4)]
    for batch in batches:
        lengths = np.array([len(row) for row in batch])
        items = np.array([item for row in batch for item in row], dtype=np.int64)
        seen = seen.add(Histories(np.concatenate([[0], np.cumsum(lengths)]), items))
        expected = [old | set(row) for old, row in zip(expected, batch, strict=True)]
    assert [seen.user(user).tolist() for user in range(4)] == [sorted(items) for items in expected]
    assert seen.items.dtype == np.int32 and seen.nbytes == 4 * sum(map(len, expected)) + 8 * 5
    again = SeenItems.load(seen.tensors(), 4)
    assert [again.user(user).tolist() for user in range(4)] == [sorted(items) for items in expected]
