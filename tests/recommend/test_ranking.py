"""Ranks and figures: equal to a public evaluator's where it has an opinion, and to the definition where it has none."""

from __future__ import annotations

import math

import ir_measures
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import RR, Qrel, ScoredDoc, Success, nDCG

from prism.recommend.evaluate import history_lengths, item_popularity, popularity_bias
from prism.recommend.ranking import CUTOFFS, Ranking, candidates, count, ranks
from prism.recommend.top_items import top_k

property_test = settings(max_examples=40, deadline=None)


def by_definition(scores: list[float], target: int, excluded: set[int]) -> tuple[int, int]:
    """Rank and number of candidates."""
    others = [item for item in range(1, len(scores)) if item != target and item not in excluded]
    before = [item for item in others if not scores[item] < scores[target]]
    return 1 + len(before), 1 + len(others)


@property_test
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(2, 40))
def test_figures_equal_ir_measures(seed: int, rows: int, items: int) -> None:
    """On scores without ties (pytrec_eval breaks them by name), with and without excluded items."""
    random = np.random.default_rng(seed)
    scores = random.permuted(np.tile(np.arange(items + 1.0), (rows, 1)), axis=1)
    targets = random.integers(1, items + 1, rows)
    exclude = random.integers(0, items + 1, (rows, int(random.integers(1, 8))))
    candidate_mask = candidates(items, torch.from_numpy(targets), torch.from_numpy(exclude))
    found = ranks(torch.from_numpy(scores), torch.from_numpy(targets), torch.from_numpy(exclude))
    ours = Ranking(found.numpy(), candidate_mask.sum(1).numpy()).metrics()
    right = [Qrel(str(row), str(item), 1) for row, item in enumerate(targets)]
    run = [
        ScoredDoc(str(row), str(item), scores[row, item])
        for row in range(rows)
        for item in range(1, items + 1)
        if item == targets[row] or item not in exclude[row]
    ]
    theirs = ir_measures.calc_aggregate([m @ k for m in (Success, nDCG, RR) for k in CUTOFFS], right, run)
    for name, measure in (("HR", Success), ("NDCG", nDCG), ("MRR", RR)):
        for k in CUTOFFS:
            assert ours[f"{name}@{k}"] == pytest.approx(theirs[measure @ k], abs=1e-6), f"{name}@{k}"


@property_test
@given(st.data())
def test_ties_and_numbers_that_are_none_count_against_the_target(data: st.DataObject) -> None:
    items = data.draw(st.integers(1, 9))
    value = st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf, -math.inf])
    scores = data.draw(st.lists(value, min_size=items + 1, max_size=items + 1))
    target = data.draw(st.integers(1, items))
    excluded = data.draw(st.sets(st.integers(1, items)))
    expected, others = by_definition(scores, target, excluded)
    exclude = torch.tensor([[*excluded, *excluded, 0]])
    wanted = torch.tensor([target])
    assert ranks(torch.tensor([scores]), wanted, exclude).tolist() == [expected]
    assert candidates(items, wanted, exclude).sum(1).tolist() == [others]


@pytest.mark.parametrize("items", [1, 127, 128, 129, 300, 1000])
def test_counting_in_blocks(items: int) -> None:
    mask = torch.rand(5, items) < torch.tensor([0, 0.1, 0.5, 0.9, 1])[:, None]
    assert count(mask).tolist() == mask.sum(1).tolist()
    assert count(mask).dtype == torch.int64


def test_a_model_without_an_opinion_is_last() -> None:
    targets = torch.tensor([1, 5, 9])
    assert ranks(torch.zeros(3, 10), targets).tolist() == [9, 9, 9]
    assert ranks(torch.full((3, 10), math.nan), targets).tolist() == [9, 9, 9]
    assert Ranking(np.array([9]), np.array([9])).metrics()["AUC"] == 0
    assert Ranking(np.array([1]), np.array([1])).metrics()["AUC"] == 1, "alone, it is before all others there are"


def test_item_0_is_never_ranked() -> None:
    scores = torch.tensor([[9.0, 1.0, 2.0]])
    assert ranks(scores, torch.tensor([2])).tolist() == [1]
    assert top_k(scores, candidates(2, torch.tensor([2])), 5).tolist() == [[2, 1]]


def test_figures_of_a_known_case() -> None:
    found = Ranking(np.array([1, 3, 8]), np.array([9, 9, 9])).metrics()
    assert found["HR@1"] == pytest.approx(1 / 3) and found["HR@5"] == pytest.approx(2 / 3) and found["HR@10"] == 1
    assert found["NDCG@5"] == pytest.approx((1 + 1 / 2) / 3)
    assert found["MRR@10"] == pytest.approx((1 + 1 / 3 + 1 / 8) / 3)
    assert found["AUC"] == pytest.approx((8 + 6 + 1) / 8 / 3)


def test_standard_errors_are_those_of_a_mean() -> None:
    random = np.random.default_rng(0)
    ranking = Ranking(random.integers(1, 50, 400), np.full(400, 50))
    values = ranking.per_target()["NDCG@10"]
    assert ranking.standard_errors()["NDCG@10"] == pytest.approx(np.std(values, ddof=1) / 20)
    means = [ranking.take(random.integers(0, 400, 400)).metrics()["NDCG@10"] for _ in range(300)]
    assert ranking.standard_errors()["NDCG@10"] == pytest.approx(np.std(means), rel=0.2)
    assert Ranking(np.array([1]), np.array([2])).standard_errors()["HR@1"] == 0


@property_test
@given(st.integers(0, 10_000))
def test_top_k_is_the_best_candidates_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    items, k = int(random.integers(1, 12)), int(random.integers(1, 14))
    scores = random.choice([-math.inf, math.nan, *np.arange(20.0)], (3, items + 1), replace=True)
    scores[:, 1:] += random.permuted(np.tile(np.arange(items), (3, 1)), axis=1) / 100
    wanted = torch.from_numpy(random.integers(1, items + 1, 3))
    candidate_mask = candidates(items, wanted, torch.from_numpy(random.integers(0, items + 1, (3, 4))))
    lists = top_k(torch.from_numpy(scores), candidate_mask, k)
    for row in range(3):
        free = [item for item in range(1, items + 1) if candidate_mask[row, item] and scores[row, item] > -math.inf]
        shown = [item for item in lists[row].tolist() if item]
        assert len(shown) == min(k, len(free)) and set(shown) <= set(free)
        assert [scores[row, item] for item in shown] == sorted((scores[row, i] for i in free), reverse=True)[:k]


@pytest.mark.parametrize("shapes", [((3,), (3,)), ((2, 4), (3,))])
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="scores must be"):
        ranks(torch.zeros(shapes[0]), torch.ones(shapes[1], dtype=torch.long))
    with pytest.raises(ValueError, match="same length"):
        Ranking(np.array([]), np.array([]))


def test_groups_share_out_every_target_once() -> None:
    random = np.random.default_rng(1)
    popularity = np.concatenate([[0], 1000 // random.permutation(np.arange(10, 70)), np.zeros(5, np.int64)])
    items = random.integers(1, 66, 300)
    for groups in (history_lengths(random.integers(1, 9000, 300)), item_popularity(items, popularity)):
        assert (sum(rows.astype(int) for _, rows in groups) == 1).all()
    by_name = dict(item_popularity(np.arange(1, 66), popularity))
    assert by_name["never in training"].sum() == 5
    assert popularity[1:][by_name["head"]].min() >= popularity[1:][by_name["middle"]].max()
    assert popularity[1:][by_name["middle"]].min() >= popularity[1:][by_name["tail"]].max()
    assert by_name["head"].sum() < by_name["middle"].sum() < by_name["tail"].sum()
    lengths = dict(history_lengths(np.array([5, 6, 5001])))
    assert [lengths[name].tolist() for name in ("1 to 5", "6 to 10", "over 5,000")] == np.eye(3, dtype=bool).tolist()


def test_popularity_bias_compares_shares() -> None:
    popularity = np.array([0, *range(100, 0, -5)])
    shown = np.zeros(21, dtype=np.int64)
    shown[1] = 7
    bias = popularity_bias(popularity, {10: shown})
    assert bias["items_in_group"] == [2] * 10
    assert bias["share_of_events"] == pytest.approx([(100 - 10 * n + 95 - 10 * n) / 1050 for n in range(10)])
    assert bias["share_of_recommendations"]["@10"] == [1.0] + [0.0] * 9
