"""Rows' tokens are those of `Sampling.choose`, and a choice that rounding could change is called uncertain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.language.generate import Sampling
from prism.serve.lm.choice import choose_rows

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.8, 1.5]),
    top_k=st.sampled_from([None, 1, 3, 100]),
    top_p=st.sampled_from([None, 0.05, 0.5, 0.9]),
) | st.just(Sampling(0))


@settings(max_examples=60, deadline=None)
@given(st.lists(SAMPLINGS, min_size=1, max_size=4), st.integers(0, 2**30), st.sampled_from([2, 40]))
def test_certain_choices_hold_for_all_logits_within_the_tolerance(
    samplings: list[Sampling], seed: int, size: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(samplings), size, generator=random)
    logits = logits if seed % 2 else logits.round() + 0.04 * torch.rand(logits.shape, generator=random)  # many ties
    tolerance = torch.full((len(samplings),), 0.05)
    own = [torch.Generator().manual_seed(i) for i in range(len(samplings))]
    chosen = choose_rows(logits, samplings, own, tolerance)
    without = choose_rows(logits, samplings, [torch.Generator().manual_seed(i) for i in range(len(logits))], None)
    for i, (token, sampling) in enumerate(zip(chosen, samplings, strict=True)):
        alone = torch.Generator().manual_seed(i)
        assert without[i] == sampling.choose(logits[i], alone)
        fresh = torch.Generator().manual_seed(i)
        assert own[i].get_state().equal((fresh if token is None else alone).get_state())
        if token is not None:
            for _ in range(20):
                change = 0.05 * (2 * torch.rand(size, generator=random) - 1).sign()
                assert sampling.choose(logits[i] + change, torch.Generator().manual_seed(i)) == token


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, 1), Sampling(1.0, None, 0.01)])
def test_a_tie_is_uncertain(sampling: Sampling) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0005, -2.0], [1.0, 3.0, 4.0, -2.0]])
    chosen = choose_rows(logits, [sampling] * 2, [torch.Generator() for _ in range(2)], torch.full((2,), 1e-3))
    assert chosen == [None, 2]


def test_most_choices_are_certain() -> None:
    """Otherwise every text would be computed alone."""
    logits = 2 * torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(0), Sampling(0.8), Sampling(1.0, 40, 0.9)):
        randoms = [torch.Generator().manual_seed(i) for i in range(len(logits))]
        chosen = choose_rows(logits, [sampling] * len(logits), randoms, torch.full((len(logits),), 1e-4))
        assert chosen.count(None) <= 4
