"""`prism serve rec` over HTTP: what it recommends is what the recommender says after a fresh reading of the events."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from gorse import Gorse, GorseException
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend import Recommender
from prism.serve.rec.users import NONE_SEEN, add_seen, pack_seen, unpack_seen
from tests.serve.services import event, recommender, replayed, serving, until

MODEL = recommender()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(MODEL, tmp_path_factory.mktemp("store") / "s.db") as opened:
        yield opened


def recommended(client: httpx.Client, user: str, **options: object) -> list[str]:
    answer = client.get(f"/api/recommend/{user}", params=options)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(client: httpx.Client, *events: dict, **headers: str) -> int:
    answer = client.post("/api/feedback", json=events, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["RowAffected"]


USERS = st.sampled_from(["ann", "bob", "carl"])
ITEMS = st.sampled_from([*(f"i{n}" for n in range(1, 30)), "unknown"])


@settings(max_examples=8)
@given(batches=st.lists(st.lists(st.tuples(USERS, ITEMS), max_size=6), min_size=1, max_size=4), data=st.data())
def test_recommendations_equal_a_fresh_replay(client: httpx.Client, batches: list, data: st.DataObject) -> None:
    for user in ("ann", "bob", "carl"):
        client.delete(f"/api/user/{user}")
    histories: dict[str, list[str]] = {"ann": [], "bob": [], "carl": []}
    second = 0
    for batch in batches:
        events = []
        for user, item in batch:
            second += 1
            events.append(event(user, item, second))
            histories[user].append(item)
        assert post(client, *events) == len(events)
        asked = data.draw(st.sampled_from(["ann", "bob", "carl"]))
        assert recommended(client, asked) == replayed(MODEL, histories[asked])
    for user, history in histories.items():
        assert recommended(client, user) == replayed(MODEL, history)
        session = client.post("/api/session/recommend", json=[event("", item, n) for n, item in enumerate(history)])
        assert [one["Id"] for one in session.json()] == replayed(MODEL, history)


def test_many_users_at_once_get_what_each_gets_alone(client: httpx.Client) -> None:
    users = [f"many{n}" for n in range(40)]
    histories = {user: [f"i{(7 * n + k) % 60 + 1}" for k in range(n % 5 + 1)] for n, user in enumerate(users)}

    def visit(user: str) -> list[str]:
        for n, item in enumerate(histories[user]):
            assert post(client, event(user, item, n)) == 1
        return recommended(client, user)

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(visit, users)) == [replayed(MODEL, histories[user]) for user in users]


def test_a_retry_stores_nothing_twice(client: httpx.Client) -> None:
    one = event("retry", "i1", 1)
    assert [post(client, one), post(client, one)] == [1, 0]
    now = event("retry", "i2")
    assert [post(client, now, **{"Idempotency-Key": "a"}) for _ in range(2)] == [1, 1]
    assert client.get("/api/user/retry").json()["EventCount"] == 2
    other = client.post("/api/feedback", json=[one], headers={"Idempotency-Key": "a"})
    assert other.status_code == 409 and "other events" in other.json()["error"]["message"]


def test_put_replaces_the_value(client: httpx.Client) -> None:
    assert post(client, event("put", "i1", 1, Value=1)) == 1
    assert client.put("/api/feedback", json=[event("put", "i1", 1, Value=5)]).json() == {"RowAffected": 1}
    assert [one["Value"] for one in client.get("/api/user/put").json()["Feedback"]] == [5]


def test_a_user_can_be_looked_at_and_deleted(client: httpx.Client) -> None:
    post(client, event("dora", "i1", 1), event("dora", "unknown", 2))
    recommended(client, "dora")
    found = client.get("/api/user/dora?n=1").json()
    assert found["Feedback"] == [
        {
            "FeedbackType": "click",
            "ItemId": "unknown",
            "Timestamp": "2026-01-01T00:00:02Z",
            "Value": None,
            "Known": False,
        }
    ]
    assert (found["EventCount"], found["StateEvents"]) == (2, 2) and found["StateAge"] >= 0
    assert found["StateBytes"] == MODEL.start(1).nbytes
    assert {"UserId": "dora", "EventCount": 2} in client.get("/api/users?prefix=do").json()
    assert client.delete("/api/user/dora").json() == {"RowAffected": 2}
    assert client.get("/api/user/dora").status_code == 404
    assert recommended(client, "dora") == replayed(MODEL, [])
    post(client, event("dora", "i9", 1))
    assert recommended(client, "dora") == replayed(MODEL, ["i9"])


def test_seen_items_are_left_out_exactly(client: httpx.Client) -> None:
    post(client, *(event("eve", f"i{n}", n) for n in range(1, 56)))
    left = {f"i{n}" for n in range(56, 61)}
    assert set(recommended(client, "eve", n=100)) == left
    assert len(recommended(client, "eve", **{"n": 100, "exclude-seen": False})) == 60
    assert recommended(client, "eve", n=2, offset=1) == recommended(client, "eve", n=3)[1:]


def test_reasons_are_the_nearest_events(client: httpx.Client) -> None:
    post(client, event("fay", "i1", 1), event("fay", "i2", 2))
    vectors = MODEL.model.item_vectors().detach().numpy()
    for one in client.get("/api/recommend/fay?detail=true&n=3").json():
        x = vectors[int(one["ItemId"][1:])]
        cosines = {f"i{n}": x @ vectors[n] / np.linalg.norm(x) / np.linalg.norm(vectors[n]) for n in (1, 2)}
        assert [near["ItemId"] for near in one["Because"]] == sorted(cosines, key=lambda item: -cosines[item])
        assert [near["Similarity"] for near in one["Because"]] == pytest.approx(
            sorted(cosines.values())[::-1], abs=1e-5
        )


def test_candidates_are_ranked(client: httpx.Client) -> None:
    post(client, event("gil", "i1", 1))
    body = {"user": "gil", "items": ["i5", {"id": "i6"}, "new", "i7"]}
    ranked = client.post("/rank", json=body).json()["items"]
    states = MODEL.observe(MODEL.start(1), ["i1"])
    scores = MODEL.model.scores(states.hidden)[0].tolist()
    assert [one["item"] for one in ranked] == [*sorted(["i5", "i6", "i7"], key=lambda i: -scores[int(i[1:])]), "new"]
    assert ranked[0]["score"] == pytest.approx(scores[int(ranked[0]["item"][1:])], abs=1e-4)
    assert ranked[-1] == {"item": "new", "score": None, "known": False}
    by_history = client.post("/rank", json={"history": ["i1"], "items": ["i5", "i6", "i7"]}).json()["items"]
    assert [one["item"] for one in by_history] == [one["item"] for one in ranked[:-1]]
    assert client.post("/rank", json={**body, "history": ["i1"]}).status_code == 422


def test_hidden_items_are_not_recommended(client: httpx.Client) -> None:
    best = recommended(client, "nobody-yet")[0]
    said = client.post("/api/items", json=[{"ItemId": best, "IsHidden": True}, {"ItemId": "new", "Labels": {"a": 1}}])
    assert (said.json()["RowAffected"], said.json()["Known"], said.json()["Scored"]) == (2, 1, 0)
    assert "no features" in said.json()["Message"]
    assert best not in recommended(client, "nobody-yet", n=60)
    client.post("/api/item", json={"ItemId": best, "IsHidden": False})
    assert recommended(client, "nobody-yet")[0] == best


def test_sql_in_ids_does_nothing(client: httpx.Client) -> None:
    before = client.get("/api/stats").json()
    name = "x'; DROP TABLE events; DELETE FROM users; --"
    assert post(client, event(name, "i1'); DROP TABLE users; --", 1)) == 1
    assert client.get(f"/api/user/{name}").json()["EventCount"] == 1
    assert client.get("/api/users", params={"prefix": "' OR 1=1 --"}).json() == []
    assert client.delete(f"/api/user/{name}").json() == {"RowAffected": 1}
    after = client.get("/api/stats").json()
    assert (after["Users"], after["Events"]) == (before["Users"], before["Events"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/feedback", [{"FeedbackType": "click", "UserId": "ann"}]),
        ("/api/feedback", [event("a/b", "i1", 1)]),
        ("/api/feedback", [event("a\x00", "i1", 1)]),
        ("/api/feedback", [event("", "i1", 1)]),
        ("/api/feedback", [event("a" * 257, "i1", 1)]),
        ("/api/feedback", [{**event("ann", "i1"), "Timestamp": "yesterday"}]),
        ("/api/feedback", [{**event("ann", "i1"), "Timestamp": 5}]),
        ("/api/feedback", [event("ann", "i1", 1, Value="much")]),
        ("/api/feedback", {"UserId": "ann"}),
        ("/api/feedback", [event("ann", "i1", 1)] * 10_001),
        ("/api/session/recommend?n=0", []),
        ("/api/session/recommend?n=1001", []),
        ("/rank", {"items": ["i1"] * 10_001}),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_a_reason(client: httpx.Client, path: str, body: object) -> None:
    events = client.get("/api/stats").json()["Events"]
    answer = client.post(path, json=body)
    assert answer.status_code in (413, 422) and answer.json()["error"]["message"], answer.text
    assert client.get("/api/stats").json()["Events"] == events


@pytest.mark.parametrize(
    "fields",
    [
        r'"Labels": {"g": "\ud800"}',
        r'"Labels": {"\ud800": 1}',
        r'"Comment": "\ud800"',
        r'"Categories": ["\ud800"]',
        '"Labels": ' + 300 * "[" + 300 * "]",
    ],
)
def test_an_item_that_cannot_be_stored_is_refused(client: httpx.Client, fields: str) -> None:
    """JSON can say half a character, and any depth."""
    header = {"Content-Type": "application/json"}
    one = f'{{"ItemId": "x1", {fields}}}'
    for path, body in (("/api/item", one), ("/api/items", f"[{one}]")):
        answer = client.post(path, content=body.encode(), headers=header)
        assert answer.status_code == 422, answer.text
        assert "cannot be stored: give whole characters" in answer.json()["error"]["message"]
    deep = f'{{"ItemId": "x1", "Labels": {200 * "[" + 200 * "]"}}}'
    assert client.post("/api/item", content=deep.encode(), headers=header).status_code == 200


def test_gorses_client_works(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "s.db", key="a-long-key") as client:
        gorse = Gorse(str(client.base_url), "a-long-key")
        assert gorse.insert_feedback("read", "bob", "i1", "2026-01-01T00:00:00Z") == {"RowAffected": 1}
        assert gorse.insert_feedbacks([event("bob", "i2", 5)]) == {"RowAffected": 1}
        found = gorse.get_recommend("bob", n=5)
        assert [one.id for one in found] == replayed(MODEL, ["i1", "i2"], 5) and found[0].score > found[4].score
        session = gorse.session_recommend([event("bob", "i1", 1), event("bob", "i2", 2)], n=5)
        assert [one["Id"] for one in session] == [one.id for one in found]
        with pytest.raises(GorseException) as refused:
            Gorse(str(client.base_url), "a-wrong-key").get_recommend("bob")
        assert refused.value.status_code == 401


def test_times_reach_a_model_with_time_gaps(tmp_path: Path) -> None:
    model = recommender(time_gaps=True)
    seconds = [0, 50, 50_000]
    with serving(model, tmp_path / "s.db") as client:
        for n, second in enumerate(seconds):
            post(client, event("ann", f"i{n + 1}", second))
        times = [1767225600.0 + second for second in seconds]
        assert recommended(client, "ann") == replayed(model, ["i1", "i2", "i3"], times=times)
        assert recommended(client, "ann") != replayed(model, ["i1", "i2", "i3"], times=[0.0, 0.0, 0.0])


def rereading(model: Recommender, items: list[str]) -> list[str]:
    return [str(item) for item in model.recommend(sequences=[items]).items[0]]


def test_a_model_whose_state_grows_reads_the_last_events_again(tmp_path: Path) -> None:
    model = recommender(layers="softmax", max_length=5)
    history = [f"i{n}" for n in range(1, 9)] + ["unknown"] * 3 + ["i11"]
    with serving(model, tmp_path / "s.db") as client:
        assert recommended(client, "ann") == replayed(model, [])
        for n, item in enumerate(history):
            post(client, event("ann", item, n))
        known = [item for item in history if item != "unknown"]
        assert recommended(client, "ann") == rereading(model, known)
        assert client.get("/api/stats").json()["Model"]["state_bytes"] == 0
        session = client.post("/api/session/recommend", json=[event("", item, n) for n, item in enumerate(known)])
        assert [one["Id"] for one in session.json()] == rereading(model, known)


def test_the_first_event_that_is_read_again_has_its_time_gap(tmp_path: Path) -> None:
    """The event before it is not read, but its time counts, as in training; events that the model does not know do not."""
    model = recommender(layers="softmax", max_length=3, time_gaps=True)
    history = [("i1", 0), ("i2", 9_000_000), ("i3", 9_000_050), ("unknown", 9_000_055), ("i4", 9_000_060)]
    times = [1767225600.0 + second for item, second in history if item != "unknown"]
    best = model.recommend(sequences=[["i1", "i2", "i3", "i4"]], times=[times], k=60, filter_seen=False)
    expected = dict(best[0])
    with serving(model, tmp_path / "s.db") as client:
        post(client, *(event("ann", item, second) for item, second in history))
        post(client, *(event("bob", item, second) for item, second in history if item != "unknown"))
        for user in ("ann", "bob"):
            ranked = client.post("/rank", json={"user": user, "items": list(expected)}).json()["items"]
            assert {one["item"]: one["score"] for one in ranked} == pytest.approx(expected, abs=1e-4), user
        events = [event("", item, second) for item, second in history]
        session = client.post("/api/session/recommend?n=60&exclude-seen=false", json=events).json()
        assert {one["Id"]: one["Score"] for one in session} == pytest.approx(expected, abs=1e-4)


def test_users_who_do_not_fit_into_memory_are_on_disk(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "s.db", state_memory=0) as client:
        users = [f"u{n}" for n in range(700)]
        post(client, *(event(user, f"i{n % 60 + 1}", n) for n, user in enumerate(users)))
        for user in (users[0], users[-1], users[1], users[0]):
            assert recommended(client, user) == replayed(MODEL, [f"i{int(user[1:]) % 60 + 1}"])
        until(lambda: client.get("/api/user/u5").json()["StateEvents"] == 1)
        text = client.get("/metrics").text
        held = next(line for line in text.splitlines() if line.startswith("prism_users_in_memory "))
        assert 0 < float(held.split()[1]) <= 512


@given(st.lists(st.integers(1, 200), max_size=40), st.lists(st.integers(1, 200), max_size=40), st.integers(200, 9000))
def test_seen_items_are_a_set(first: list[int], then: list[int], items: int) -> None:
    seen = add_seen(add_seen(NONE_SEEN, np.array(first, dtype=np.int64)), np.array(then, dtype=np.int64))
    assert seen.tolist() == sorted({*first, *then})
    packed = pack_seen(seen, items)
    assert unpack_seen(packed).tolist() == seen.tolist() and len(packed) <= 1 + min(4 * len(seen), items // 8 + 1)
