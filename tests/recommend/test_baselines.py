"""Baselines: each is its definition in a few lines of numpy, and all are ranked as models are, in both splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prism.cli import main
from prism.recommend.baselines import NAMES, fit_baseline, parse_baseline
from prism.recommend.baselines import neighbours as neighbours_module
from prism.recommend.baselines.compare import compare_baselines, named
from prism.recommend.evaluate import evaluate_split, rank_targets
from prism.recommend.events import Histories, Split, leave_one_out
from prism.recommend.events.split import Targets, global_time
from prism.recommend.task import train_rec
from tests.recommend.runs import small

ITEMS, USERS = 25, 30


def histories(seed: int = 0) -> Histories:
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 12, USERS)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    times = np.concatenate([np.sort(random.random(n) * 100) for n in lengths])
    return Histories(offsets, random.integers(1, ITEMS, offsets[-1]), times)  # item ITEMS never occurs


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(histories())


def matrix(events: Histories) -> np.ndarray:
    """Users and items as zeros and ones, `[U, N]`."""
    found = np.zeros((len(events), ITEMS))
    for user in range(len(events)):
        found[user, events.user(user)[0] - 1] = 1
    return found


def scores(name: str, split: Split) -> np.ndarray:
    """A baseline's scores before the test targets, `[M, N]`."""
    fitted = fit_baseline(name, split.train, ITEMS)
    return fitted.scores(split.test, split.histories, 5)[:, 1:].numpy()


def contexts(split: Split) -> np.ndarray:
    return matrix(split.histories.take(split.test.users).head(split.test.ends))


def test_ease_is_its_closed_form(split: Split) -> None:
    x = matrix(split.train)
    p = np.linalg.inv(x.T @ x + 3.5 * np.eye(ITEMS))
    b = p / -np.diag(p)
    np.fill_diagonal(b, 0)
    np.testing.assert_allclose(scores("ease(regularization=3.5)", split), contexts(split) @ b, atol=1e-6)


@pytest.mark.parametrize("at_once", [2**25, 40])
@pytest.mark.parametrize(("neighbours", "shrink"), [(100, 0.0), (3, 2.0)])
def test_item_knn_is_the_cosine_of_the_users(
    split: Split, neighbours: int, shrink: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours_module, "AT_ONCE", at_once)
    x = matrix(split.train)
    norms = np.sqrt(x.sum(0))
    similar = x.T @ x / np.maximum(np.outer(norms, norms) + shrink, 1e-9)
    np.fill_diagonal(similar, 0)
    for item in range(ITEMS):
        if np.isclose(*np.sort(similar[item])[::-1][neighbours - 1 : neighbours + 1]) if neighbours < ITEMS else False:
            similar[item] = np.nan  # a tie at the edge: either neighbour will do
        else:
            similar[item, np.argsort(-similar[item])[neighbours:]] = 0
    found = scores(f"item_knn(neighbours={neighbours}, shrink={shrink})", split)
    expected = contexts(split) @ np.nan_to_num(similar).T
    clear = ~np.isnan(similar).any(1)
    assert clear.sum() > 5
    np.testing.assert_allclose(found[:, clear], expected[:, clear], atol=1e-5)


def test_popular_counts_events_and_recent_popular_the_last_of_them(split: Split) -> None:
    counts = split.train.counts(ITEMS)[1:]
    assert (scores("popular", split) == counts).all()
    assert split.train.times is not None
    start = np.sort(split.train.times)[int(0.9 * (len(split.train.times) - 1))]
    found = scores("recent_popular(share=0.1)", split)[0]
    recent = np.bincount(split.train.items[split.train.times >= start], minlength=ITEMS + 1)[1:]
    assert (np.floor(found) == recent).all(), "the rest breaks ties"
    assert (np.argsort(-found[recent == 0], kind="stable") == np.argsort(-counts[recent == 0], kind="stable")).all()
    untimed = Histories(split.train.offsets, split.train.items)
    with pytest.raises(ValueError, match="recent_popular needs events with times"):
        fit_baseline("recent_popular", untimed, ITEMS)


def test_als_solves_for_a_user_and_bpr_learns_what_users_had(split: Split) -> None:
    pytest.importorskip("implicit")
    als = fit_baseline("als(factors=4, regularization=0.5, alpha=3)", split.train, ITEMS)
    items = als.model.item_factors.astype(np.float64)  # type: ignore[attr-defined]
    had = np.concatenate([np.zeros((len(split.test), 1)), contexts(split)], 1)
    found = als.scores(split.test, split.histories, 5).numpy()
    for user in range(3):  # (Yᵀ C Y + λ I) x = Yᵀ C p, with confidence 3 for what the user had
        confidence = 1 + 2 * had[user]
        x = np.linalg.solve(
            items.T @ (confidence[:, None] * items) + 0.5 * np.eye(4), items.T @ (confidence * had[user])
        )
        np.testing.assert_allclose(found[user], items @ x, atol=1e-4)
    bpr = fit_baseline("bpr(factors=8, iterations=200)", split.train, ITEMS)
    learned = matrix(split.train) > 0
    everyone = np.arange(USERS)
    after = Targets(everyone, split.train.lengths, np.ones(USERS, np.int64))
    given = bpr.scores(after, split.train, 5)[:, 1:].numpy()
    assert given[learned].mean() > given[~learned].mean() + 1
    again = fit_baseline("bpr(factors=8, iterations=200)", split.train, ITEMS)
    assert (again.scores(after, split.train, 5)[:, 1:].numpy() == given).all(), "the same seed, the same model"


def test_a_user_whom_bpr_does_not_know_gets_what_is_popular() -> None:
    pytest.importorskip("implicit")
    events = histories()
    ends = events.lengths.copy()
    ends[4] = 0
    train = events.head(ends)
    bpr = fit_baseline("bpr(iterations=2)", train, ITEMS)
    after = Targets(np.array([4, 5]), np.array([2, 2]), np.array([1, 1]))
    found = bpr.scores(after, events, 5).numpy()
    assert (found[0] == train.counts(ITEMS)).all() and not (found[1] == train.counts(ITEMS)).all()


@pytest.mark.parametrize("cut", [leave_one_out, global_time])
def test_baselines_are_ranked_as_models_are(cut: Any) -> None:
    split = cut(histories())
    ranking = rank_targets(fit_baseline("item_knn", split.train, ITEMS), split.test, split.histories, max_length=5)
    names = ["popular", "item_knn", "ease(regularization=5)"]
    seen: list[str] = []
    results = compare_baselines(named(names), split, ITEMS, model=ranking, started=seen.append, max_length=5)
    assert [one["name"] for one in results] == seen
    for name, one in zip(names, results, strict=True):
        alone = evaluate_split(fit_baseline(name, split.train, ITEMS), split, max_length=5, batch=3)
        assert one["metrics"] == alone["metrics"] and one["coverage"] == alone["coverage"]
        mean, error = one["minus_model"]["NDCG@10"]
        assert mean == pytest.approx(one["metrics"]["NDCG@10"] - results[1]["metrics"]["NDCG@10"])
        assert (error == 0) is (name == "item_knn")
        assert one["targets"] == len(split.test)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["eas"], r"unknown baseline 'eas' \(did you mean 'ease'\?\): choose from popular, .*all"),
        (["ease(lambda=3)"], "ease has no option 'lambda': it has regularization"),
        (["ease(regularization=x)"], "regularization must be a number such as 500.0, got 'x'"),
        (["item_knn(neighbours=0)"], "neighbours must not be so small"),
        (["recent_popular(share=2)"], "share must be above 0 and at most 1"),
        (["popular", "all"], "popular is named twice"),
        (["ease)("], "unknown baseline"),
    ],
)
def test_bad_names_are_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        named(names)


def test_ease_refuses_too_many_items(monkeypatch: pytest.MonkeyPatch, split: Split) -> None:
    monkeypatch.setattr("prism.recommend.baselines.ease.MOST_ITEMS", 20)
    with pytest.raises(ValueError, match="ease inverts a matrix of all items and has at most 20, got 25: leave it out"):
        fit_baseline("ease", split.train, ITEMS)


def test_names_say_their_options() -> None:
    assert str(parse_baseline("als( factors = 8 )")) == "als(factors=8, regularization=0.1, alpha=10, iterations=15)"
    assert [str(one).partition("(")[0] for one in named(["all"])] == list(NAMES)


def test_the_command_shows_model_and_baselines_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_rec(small(tmp_path, steps=2, validation={"every": 0}, data={"split": "global_time"})).run
    flags = ["--device", "cpu", "--output", str(tmp_path / "out"), "--baselines", "popular", "ease(regularization=20)"]
    assert main(["evaluate", "rec", str(run), *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Compared with baselines" in shown and "ease(regularization=20)" in shown and "minus model" in shown
    written = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [one["name"] for one in written["baselines"]] == ["popular", "ease(regularization=20)"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Compared with baselines" in page and "Model and baselines" in page
    for one in written["baselines"]:
        assert f"{one['metrics']['NDCG@10']:.4f}" in page and f"{one['diversity']['diversity@10']:.3f}" in page
    assert main(["evaluate", "rec", str(run), "--baselines", "nothing"]) == 2
    assert "unknown baseline 'nothing'" in capsys.readouterr().err


def test_scores_are_the_callers_to_change(split: Split) -> None:
    """Ranking hides items in place: the next batch must not see it."""
    for name in ("popular", "item_knn", "ease"):
        fitted = fit_baseline(name, split.train, ITEMS)
        first = fitted.scores(split.test, split.histories, 5)
        kept = first.clone()
        first.fill_(-torch.inf)
        assert torch.equal(fitted.scores(split.test, split.histories, 5), kept)
