"""Losses: exact where they claim to be, unbiased where they claim to be, and equal in chunks and in one piece."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prism.models.cross_entropy import rows_at_once
from prism.recommend.losses import (
    LOSSES,
    InBatch,
    Negatives,
    Popularity,
    Uniform,
    bce,
    full_softmax,
    gbce,
    item_loss,
    sampled_softmax,
    sampler,
)
from tests.helpers import examples

few = examples(25)


def case(rows: int, items: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    vectors = torch.randn(items + 1, width, dtype=dtype, requires_grad=True)
    return hidden, vectors, torch.randint(0, items + 1, (rows,))


def reference(hidden: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
    """All logits at once; item 0 is no item."""
    return F.cross_entropy(hidden @ vectors[1:].T, targets - 1, ignore_index=-1, reduction="sum")


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@few
@given(
    rows=st.integers(1, 12),
    items=st.integers(1, 9),
    width=st.integers(1, 5),
    chunk=st.integers(1, 13),
    seed=st.integers(0, 99),
)
def test_full_softmax_is_cross_entropy(rows: int, items: int, width: int, chunk: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, vectors, targets = case(rows, items, width)
    loss, expected = full_softmax(hidden, vectors, targets, chunk), reference(hidden, vectors, targets)
    torch.testing.assert_close(loss, expected)
    got, wanted = gradients(3 * loss, hidden, vectors), gradients(3 * expected, hidden, vectors)
    torch.testing.assert_close(got, wanted)


def test_full_softmax_keeps_rows_without_target_out_on_any_device() -> None:
    """Where finding them would mean waiting for a device, they are computed and count nothing."""
    torch.manual_seed(0)
    hidden, vectors, targets = case(6, 5, 3)
    targets[::2] = 0
    expected = full_softmax(hidden, vectors, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prism.recommend.losses.values_may_be_read", lambda x: False)
        loss = full_softmax(hidden, vectors, targets, 4)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(loss, hidden, vectors), gradients(expected, hidden, vectors))


def test_full_softmax_gradcheck() -> None:
    torch.manual_seed(1)
    hidden, vectors, targets = case(5, 4, 3)
    assert torch.autograd.gradcheck(lambda h, v: full_softmax(h, v, targets, 2), (hidden, vectors))


def test_full_softmax_with_scores_that_would_overflow() -> None:
    hidden, vectors, targets = case(4, 6, 3, torch.float32)
    loss = full_softmax(hidden * 1e4, vectors, targets)
    torch.testing.assert_close(loss, reference(hidden * 1e4, vectors, targets))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor)), 0)
        return made


def test_full_softmax_never_holds_all_logits() -> None:
    hidden, vectors, targets = case(300, 200, 4, torch.float32)
    with Largest() as largest:
        full_softmax(hidden, vectors, targets, chunk=10).backward()
    assert largest.numbers == 10 * 200
    assert 1_000_000 * rows_at_once(1_000_000, "cpu") <= 2**26


def test_full_softmax_needs_no_gradients() -> None:
    hidden, vectors, targets = case(7, 6, 3)
    with torch.no_grad():
        torch.testing.assert_close(full_softmax(hidden, vectors, targets, 3), reference(hidden, vectors, targets))
    (only,) = gradients(full_softmax(hidden, vectors.detach(), targets), hidden)
    torch.testing.assert_close(only, gradients(reference(hidden, vectors, targets), hidden)[0])


def test_under_autocast_losses_add_up_in_float32() -> None:
    torch.manual_seed(2)
    hidden, vectors, targets = case(200, 30, 8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = {name: item_loss(name, 30)(hidden.bfloat16(), vectors, targets) for name in LOSSES}
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    torch.testing.assert_close(losses["full_softmax"], reference(hidden, vectors, targets), rtol=5e-3, atol=0.0)


@few
@given(rows=st.integers(1, 8), items=st.integers(2, 9), seed=st.integers(0, 99), own=st.booleans())
def test_sampled_softmax_of_all_items_is_the_full_one(rows: int, items: int, seed: int, own: bool) -> None:
    torch.manual_seed(seed)
    hidden, vectors, targets = case(rows, items, 4)
    everything = torch.arange(1, items + 1)
    everything = everything.expand(rows, -1) if own else everything
    for log_expected in (None, torch.zeros(everything.shape)):
        loss = sampled_softmax(hidden, vectors, targets, Negatives(everything, log_expected))
        expected = reference(hidden, vectors, targets)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(loss, hidden, vectors), gradients(expected, hidden, vectors))


def test_logq_makes_the_sum_over_negatives_unbiased() -> None:
    """Over everything that could be drawn, by its probability, e^loss is the normaliser of the full softmax, exactly."""
    torch.manual_seed(3)
    counts = torch.tensor([0, 5, 1, 1, 9])
    hidden, vectors, _ = case(1, 4, 3)
    target = torch.tensor([2])
    popularity = Popularity(counts)
    mean = sum(
        popularity.share[j]
        * sampled_softmax(hidden, vectors, target, Negatives(j[None], popularity.log_expected(j[None], 1))).exp()
        for j in torch.arange(1, 5)
    )
    torch.testing.assert_close(mean, reference(hidden, vectors, target).exp(), rtol=1e-6, atol=0.0)


def test_in_batch_negatives_are_corrected_by_their_popularity() -> None:
    """All that a batch could be, by its probability: e^loss is the normaliser of the full softmax here too."""
    torch.manual_seed(9)
    counts = torch.tensor([0, 5, 1, 1, 9])
    hidden, vectors, _ = case(1, 4, 3)
    source = InBatch(counts)
    mean = sum(
        source.share[j] * sampled_softmax(hidden, vectors, torch.tensor([2]), source.draw(torch.tensor([j]), 3)).exp()
        for j in range(1, 5)
    )
    torch.testing.assert_close(mean, reference(hidden, vectors, torch.tensor([2])).exp(), rtol=1e-6, atol=0.0)


def test_the_correction_can_be_left_out() -> None:
    hidden, vectors, targets = case(6, 9, 3)
    losses = []
    for logq in (True, False):
        torch.manual_seed(10)
        losses.append(item_loss("sampled_softmax", 9, count=4, logq=logq)(hidden, vectors, targets))
    torch.manual_seed(10)
    drawn = Uniform(9).draw(targets, 4)
    torch.testing.assert_close(losses[0], sampled_softmax(hidden, vectors, targets, drawn))
    torch.testing.assert_close(losses[1], sampled_softmax(hidden, vectors, targets, Negatives(drawn.items, None)))
    assert losses[0].item() != losses[1].item()


def test_bce_counts_each_yes_and_no_once() -> None:
    torch.manual_seed(4)
    hidden, vectors, _ = case(3, 5, 2)
    targets, negatives = (
        torch.tensor([1, 0, 3]),
        torch.tensor([[2, 1], [4, 5], [3, 5]]),
    )  # 1 and 3 are targets, and no noes
    scores = hidden @ vectors.T
    yes = F.logsigmoid(scores[0, 1]) + F.logsigmoid(scores[2, 3])
    noes = F.logsigmoid(-scores[0, 2]) + F.logsigmoid(-scores[2, 5])
    torch.testing.assert_close(bce(hidden, vectors, targets, Negatives(negatives, None)), -(yes + noes) / 3)


def test_gbce_is_calibrated_by_t() -> None:
    torch.manual_seed(5)
    hidden, vectors, targets = case(4, 11, 3)
    drawn = Uniform(11).draw(targets, 2)
    torch.testing.assert_close(gbce(hidden, vectors, targets, drawn, t=0.0), bce(hidden, vectors, targets, drawn))
    torch.testing.assert_close(
        gbce(hidden, vectors, targets, drawn, t=1.0), bce(hidden, vectors, targets, drawn, power=0.2)
    )
    with pytest.raises(ValueError, match="t must be between 0 and 1"):
        gbce(hidden, vectors, targets, drawn, t=2.0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("negatives", ["uniform", "popularity", "in_batch"])
@pytest.mark.parametrize("own", [False, True])
def test_every_loss_falls_when_it_is_descended(name: str, negatives: str, own: bool) -> None:
    torch.manual_seed(6)
    hidden, vectors, _ = case(12, 8, 4, torch.float32)
    targets = torch.arange(12).reshape(3, 4) % 9
    loss = item_loss(name, 8, negatives=negatives, count=4, own=own, counts=torch.arange(9))
    optimizer = torch.optim.SGD([hidden, vectors], lr=0.5)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        value = loss(hidden.reshape(3, 4, 4), vectors, targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert bool((vectors.grad[0] == 0).all()), "padding has no vector to learn"


@pytest.mark.parametrize("name", LOSSES)
def test_no_targets_no_loss(name: str) -> None:
    hidden, vectors, targets = case(3, 4, 2)
    loss = item_loss(name, 4, count=2)(hidden, vectors, torch.zeros_like(targets))
    assert loss.item() == 0.0
    loss.backward()


def test_negatives_come_as_often_as_they_say() -> None:
    torch.manual_seed(7)
    counts = torch.tensor([3, 4, 0, 1, 5])  # what is said of padding does not matter
    drawn = Popularity(counts).draw(torch.tensor([1]), 40_000)
    share = torch.bincount(drawn.items, minlength=5) / 40_000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.4, 0.0, 0.1, 0.5]), atol=0.02, rtol=0.0)
    torch.testing.assert_close(drawn.log_expected.exp(), 40_000 * torch.tensor([0, 0.4, 0, 0.1, 0.5])[drawn.items])
    uniform = Uniform(4).draw(torch.tensor([1]), 40_000)
    torch.testing.assert_close(
        torch.bincount(uniform.items) / 40_000, torch.tensor([0, 0.25, 0.25, 0.25, 0.25]), atol=0.02, rtol=0.0
    )
    assert uniform.log_expected[0].item() == pytest.approx(math.log(10_000))
    batch = InBatch(counts).draw(torch.tensor([1, 0, 4, 4]), 9_000).items
    assert set(batch.tolist()) == {1, 4}
    assert (batch == 4).float().mean().item() == pytest.approx(2 / 3, abs=0.03)


def test_negatives_are_those_of_the_global_random_numbers() -> None:
    targets = torch.tensor([1, 2])
    for kind in ("uniform", "popularity", "in_batch"):
        source = sampler(kind, 5, torch.arange(6))
        torch.manual_seed(8)
        first = source.draw(targets, 6, own=True).items
        torch.manual_seed(8)
        assert torch.equal(source.draw(targets, 6, own=True).items, first)
        assert first.shape == (2, 6)


def test_bad_input_is_named() -> None:
    hidden, vectors, targets = case(3, 4, 2)
    for call, words in (
        (lambda: item_loss("mse", 4), "unknown loss 'mse'"),
        (lambda: item_loss("bce", 4, negatives="hard"), "unknown negatives 'hard'"),
        (lambda: item_loss("bce", 4, negatives="popularity"), "need counts"),
        (lambda: Popularity(torch.zeros(5)), "all are 0"),
        (lambda: Uniform(4).draw(targets, 0), "at least 1"),
        (lambda: full_softmax(hidden, vectors, targets[:2]), "targets must be"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
