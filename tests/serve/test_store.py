"""The store keeps every event once, in order, and never replaces a state by an older one: SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.serve.rec.settings import make_store, open_store
from prism.serve.rec.sqlite import SqliteStore
from prism.serve.rec.store import Event, KeyReused, StateRow, Store, StoreError, Submission


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = open_store(store_url, 1.0, print)
    yield opened
    opened.close()


def stored(store: Store, user: str) -> list[tuple[str, str, int, float | None]]:
    account = store.accounts([user]).get(user)
    if account is None:
        return []
    (log,) = store.events_after([account.uid], [0])
    assert [event.number for event in log] == list(range(1, account.events + 1))
    assert store.last_events(account.uid, 10**6) == log[::-1]
    return [(event.kind, event.item, event.time, event.value) for event in log]


class Model:
    """What a store must hold: a dictionary and a list for each user."""

    def __init__(self) -> None:
        self.logs: dict[str, list[tuple[str, str, int, float | None]]] = {}
        self.keys: dict[str, tuple[tuple[Event, ...], int]] = {}

    def append(self, one: Submission) -> int | None:
        """The number of rows, None where the key is refused."""
        if one.key in self.keys:
            events, count = self.keys[one.key]
            return count if events == tuple(one.events) else None
        count = 0
        for event in one.events:
            log = self.logs.setdefault(event.user, [])
            assert event.time is not None
            row = (event.kind, event.item, event.time, event.value)
            there = [place for place, other in enumerate(log) if other[:3] == row[:3]]
            if not there:
                log.append(row)
                count += 1
            elif one.overwrite:
                log[there[0]] = row
                count += 1
        if one.key is not None:
            self.keys[one.key] = (tuple(one.events), count)
        return count


EVENTS = st.builds(
    Event,
    st.sampled_from(["click", "buy'; DROP TABLE events; --"]),
    st.sampled_from(["ann", "bob", "x' OR '1'='1", "ünïcode %s ?"]),
    st.sampled_from(["i1", "i2", '"; DELETE FROM users; --']),
    st.integers(0, 2),
    st.sampled_from([None, 1.5]),
)
SUBMISSIONS = st.lists(
    st.tuples(st.lists(EVENTS, max_size=5), st.sampled_from([None, None, "k1", "k2"]), st.booleans()), max_size=6
)


@settings(max_examples=15)
@given(groups=st.lists(SUBMISSIONS, max_size=3))
def test_a_store_holds_what_a_dictionary_would(groups: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_store(str(tmp_path_factory.mktemp("store") / "s.db"), 1.0, print)
    _same_as_a_dictionary(opened, groups)
    opened.close()


GROUPS = [
    [([Event("click", "ann", "i1", 1), Event("click", "bob", "i1", 1)], "k1", False)],
    [
        ([Event("click", "ann", "i1", 1, 2.0), Event("buy", "ann", "i1", 1)], None, True),
        ([Event("click", "ann", "i1", 1), Event("click", "bob", "i1", 1)], "k1", False),
        ([Event("click", "x' OR '1'='1", '"; DELETE FROM users; --', 5)], "k2", False),
        ([Event("click", "x' OR '1'='1", '"; DELETE FROM users; --', 5)], "k2", False),
        ([Event("click", "ann", "i9", 5)], "k2", False),
    ],
]


def test_postgres_holds_what_a_dictionary_would(store: Store) -> None:
    _same_as_a_dictionary(store, GROUPS)


def _same_as_a_dictionary(store: Store, groups: list) -> None:
    model = Model()
    for group in groups:
        submissions = [Submission(events, key, repr(events), overwrite) for events, key, overwrite in group]
        results = store.append(submissions, lambda item: item != "i2")
        counts = [None if isinstance(result, KeyReused) else result for result in results]
        assert counts == [model.append(one) for one in submissions]
    assert {user: stored(store, user) for user in model.logs} == model.logs
    totals = store.totals()
    rows = [row for log in model.logs.values() for row in log]
    assert totals == (len(model.logs), len(rows), sum(row[1] == "i2" for row in rows))


def test_events_without_a_time_are_all_kept(store: Store) -> None:
    same = [Event("click", "ann", "i1", None)] * 3
    assert store.append([Submission(same), Submission(same)], lambda item: True) == [3, 3]
    times = [time for _, _, time, _ in stored(store, "ann")]
    assert len(set(times)) == 6 and times == sorted(times)


def test_appends_of_several_threads_lose_nothing(store: Store) -> None:
    """As several processes would: each thread has a connection. Numbers have no gaps, whatever the order."""

    def append(who: int) -> None:
        for n in range(8):
            events = [Event("click", "ann", f"{who}-{n}", n), Event("click", f"u{who}", "x", n)]
            assert store.append([Submission(events)], lambda item: True) == [2]

    threads = [threading.Thread(target=append, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item for _, item, _, _ in stored(store, "ann")) == sorted(
        f"{w}-{n}" for w in range(3) for n in range(8)
    )
    assert store.totals().events == 48


def test_a_state_is_replaced_by_newer_ones_and_by_other_models_only(store: Store) -> None:
    store.append([Submission([Event("click", "ann", "i1", 1)])], lambda item: True)
    uid = store.accounts(["ann"])["ann"].uid
    for number, model, found in ((5, 1, 5), (4, 1, 5), (6, 1, 6), (2, 2, None)):
        store.put_states([StateRow(uid, number, 1.0, bytes([0, number]), b"r")], model)
        assert (store.states([uid], 1).get(uid) or [None] * 2)[1] == found
    assert store.states([uid], 2)[uid] == StateRow(uid, 2, 1.0, b"\x00\x02", b"r")
    for items in (3, 1):
        store.put_states([StateRow(uid, 2, 1.0, b"more items", b"r", items)], 2)
        assert store.states([uid], 2)[uid].items == 3, "a state that knows more items is newer"
    store.put_states([StateRow(uid + 99, 1, 1.0, b"x", b"r")], 2)
    assert not store.states([uid + 99], 2), "a state of a user who is not there"


def test_a_deleted_user_comes_back_as_another_one(store: Store) -> None:
    add = [Submission([Event("click", "ann", "i1", 1), Event("click", "bob", "i1", 1)])]
    store.append(add, lambda item: True)
    uid = store.accounts(["ann"])["ann"].uid
    store.put_states([StateRow(uid, 1, 1.0, b"s", b"r")], 1)
    assert store.delete_user("ann") == (uid, 1) and store.delete_user("ann") == (None, 0)
    assert not store.states([uid], 1) and store.totals()[:2] == (1, 1)
    store.append(add, lambda item: True)
    assert store.accounts(["ann"])["ann"].uid != uid and store.find_users("", 9) == [("ann", 1), ("bob", 1)]


def test_users_are_found_by_the_start_of_their_names(store: Store) -> None:
    names = ["ann", "anna", "ANN", "a%", "a_", "zoë", "Ünal"]
    store.append([Submission([Event("click", name, "i1", 1) for name in names])], lambda item: True)
    for prefix in ("", "a", "an", "a%", "a_", "zo", "Ü", "nobody's"):
        assert [name for name, _ in store.find_users(prefix, 99)] == sorted(n for n in names if n.startswith(prefix))


def test_another_file_is_not_taken_for_a_store(tmp_path: Path) -> None:
    import sqlite3

    other = tmp_path / "other.db"
    sqlite3.connect(other).execute("CREATE TABLE songs (name)").connection.close()
    with pytest.raises(ValueError, match="a table songs"):
        open_store(str(other), 1.0, print)
    (tmp_path / "text").write_text("no database, but a text that is long enough to be taken for one " * 40)
    with pytest.raises(ValueError, match="not a store"):
        open_store(str(tmp_path / "text"), 1.0, print)
    with pytest.raises(ValueError, match="is a folder"):
        open_store(str(tmp_path), 1.0, print)
    with pytest.raises(ValueError, match="mysql://"):
        make_store("mysql://localhost/x")


@pytest.mark.parametrize(
    ("url", "path"), [("a.db", "a.db"), ("sqlite:///a.db", "a.db"), ("sqlite:////tmp/a.db", "/tmp/a.db")]
)
def test_urls_of_files(url: str, path: str) -> None:
    made = make_store(url)
    assert isinstance(made, SqliteStore) and str(made.path) == path


def test_a_password_is_not_shown() -> None:
    assert make_store("postgresql://ann:secret@host:1/shop?sslmode=require").name == "postgresql://ann@host:1/shop"


def test_a_failing_store_says_so_and_stores_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s.db"), 1.0, print)

    def fail() -> None:
        with store.transaction(write=True) as run:
            run("INSERT INTO facts VALUES ('a', 'b')")
            run("SELECT nothing FROM nowhere")

    with pytest.raises(StoreError, match="failed"):
        fail()
    assert store.fact("a") is None
    store.close()
