"""The fast path answers what the routes answer: the same statuses, bodies and effects."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.serve.services import event, recommender, serving

MODEL = recommender()


def through_routes(client: httpx.Client, method: str, path: str, **request: object) -> httpx.Response:
    """The same request with a parameter that the fast path does not know."""
    return client.request(method, f"{path}{'&' if '?' in path else '?'}other=1", **request)  # type: ignore[arg-type]


def same(fast: httpx.Response, slow: httpx.Response) -> bool:
    kept = ("content-type", "retry-after")
    return (fast.status_code, fast.json(), [fast.headers.get(name) for name in kept]) == (
        slow.status_code,
        slow.json(),
        [slow.headers.get(name) for name in kept],
    )


def test_the_fast_path_answers_as_the_routes_do(tmp_path: Path) -> None:
    bodies = [
        [event("ann", "i1", 5), event("ann", "i2", 1), event("bob", "ünknown", 2, Value=1.5)],
        [event("ann", "i3", 9)],
        [event("ann", "i3", 9)],
        [],
        [{"UserId": "ann"}],
        [event("a/b", "i1", 1)],
        {"no": "list"},
        [event("ann", "i1", 1)] * 10_001,
    ]
    with serving(MODEL, tmp_path / "fast.db") as fast, serving(MODEL, tmp_path / "slow.db") as slow:
        for body in bodies:
            assert same(
                fast.post("/api/feedback", json=body), through_routes(slow, "POST", "/api/feedback", json=body)
            ), body
        for content in ("[1", "", "null"):
            headers = {"Content-Type": "application/json"}
            one = fast.post("/api/feedback", content=content, headers=headers)
            assert same(one, through_routes(slow, "POST", "/api/feedback", content=content, headers=headers)), content
        for path in ("ann", "bob", "nobody", "ann?n=3", "ann?n=0", "ann?n=1001", "ann?n=x", "a%2Fb", "a%00", "x" * 300):
            one = fast.get(f"/api/recommend/{path}")
            assert same(one, through_routes(slow, "GET", f"/api/recommend/{path}")), path
        for user in ("ann", "bob"):
            logs = [client.get(f"/api/user/{user}").json()["Feedback"] for client in (fast, slow)]
            assert logs[0] == logs[1]
        metrics = fast.get("/metrics").text
    assert 'route="/api/recommend/{user}",status="200"' in metrics and 'route="/api/feedback",status="200"' in metrics


@pytest.mark.parametrize("chunks", [[b'[{"FeedbackType":"c","UserId":"ann",', b'"ItemId":"i1"}]']])
def test_a_body_in_pieces_is_read_whole(tmp_path: Path, chunks: list[bytes]) -> None:
    with serving(MODEL, tmp_path / "s.db") as client:
        headers = {"Content-Type": "application/json", "Content-Length": str(sum(map(len, chunks)))}
        assert client.post("/api/feedback", content=iter(chunks), headers=headers).json() == {"RowAffected": 1}
