"""States over HTTP: kept, saved to files that outlive the service, refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from prism.serve.lm.text import Text
from tests.serve.lm.models import folder, serving


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(folder(), store=tmp_path_factory.mktemp("s") / "store", max_states=20) as (client, _):
        yield client


def create(http: httpx.Client, text: str = "Once upon a time. " * 20) -> dict:
    return http.post("/v1/states", json={"input": text}).raise_for_status().json()


def continued(http: httpx.Client, state: str) -> str:
    body = {"prompt": " And then", "max_tokens": 12, "seed": 1, "state": state}
    return http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]


def test_all_states_have_one_size_and_the_list_adds_them_up(http: httpx.Client) -> None:
    states = [create(http, "ab" * length) for length in (0, 1, 128, 500)]
    assert len({state["bytes"] for state in states}) == 1
    assert [state["tokens"] for state in states] == [0, 2, 256, 1000]
    listed = http.get("/v1/states").json()
    assert listed["bytes"] == sum(state["bytes"] for state in listed["data"])
    for state in states:
        assert http.get(f"/v1/states/{state['id']}").json() == state
        assert http.delete(f"/v1/states/{state['id']}").json()["deleted"] is True
        assert http.delete(f"/v1/states/{state['id']}").status_code == 404
    assert continued(http, create(http, "")["id"]) == continued(http, create(http, "")["id"])


def test_saved_states_outlive_the_service(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serving(folder(), store=store) as (http, _):
        state = create(http)
        text = continued(http, state["id"])
        assert http.post(f"/v1/states/{state['id']}/save", json={"name": "story-1.0"}).status_code == 200
        taken = http.post(f"/v1/states/{state['id']}/save", json={"name": "story-1.0"})
        assert taken.status_code == 400 and "overwrite" in taken.json()["error"]["message"]
        again = http.post(f"/v1/states/{state['id']}/save", json={"name": "story-1.0", "overwrite": True})
        assert again.status_code == 200
    assert [path.name for path in store.iterdir()] == ["story-1.0.safetensors"]
    with serving(folder(), store=store) as (http, _):
        assert http.get("/v1/states").json() == {"object": "list", "data": [], "bytes": 0, "saved": ["story-1.0"]}
        loaded = http.post("/v1/states/load", json={"name": "story-1.0"}).json()
        assert (loaded["tokens"], loaded["bytes"]) == (state["tokens"], state["bytes"])
        assert continued(http, loaded["id"]) == text
    with serving(folder("gated_delta"), store=store) as (http, _):
        refused = http.post("/v1/states/load", json={"name": "story-1.0"})
        assert refused.status_code == 400 and "made by another model (tiny)" in refused.json()["error"]["message"]
        path = store / "story-1.0.safetensors"
        path.write_bytes(path.read_bytes()[:200])
        damaged = http.post("/v1/states/load", json={"name": "story-1.0"})
        assert damaged.status_code == 400 and "cannot be loaded" in damaged.json()["error"]["message"]
        assert http.delete("/v1/states/saved/story-1.0").status_code == 200
        assert http.delete("/v1/states/saved/story-1.0").status_code == 404
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "a/b", "..", ".hidden", "", "a" * 65, "a\\b", "a\0b", "a\n", "ä"])
def test_names_are_not_paths(http: httpx.Client, name: str, tmp_path: Path) -> None:
    state = create(http)
    for path in (f"/v1/states/{state['id']}/save", "/v1/states/load"):
        answer = http.post(path, json={"name": name})
        assert answer.status_code == 422 and answer.json()["error"]["param"] == "name"
    assert http.delete(f"/v1/states/{state['id']}").status_code == 200


def test_encoded_paths_do_nothing(http: httpx.Client, tmp_path: Path) -> None:
    for path in ("/v1/states/saved/..%2f..%2fx", "/v1/states/%2e%2e%2fx", "/v1/states/saved/%2e%2e"):
        assert http.delete(path).status_code in (404, 405, 422)


def test_there_is_room_for_a_number_of_states_and_of_bytes() -> None:
    with serving(folder(), max_states=2) as (http, service):
        create(http), create(http)
        full = http.post("/v1/states", json={"input": "a"})
        assert full.status_code == 400 and "--max-states" in full.json()["error"]["message"]
        body = {"prompt": "a", "max_tokens": 1, "store_state": True}
        assert http.post("/v1/completions", json=body).status_code == 400
        size = service.states.size(Text())
    with serving(folder(), state_bytes=2 * size) as (http, _):
        states = [create(http), create(http)]
        full = http.post(f"/v1/states/{states[0]['id']}/fork")
        assert full.status_code == 400 and "--state-memory" in full.json()["error"]["message"]
        http.delete(f"/v1/states/{states[1]['id']}")
        assert http.post(f"/v1/states/{states[0]['id']}/fork").status_code == 200


def test_a_state_that_grows_has_its_size(tmp_path: Path) -> None:
    with serving(folder("softmax"), store=tmp_path) as (http, _):
        short, long = create(http, "ab"), create(http, "ab" * 600)
        assert long["bytes"] > short["bytes"]
        assert http.get("/api/stats").json()["Model"]["constant_state"] is False
        http.post(f"/v1/states/{long['id']}/save", json={"name": "long"}).raise_for_status()
        loaded = http.post("/v1/states/load", json={"name": "long"}).json()
        assert continued(http, loaded["id"]) == continued(http, long["id"])
