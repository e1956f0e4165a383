"""States follow from events and model: lost, old, foreign or concurrent ones change no recommendation."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

from prism.serve.rec.settings import open_store
from prism.serve.rec.store import Event, Submission
from prism.serve.rec.users import Users
from tests.serve.services import event, recommender, replayed, serving
from tests.serve.test_rec_service import post, recommended

MODEL, OTHER = recommender(0), recommender(1)
USERS = {f"u{n}": [f"i{(5 * n + k) % 60 + 1}" for k in range(n % 4 + 1)] for n in range(50)}


def fill(client: object) -> None:
    post(client, *(event(user, item, n) for user, items in USERS.items() for n, item in enumerate(items)))  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [8, 64])
def test_states_come_back_from_the_store_bit_for_bit(
    capacity: int, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(store_url, 1.0, print)

    def append(histories: dict[str, list[str]], time: int) -> None:
        events = [Event("click", user, item, time + n) for user, own in histories.items() for n, item in enumerate(own)]
        store.append([Submission(events)], lambda item: True)

    append(USERS, 0)
    users = Users(MODEL, store, 1, capacity)
    there, rows = [], []
    for user in USERS:
        there.append(users.bring([user]))
        rows += users.flush(0)  # of those who had to leave
    assert len(rows) == max(0, len(USERS) - capacity) and len(users) <= capacity
    rows += users.flush(capacity)
    assert len(rows) == len(USERS) and users.flush() == [] and {len(row.state) for row in rows} == {users.state_bytes}
    store.put_states(rows, 1)
    restored = Users(MODEL, store, 1, 64)
    with monkeypatch.context() as patch:
        patch.setattr(Users, "_known", None)  # no event is read again
        back = restored.bring(list(USERS))
    assert back.hidden.equal(torch.cat([one.hidden for one in there]))
    assert back.events.equal(torch.cat([one.events for one in there]))
    assert [one.tolist() for one in back.seen] == [one.seen[0].tolist() for one in there]
    append({user: ["i1"] for user in USERS}, 100)
    from_the_start = Users(MODEL, store, 2, 64).bring(list(USERS))
    assert restored.bring(list(USERS)).hidden.allclose(from_the_start.hidden, atol=1e-5), "the layers' tensors too"
    store.close()


def test_a_restart_continues_from_stored_states(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(MODEL, store_url) as client:
        fill(client)
        for user in USERS:
            recommended(client, user)
    monkeypatch.setattr(Users, "_known", None)  # no event is read again
    with serving(MODEL, store_url) as client:
        for user in list(USERS)[:9]:
            assert recommended(client, user) == replayed(MODEL, USERS[user])


def test_lost_states_are_read_from_the_events(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "s.db") as client:
        fill(client)
    for path in tmp_path.glob("s.db.states*"):
        path.unlink()
    with serving(MODEL, tmp_path / "s.db") as client:
        assert recommended(client, "u3") == replayed(MODEL, USERS["u3"])


def test_states_of_a_longer_log_are_not_used(tmp_path: Path) -> None:
    """The events come from a backup, the states do not."""
    with serving(MODEL, tmp_path / "s.db") as client:
        post(client, event("ann", "i1", 1))
    shutil.copy(tmp_path / "s.db", tmp_path / "backup")
    with serving(MODEL, tmp_path / "s.db") as client:
        post(client, event("ann", "i2", 2), event("ann", "i3", 3))
        recommended(client, "ann")
    shutil.copy(tmp_path / "backup", tmp_path / "s.db")
    with serving(MODEL, tmp_path / "s.db") as client:
        assert recommended(client, "ann") == replayed(MODEL, ["i1"])


def test_another_model_is_named_and_rebuild_reads_histories_again(store_url: str) -> None:
    with serving(MODEL, store_url, "runs/old") as client:
        fill(client)
        for user in USERS:
            recommended(client, user)
    with pytest.raises(ValueError, match=r"50 users .* runs/old .*, not to runs/new .*--rebuild"):
        next(iter(serving(OTHER, store_url, "runs/new").gen))
    with serving(OTHER, store_url, "runs/new", rebuild=True) as client:
        for user in USERS:
            assert recommended(client, user) == replayed(OTHER, USERS[user])
            assert client.get(f"/api/user/{user}").json()["StateEvents"] == len(USERS[user])
    with serving(OTHER, store_url, "runs/renamed") as client:
        assert recommended(client, "u49") == replayed(OTHER, USERS["u49"])


def test_two_services_on_one_store_agree(store_url: str) -> None:
    """Each appends and asks in turn; a state that the other one made older is advanced, not trusted."""
    history: list[str] = []
    with serving(MODEL, store_url) as first, serving(MODEL, store_url) as second:
        for n in range(6):
            here, there = (first, second) if n % 2 else (second, first)
            history.append(f"i{3 * n + 1}")
            post(here, event("ann", history[-1], n))
            assert recommended(there, "ann") == recommended(here, "ann") == replayed(MODEL, history)

        def many(client: object, start: int) -> None:
            for n in range(start, start + 20):
                post(client, event("bob", f"i{n % 60 + 1}", n), event(f"b{n}", "i1", n))  # type: ignore[arg-type]

        threads = [threading.Thread(target=many, args=pair) for pair in ((first, 0), (second, 100))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log = first.get("/api/user/bob").json()["Feedback"][::-1]
        assert len(log) == 40
        first.delete("/api/user/ann")
        post(second, event("ann", "i50", 1))
        for client in (first, second):
            assert recommended(client, "bob") == replayed(MODEL, [one["ItemId"] for one in log])
            assert recommended(client, "ann") == replayed(MODEL, ["i50"]), "another user of the same name"
