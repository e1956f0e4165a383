"""The order of samples is a bijection in every epoch, and a pure function of seed and sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.train.order import sequence_of


@given(sequences=st.integers(1, 3000), epoch=st.integers(0, 50), seed=st.integers(-(2**63), 2**63))
def test_every_epoch_shows_every_sequence_once(sequences: int, epoch: int, seed: int) -> None:
    shown = sequence_of(np.arange(epoch * sequences, (epoch + 1) * sequences), sequences, seed)
    assert sorted(shown.tolist()) == list(range(sequences))


@given(
    samples=st.lists(st.integers(0, 10**12), min_size=1, max_size=20),
    sequences=st.integers(1, 10**9),
    seed=st.integers(0, 99),
)
def test_a_sample_does_not_depend_on_who_else_is_asked_for(samples: list[int], sequences: int, seed: int) -> None:
    together = sequence_of(np.array(samples), sequences, seed)
    alone = [int(sequence_of(np.array([sample]), sequences, seed)[0]) for sample in samples]
    assert together.tolist() == alone


def test_seeds_and_epochs_differ_and_look_shuffled() -> None:
    n = 1000
    orders = [sequence_of(np.arange(n), n, 0), sequence_of(np.arange(n), n, 1), sequence_of(np.arange(n, 2 * n), n, 0)]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.15
        assert all((order == other).mean() < 0.02 for other in orders[i + 1 :])
    assert np.abs(np.diff(orders[0])).mean() > n / 4


def test_the_order_is_pinned() -> None:
    """A change would silently alter what a resumed run trains on."""
    assert sequence_of(np.arange(8), 100, 7).tolist() == [81, 20, 91, 19, 90, 74, 44, 43]


def test_no_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="sequences must be at least 1"):
        sequence_of(np.arange(3), 0, 0)
