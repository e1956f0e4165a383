"""Evaluation of a recommender: every target is ranked as one would by hand, and the results say how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prism.lab.recommender import report
from prism.models import PrismForRecommendation, PrismRecConfig
from prism.recommend.evaluate import (
    Sampled,
    evaluate_ranking,
    evaluate_split,
    protocol_line,
    rank_targets,
    sampler,
)
from prism.recommend.events import Histories, Split, leave_one_out
from prism.recommend.events.dataset import reindex_items
from prism.recommend.events.ids import Catalogue
from prism.recommend.events.synthetic import synthetic_dataset
from prism.recommend.lists import TopKCounts

ITEMS = 30


@pytest.fixture(scope="module")
def model() -> PrismForRecommendation:
    torch.manual_seed(0)
    config = PrismRecConfig(ITEMS, hidden_size=8, num_heads=1, layers="gated_delta", time_gaps=True, dropout=0.5)
    return PrismForRecommendation(config)  # in training mode, as the loop has it


@pytest.fixture(scope="module")
def split() -> Split:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 14, 12)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    times = np.concatenate([np.sort(random.integers(0, 10_000, n)) for n in lengths]).astype(np.float64)
    return leave_one_out(Histories(offsets, random.integers(1, ITEMS + 1, offsets[-1]), times))


def by_hand(model: PrismForRecommendation, split: Split, max_length: int, filter_seen: bool) -> list[tuple[int, int]]:
    """Rank and candidates of each test target, read one at a time without padding."""
    model.eval()
    found = []
    for user, end, target in zip(split.test.users, split.test.ends, split.test.items, strict=True):
        items, times = split.histories.user(user)
        assert times is not None
        gaps = np.diff(times[:end], prepend=times[0])
        read = slice(max(0, end - max_length), end)
        with torch.no_grad():
            hidden = model(torch.tensor(items[None, read]), gaps=torch.tensor(gaps[None, read])).hidden
            scores = model.scores(hidden[0, -1])
        others = set(range(1, ITEMS + 1)) - (set(items[:end].tolist()) if filter_seen else set()) - {int(target)}
        found.append((1 + sum(not scores[item] < scores[target] for item in others), 1 + len(others)))
    model.train()
    return found


@pytest.mark.parametrize("filter_seen", [True, False])
@pytest.mark.parametrize(("max_length", "batch"), [(4, 5), (50, 1), (50, 64)])
def test_ranks_are_those_found_by_hand(
    model: PrismForRecommendation, split: Split, max_length: int, batch: int, filter_seen: bool
) -> None:
    calls: list[tuple[int, int]] = []
    ranking = rank_targets(
        model,
        split.test,
        split.histories,
        max_length=max_length,
        filter_seen=filter_seen,
        batch=batch,
        progress=lambda done, of: calls.append((done, of)),
    )
    expected = by_hand(model, split, max_length, filter_seen)
    assert list(zip(ranking.ranks.tolist(), ranking.candidates.tolist(), strict=True)) == expected
    assert calls[-1] == (len(split.test), len(split.test))
    assert model.training, "the model is left as it was"


@pytest.mark.parametrize(("limit", "value"), [("SCORES_AT_ONCE", 3 * (ITEMS + 1)), ("EVENTS_AT_ONCE", 3 * 5 + 4)])
def test_of_many_items_or_events_few_targets_are_ranked_at_once(
    model: PrismForRecommendation, split: Split, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    expected = rank_targets(model, split.test, split.histories, max_length=5)
    monkeypatch.setattr(f"prism.recommend.evaluate.{limit}", value)
    done: list[int] = []
    found = rank_targets(model, split.test, split.histories, max_length=5, progress=lambda now, of: done.append(now))
    assert np.diff(done, prepend=0).max() == 3
    assert found.ranks.tolist() == expected.ranks.tolist()


def test_results_name_their_protocol(model: PrismForRecommendation, split: Split) -> None:
    results = evaluate_split(model, split, "test", max_length=7)
    protocol = results["protocol"]
    assert (protocol["split"], protocol["part"], protocol["max_length"]) == ("leave-one-out", "test", 7)
    again = sum(
        t in split.histories.user(u)[0][:e]
        for u, e, t in zip(split.test.users, split.test.ends, split.test.items, strict=True)
    )
    assert again and protocol["targets_seen_before"] == again
    assert protocol_line(protocol) == (
        f"test, leave-one-out, ranked: all 30 items, seen items left out ({again} targets seen before), at most 7 events read"
    )
    unfiltered = evaluate_split(model, split, "validation", max_length=7, filter_seen=False)
    assert "validation, leave-one-out" in protocol_line(unfiltered["protocol"])
    assert "seen items ranked too" in protocol_line(unfiltered["protocol"])
    assert set(results["metrics"]) == set(results["standard_errors"]) > {"HR@1", "NDCG@10", "MRR@500", "AUC"}
    for groups in (results["by_history_length"], results["by_popularity"]):
        assert sum(group["targets"] for group in groups) == results["targets"] == len(split.test)
        mean = sum(group["targets"] * group["metrics"]["NDCG@10"] for group in groups) / results["targets"]
        assert mean == pytest.approx(results["metrics"]["NDCG@10"])
    with pytest.raises(ValueError, match="'test' or 'validation'"):
        evaluate_split(model, split, "train", max_length=7)


def test_popularity_is_that_of_what_was_learned_from(model: PrismForRecommendation, split: Split) -> None:
    results = evaluate_split(model, split, "validation", max_length=7)
    unknown = int((split.train.counts(ITEMS)[split.validation.items] == 0).sum())
    assert unknown, "an item that is new in the context but occurs elsewhere"
    groups = {group["group"]: group["targets"] for group in results["by_popularity"]}
    assert groups["never in training"] == unknown


def test_coverage_counts_what_is_in_the_lists(model: PrismForRecommendation, split: Split) -> None:
    recommended = TopKCounts(ITEMS)
    how = {"max_length": 20, "filter_seen": False}
    rank_targets(model, split.test, split.histories, recommended=recommended, **how)
    assert set(recommended.counts) == {1, 5, 10, 20}, "no list is longer than the catalogue"
    for k, counts in recommended.counts.items():
        assert counts.sum() == k * len(split.test) and counts[0] == 0
    coverage = evaluate_ranking(model, split.test, split.histories, **how)["coverage"]
    assert coverage == recommended.coverage()
    assert 1 / ITEMS <= coverage["coverage@1"] <= coverage["coverage@5"] <= coverage["coverage@20"] <= 1


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_sampled_figures_say_so(model: PrismForRecommendation, split: Split, by: str) -> None:
    sampled = Sampled(5, by, seed=1)
    results = evaluate_split(model, split, max_length=20, sampled=sampled)
    assert all(name.startswith("sampled ") for name in [*results["metrics"], *results["serendipity"]])
    assert "5 sampled items" in protocol_line(results["protocol"])
    assert results == evaluate_split(model, split, max_length=20, sampled=sampled, batch=3)
    full = rank_targets(model, split.test, split.histories, max_length=20)
    few = rank_targets(
        model, split.test, split.histories, max_length=20, sampled=sampled, popularity=split.train.counts(ITEMS)
    )
    assert (few.candidates == 6).all() and (few.ranks <= full.ranks).all()
    everything = rank_targets(model, split.test, split.histories, max_length=20, sampled=Sampled(ITEMS))
    assert everything.ranks.tolist() == full.ranks.tolist()


def test_sampled_by_popularity_draws_what_is_popular(model: PrismForRecommendation, split: Split) -> None:
    """The share of tries in which a rare item is drawn is far below that of a popular one."""
    popularity = np.array([0, 1000, *[10] * (ITEMS - 2), 0])
    wanted = torch.full((400,), 2)
    candidate_mask = torch.ones(400, ITEMS + 1, dtype=torch.bool)
    candidate_mask[:, 0] = False
    kept = sampler(Sampled(3, "popularity"), ITEMS, popularity)(candidate_mask, wanted, np.arange(400))
    assert (kept.sum(1) == 4).all() and kept[:, 2].all()
    share = kept.float().mean(0)
    assert share[1] > 0.95 and share[ITEMS] == 0 and not kept[:, 0].any()
    assert 0.02 < share[5] < 0.2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"max_length": 5, "batch": 0}, "batch must be at least 1"),
        ({"max_length": 5, "sampled": Sampled(ITEMS + 1)}, "sampled must be at most the number of items"),
    ],
)
def test_what_cannot_be_ranked(model: PrismForRecommendation, split: Split, arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        rank_targets(model, split.test, split.histories, **arguments)


def test_a_model_with_gaps_needs_times(model: PrismForRecommendation, split: Split) -> None:
    untimed = Histories(split.histories.offsets, split.histories.items)
    with pytest.raises(ValueError, match="the events need times"):
        rank_targets(model, split.test, untimed, max_length=5)
    for wrong in ({"count": 0}, {"count": 5, "by": "age"}):
        with pytest.raises(ValueError, match="sampled"):
            Sampled(**wrong)


def test_events_with_the_item_rows_of_another_catalogue() -> None:
    dataset = synthetic_dataset(users=10, items=120, events=200)
    names = list(dataset.catalogue.items)
    catalogue = Catalogue([*names[:3], "another", *names[5:]])
    other = reindex_items(dataset, catalogue)
    for user in range(10):
        kept = [name for name in dataset.catalogue.names(dataset.histories.user(user)[0]) if name not in names[3:5]]
        assert catalogue.names(other.histories.user(user)[0]) == kept
    assert other.manifest["counts"]["unknown_items"] == 2
    assert len(other.histories.items) + other.manifest["counts"]["events_of_unknown_items"] == 200
    assert other.digest != dataset.digest
    with pytest.raises(ValueError, match="no event is of an item that the model knows"):
        reindex_items(dataset, Catalogue(["else"]))


def test_the_report_stands_alone(model: PrismForRecommendation, split: Split, tmp_path: Path) -> None:
    results = evaluate_split(model, split, max_length=7)
    records = [{"step": n, "loss": 3.0 - n / 10, **({"validation_NDCG@10": n / 99} if n % 2 else {})} for n in range(8)]
    path = report(
        tmp_path / "report.html", results, title="A <small> model", command="prism evaluate rec x", log=records
    )
    page = path.read_text()
    line = protocol_line(results["protocol"])
    assert page.count(line) >= 4, "with every metric"
    assert "A &lt;small&gt; model" in page and page.count('role="img"') == 3
    assert "http" not in page.replace("http-equiv", "")
    for name in ("HR", "NDCG", "MRR", "coverage"):
        assert name in page
    assert f"{results['metrics']['NDCG@10']:.4f}" in page
    without = report(tmp_path / "short.html", results, title="m", command="prism evaluate rec x").read_text()
    assert without.count('role="img"') == 1, "9 targets are too few for a chart by length"


def group(name: str, targets: int, value: float) -> dict[str, Any]:
    metrics = {"HR@10": value, "NDCG@10": value / 2}
    return {"group": name, "targets": targets, "metrics": metrics, "standard_errors": dict.fromkeys(metrics, 0.25)}


def test_groups_of_few_targets_are_no_facts(model: PrismForRecommendation, split: Split, tmp_path: Path) -> None:
    groups = [
        group("1 to 5", 1, 0.0),
        group("6 to 10", 9, 0.9375),
        group("11 to 20", 10, 0.375),
        group("21 to 50", 99, 0.5),
    ]
    results = {**evaluate_split(model, split, max_length=7), "by_history_length": groups}
    page = report(tmp_path / "report.html", results, title="m", command="c").read_text()
    section = page[page.index("<h2>By length of history") : page.index("<h2>By popularity")]
    rows = re.findall(r"<tr.*?</tr>", section)[1:]
    assert ["faint" in row for row in rows] == [True, True, False, False]
    assert ["±" in row for row in rows] == [False, True, True, True], "one target has no standard error"
    chart = re.search(r'<svg viewBox="[^"]*" role="img".*?</svg>', section)
    assert chart is not None
    assert "11–20" in chart[0] and "21–50" in chart[0] and "1–5<" not in chart[0] and "6–10" not in chart[0]
    assert chart[0].count("<circle") == chart[0].count("<rect") == 2
    assert "fewer than 10 targets (1 to 5, 6 to 10)" in section
    alone = {**results, "by_history_length": groups[:1]}
    assert report(tmp_path / "b.html", alone, title="m", command="c").read_text().count('role="img"') == 1


def test_one_sentence_at_the_top_says_what_was_found(
    model: PrismForRecommendation, split: Split, tmp_path: Path
) -> None:
    results = evaluate_split(model, split, max_length=7)
    page = report(tmp_path / "report.html", results, title="m", command="c").read_text()
    found = page[page.index('<p class="finding">') : page.index("</header>")]
    assert f"for {results['metrics']['HR@10']:.1%} of {results['targets']} held-out events" in found
    assert "top 10 of 30 items" in found and "Chance would give 33%" in found
    sampled = evaluate_split(model, split, max_length=7, sampled=Sampled(5, seed=1))
    page = report(tmp_path / "report.html", sampled, title="m", command="c").read_text()
    assert "sampled serendipity" in page and "sampled coverage" not in page, "the lists are of all items"
    assert "top 10 of target and 5 sampled items (uniform)" in page and "Chance" not in page
