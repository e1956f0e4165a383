"""New items over HTTP: scored by their features at once, in every process, and as in a fresh replay of all events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from prism.recommend import Recommender
from prism.recommend.config import PrismRecConfig
from prism.recommend.events import Catalogue
from prism.recommend.events.ids import Feature
from prism.recommend.model import PrismForRecommendation
from prism.serve.rec.new_items import Kind, NewItems, features_of
from tests.serve.services import event, recommender, replayed, serving, until
from tests.serve.test_rec_service import post, recommended, rereading

ITEMS, KINDS = 40, 4


def featured(text_ids: bool = True, **config: Any) -> Recommender:
    """A recommender whose items are alike if they have the same kind: item n has kind n % 4, tag n % 3 and a vector."""
    torch.manual_seed(0)
    kinds = Feature([None, *(f"kind {n}" for n in range(KINDS))], np.array([0, *(n % KINDS + 1 for n in range(ITEMS))]))
    tags = Feature([None, 10, 20, 30], np.array([[0, 0], *([n % 3 + 1, 0] for n in range(ITEMS))]))
    ids: list[Any] = [f"i{n}" if text_ids else n for n in range(ITEMS)]
    shape = {"hidden_size": 16, "num_heads": 2, "layers": "prism", "max_length": 20, "id_dropout": 0.1, **config}
    sizes: dict[str, Any] = {
        "item_features": {"kind": 1 + KINDS},
        "item_lists": {"tags": (4, 2)},
        "item_vectors": {"picture": 2},
    }
    model = PrismForRecommendation(PrismRecConfig(num_items=ITEMS, **sizes, **shape)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(10)
        model.feature_embeddings[0].weight.mul_(100)
        model.list_embeddings[0].weight.mul_(20)
    described = {"kind": kinds.of_item, "tags": tags.of_item, "picture": np.zeros((ITEMS + 1, 2), np.float32)}
    model.describe_items(torch.arange(ITEMS + 1), described)
    return Recommender(model, Catalogue(ids, {"kind": kinds, "tags": tags}))


MODEL = featured()
LABELS = {f"new{n}": {"kind": f"kind {n % KINDS}", "tags": [10 * (n // KINDS + 1)]} for n in range(8)}
"""New items, no two alike."""


def describe(client: httpx.Client, *items: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/api/items", json=[{"ItemId": item, "Labels": LABELS[item], **fields} for item in items])
    assert answer.status_code == 200, answer.text
    return answer.json()


def grown(*items: str) -> Recommender:
    table = {name: [LABELS[item][name] for item in items] for name in ("kind", "tags")}
    return MODEL.add_items({"item": list(items), **table}) if items else MODEL


def knows(client: httpx.Client, item: str) -> bool:
    return [item] == [one["ItemId"] for one in client.get("/api/items", params={"prefix": item}).json()]


def test_a_new_item_is_recommended_to_users_of_its_cluster(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "s.db") as client:
        post(client, event("ann", "i1", 1), event("ann", "i5", 2), event("bob", "i2", 1))
        before = recommended(client, "ann", n=ITEMS)
        said = describe(client, "new0", "new1", "new2", "new3")
        assert (said["RowAffected"], said["Known"], said["Scored"]) == (4, 0, 4) and "features: 4." in said["Message"]
        model = grown("new0", "new1", "new2", "new3")
        after = recommended(client, "ann", n=99)
        assert after == replayed(model, ["i1", "i5"], 99)
        assert [item for item in after if item.startswith("i")] == before, "old items keep their places"
        assert after.index("new1") < ITEMS // KINDS < min(after.index(f"new{n}") for n in (0, 2, 3))
        ranked = client.post("/rank", json={"user": "bob", "items": ["new1", "i3", "i4", "new2", "never"]}).json()
        assert ranked["items"][0]["item"] == "new2" and ranked["items"][-1]["known"] is False
        post(client, event("bob", "new2", 2))
        assert recommended(client, "bob") == replayed(model, ["i2", "new2"])
        assert client.get("/api/user/bob").json()["Feedback"][0]["Known"] is True
    with serving(MODEL, tmp_path / "s.db") as client:
        assert recommended(client, "ann", n=99) == after, "after a restart"
        session = client.post("/api/session/recommend?detail=true", json=[{"ItemId": "new2"}]).json()
        assert session[0]["Because"][0]["ItemId"] == "new2"
        assert client.get("/api/stats").json()["Model"]["items"] == ITEMS + 4


def test_hidden_new_items_are_not_recommended(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "s.db") as client:
        post(client, event("ann", "i1", 1))
        describe(client, "new1", IsHidden=True)
        assert knows(client, "new1") and "new1" not in recommended(client, "ann", n=99)
        client.post("/api/item", json={"ItemId": "new1"})
        assert "new1" in recommended(client, "ann", n=99), "features that are not given again stay"


def test_what_the_model_cannot_read_is_said(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "s.db") as client:

        def said(item: str, labels: Any) -> tuple[int, str]:
            answer = client.post("/api/item", json={"ItemId": item, "Labels": labels}).json()
            return answer["Scored"], answer["Message"]

        features = "kind (a value), tags (a list), picture (a vector of 2 numbers)"
        assert said("a", {"colour": "red"}) == (
            0,
            f"Items not scored: 1, such as 'a': its Labels has no feature of the model. The model has the features {features}.",
        )
        assert said("a", None)[0] == 0 and said("a", {"kind": ["x", "y"]})[0] == 0
        assert "list of 2 finite numbers" in said("a", {"picture": "x.png"})[1] and not knows(client, "a")
        assert said("a", [10, 20])[0] == 1 and knows(client, "a"), "a later description that can be read"
        assert "keeps the features" in said("a", {"kind": "kind 1"})[1]
        assert said("b", {"picture": [1, 2.5], "kind": "of a new kind"})[0] == 1
        assert "stay as they are: 1." in said("i1", {"kind": "kind 1"})[1]


def test_a_model_without_features_says_so_and_a_later_one_reads_the_descriptions(tmp_path: Path) -> None:
    with serving(recommender(), tmp_path / "s.db") as client:
        post(client, event("ann", "new1", 1), event("ann", "i1", 2))
        said = describe(client, "new1", "new2")
        assert said["Scored"] == 0 and said["Message"].startswith("The model has no features of items: it scores")
        assert "new1" not in recommended(client, "ann", n=99) and not knows(client, "new1")
    with serving(MODEL, tmp_path / "s.db", rebuild=True) as client:
        assert recommended(client, "ann", n=99) == replayed(grown("new1", "new2"), ["new1", "i1"], 99)


def test_ids_and_values_have_the_type_of_training(tmp_path: Path) -> None:
    with serving(featured(text_ids=False), tmp_path / "s.db") as client:
        items = [{"ItemId": item, "Labels": {"tags": ["20", 40]}} for item in ("77", "78", "hat", "9" * 19, "1" * 200)]
        said = client.post("/api/items", json=items).json()
        assert said["Scored"] == 2 and "'hat': its id is text" in said["Message"]
        post(client, event("ann", "77", 1))
        assert recommended(client, "ann")[0] == "78"


KIND = {
    "kind": Kind(False, False, {"a": "a"}),
    "year": Kind(False, True, {"1994": 1994}),
    "tags": Kind(True, False, {"x": "x"}),
}


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ({"kind": "a", "year": "1994", "tags": "x", "other": {}}, {"kind": "a", "year": 1994, "tags": ["x"]}),
        (
            {"kind": ["new"], "year": 1995.0, "tags": ["x", 5, True]},
            {"kind": "new", "year": 1995, "tags": ["x", "5", "true"]},
        ),
        (["x", "y"], {"tags": ["x", "y"]}),
        ({"v": [1, 2.5], "kind": None}, {"v": [1.0, 2.5]}),
        ({"year": "soon"}, "its year must hold integers"),
        ({"year": 10**30}, "its year must hold integers"),
        ({"tags": [["x"]]}, "its tags must hold text or numbers"),
        ({"tags": ["x"] * 101}, "at most 100 values, it has 101"),
        ({"v": [1, 10**400]}, "a list of 2 finite numbers"),
        ({"v": [1]}, "a list of 2 finite numbers"),
        ({"tags": []}, "no feature of the model"),
        ("x", "an object of features"),
    ],
)
def test_labels_become_features(labels: Any, found: Any) -> None:
    if isinstance(found, dict):
        assert features_of(labels, KIND, {"v": 2}) == found
    else:
        with pytest.raises(ValueError, match=found):
            features_of(labels, KIND, {"v": 2})


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["kind 1", "10", 20, 2**63]),
)
ANYTHING = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner))


class Descriptions:
    """A store of nothing but descriptions."""

    def __init__(self, labels: list[Any]) -> None:
        self.rows = [(n, f"new{n}", json.dumps({"Labels": one})) for n, one in enumerate(labels, 1)]

    def described_after(self, number: int) -> list[tuple[int, str, str]]:
        return self.rows[number:]


@settings(max_examples=20)
@given(st.lists(ANYTHING | st.dictionaries(st.sampled_from(["kind", "tags", "picture"]), ANYTHING), max_size=5))
def test_any_labels_are_read_or_refused_alone(labels: list[Any]) -> None:
    """One item with odd labels does not keep the others out."""
    store = Descriptions([*labels, LABELS["new0"]])
    new = NewItems(MODEL, store)  # type: ignore[arg-type]
    larger = new.refresh()
    assert larger is not None and [item for _, item in new.added] == list(larger.catalogue.items[ITEMS:])
    last = f"new{len(labels) + 1}"
    assert (larger.catalogue.names([len(larger.catalogue)]), new.refresh()) == ([last], None)
    one = grown("new0").model.item_vectors()[-1]
    assert larger.model.item_vectors()[-1].allclose(one, atol=1e-5), "however many items come at once"


def test_a_list_of_labels_needs_one_feature_of_lists() -> None:
    with pytest.raises(ValueError, match="exactly one feature of lists"):
        features_of(["x"], {"kind": KIND["kind"]}, {})
    assert features_of([1, 2], {"kind": KIND["kind"]}, {"v": 2}) == {"v": [1.0, 2.0]}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return (tmp_path_factory.mktemp("store") / "s.db" for _ in range(1000))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("event"), st.sampled_from(["ann", "bob"]), st.sampled_from(["i1", "i2", "new0", "new5"])),
        st.tuples(st.just("describe"), st.just(""), st.sampled_from(["new0", "new5"])),
        st.tuples(st.just("ask"), st.sampled_from(["ann", "bob"]), st.just("")),
        st.tuples(st.just("restart"), st.just(""), st.just("")),
    ),
    min_size=4,
    max_size=12,
)


SKIPPED = [("event", "ann", "new5"), ("event", "ann", "i1"), ("ask", "ann", "")]


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@example(steps=[*SKIPPED, ("describe", "", "new5"), ("ask", "ann", "")])
@example(steps=[*SKIPPED, ("restart", "", ""), ("describe", "", "new5"), ("ask", "ann", "")])
@given(steps=STEPS)
def test_answers_equal_a_fresh_replay_with_all_items(stores: Iterator[Path], steps: list[tuple[str, str, str]]) -> None:
    """Also for users whose state had skipped events of an item before it was described."""
    histories: dict[str, list[str]] = {"ann": [], "bob": []}
    known: dict[str, None] = {}
    store, second = next(stores), 0
    while steps:
        with serving(MODEL, store) as client:
            while steps:
                (what, user, item), *steps = steps
                if what == "restart":
                    break
                if what == "event":
                    second += 1
                    post(client, event(user, item, second))
                    histories[user].append(item)
                elif what == "describe":
                    describe(client, item)
                    known[item] = None
                else:
                    assert recommended(client, user, n=99) == replayed(grown(*known), histories[user], 99)
            for user, history in histories.items():
                assert recommended(client, user, n=99) == replayed(grown(*known), history, 99)


def test_two_services_on_one_store_know_the_same_items(store_url: str) -> None:
    with serving(MODEL, store_url) as first, serving(MODEL, store_url) as second:
        for client in (first, second):
            post(client, event("ann", "new5", 1), event("ann", "i1", 2))
            assert recommended(client, "ann", n=99) == replayed(MODEL, ["i1"], 99), "not described yet"
        describe(second, "new6")
        describe(first, "new5", "new0")
        describe(second, "new1", "new5")
        history = ["new5", "i1"]
        for n, client in enumerate((first, second, first)):
            history.append(f"i{n + 7}")
            post(client, event("ann", history[-1], n + 3), event("ann", "new1", 0))
        history.insert(3, "new1")
        model = grown("new6", "new5", "new0", "new1")
        for client in (first, second):
            until(lambda: knows(client, "new1"))  # noqa: B023  (called at once)
            assert recommended(client, "ann", n=99) == replayed(model, _log(client), 99)
        assert sorted(_log(first)) == sorted(history)


def _log(client: httpx.Client) -> list[str]:
    return [one["ItemId"] for one in client.get("/api/user/ann").json()["Feedback"]][::-1]


def test_a_model_whose_state_grows_reads_new_items(tmp_path: Path) -> None:
    model = featured(layers="softmax", max_length=5)
    with serving(model, tmp_path / "s.db") as client:
        for n, item in enumerate(["new5", "i1", "i2"]):
            post(client, event("ann", item, n))
        recommended(client, "ann")
        describe(client, "new5")
        larger = model.add_items({"item": ["new5"], **{name: [value] for name, value in LABELS["new5"].items()}})
        assert recommended(client, "ann") == rereading(larger, ["new5", "i1", "i2"])
