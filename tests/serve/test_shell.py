"""The shell of both services: key, limits, errors, logs, metrics, /docs, and a graceful end."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException

from prism.serve.app import create_app
from prism.serve.errors import ApiError, error_response
from prism.serve.logs import JsonLines
from prism.serve.metrics import Metrics
from prism.serve.middleware import RequestMiddleware
from prism.serve.run import bind, in_thread, make_server, url_of
from prism.serve.settings import ServerSettings

KEY = "a-long-key"
SETTINGS = ServerSettings(port=0, api_key=KEY, max_body=2048)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    metrics = Metrics("events")
    app = create_app("rec", "a service", SETTINGS, metrics, lambda: None)

    @app.post("/api/count")
    def count(numbers: list[int]) -> int:
        """Count numbers <b>&amp;</b>."""
        metrics.add(len(numbers))
        return len(numbers)

    @app.get("/api/fail/{how}")
    def fail(how: str) -> None:
        if how == "known":
            raise ApiError(409, "it is taken", "how", "taken")
        raise RuntimeError("a secret detail")

    with in_thread(app, SETTINGS) as url, httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=60) as opened:
        yield opened


def reason(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]


def test_a_key_is_asked_for(client: httpx.Client) -> None:
    bare = httpx.Client(base_url=client.base_url, timeout=60)
    assert "needs an API key" in reason(bare.get("/metrics"), 401)
    for headers in ({"X-API-Key": KEY + "x"}, {"Authorization": f"Bearer {KEY}x"}, {"X-API-Key": "ü".encode()}):
        assert "wrong" in reason(bare.post("/api/count", json=[1], headers=headers), 401)
    assert "needs an API key" in reason(bare.get("/api/x", headers={"Authorization": f"Basic {KEY}"}), 401)
    assert bare.post("/api/count", json=[1], headers={"Authorization": f"bearer {KEY}"}).json() == 1
    for path in ("/", "/docs", "/openapi.json", "/api/health/live", "/api/health/ready"):
        assert bare.get(path).status_code == 200, path


@pytest.mark.parametrize("way", ["length", "stream"])
def test_a_body_that_is_too_large_is_refused(client: httpx.Client, way: str) -> None:
    body = b"[" + b"1," * 1500 + b"1]"
    content = body if way == "length" else iter([body[:1000], body[1000:2000], body[2000:]])
    answer = client.post("/api/count", content=content, headers={"Content-Type": "application/json"})
    assert "more than 2,048 bytes" in reason(answer, 413)


def test_errors_have_one_form_and_a_reason(client: httpx.Client) -> None:
    assert "/nowhere" in reason(client.get("/nowhere"), 404)
    assert "PUT" in reason(client.put("/api/count"), 405)
    assert "JSON" in reason(client.post("/api/count", content="[1", headers={"Content-Type": "application/json"}), 422)
    assert "integer" in reason(client.post("/api/count", json=["x"]), 422)
    assert reason(client.get("/api/fail/known"), 409) == "it is taken"
    assert "secret" not in reason(client.get("/api/fail/unknown"), 500)


def test_pages_of_other_sites_may_not_write(client: httpx.Client) -> None:
    evil, own = {"Origin": "http://evil.example"}, {"Origin": str(client.base_url).rstrip("/")}
    assert "evil.example" in reason(client.post("/api/count", json=[1], headers=evil), 403)
    assert client.post("/api/count", json=[1], headers=own).status_code == 200


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass


@pytest.mark.parametrize(("origin", "limit", "status"), [(b"http://evil.example", 100, 403), (b"http://here", 15, 413)])
def test_a_refused_request_is_read_before_it_is_answered(origin: bytes, limit: int, status: int) -> None:
    """Closed with unread bytes, the connection would be reset, and the client would not see the reason."""
    waiting = [{"type": "http.request", "body": b"x" * 10, "more_body": more} for more in (True, True, False)]
    unread: list[int] = []

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        unread.append(len(waiting))
        assert message.get("status", status) == status

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(HTTPException) as refused:
            await read_all(scope, receive, send)
        await error_response(refused.value.status_code, refused.value.detail)(scope, receive, send)

    headers = [(b"origin", origin), (b"host", b"here")]
    scope = {"type": "http", "method": "POST", "path": "/api/count", "headers": headers}
    middleware = RequestMiddleware(app, ServerSettings(max_body=limit), Metrics("tokens", lambda: 0.0))
    asyncio.run(middleware(scope, receive, send))
    assert unread and set(unread) == {0}


def test_an_unexpected_error_keeps_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Uvicorn closes the connection of an application that raises, perhaps under the client's next request."""
    app = create_app("rec", "a service", ServerSettings(), Metrics("events"), lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/api/health/ready", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 500 and b"division" not in sent[1]["body"]
    assert "division by zero" in caplog.text


def test_an_answer_that_breaks_off_is_not_ended_as_if_whole() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("lost")

    async def send(message: Any) -> None:
        assert message["type"] == "http.response.start"

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    middleware = RequestMiddleware(app, ServerSettings(), Metrics("tokens", lambda: 0.0))
    with pytest.raises(RuntimeError, match="lost"):
        asyncio.run(middleware(scope, lambda: None, send))  # type: ignore[arg-type, return-value]


def test_docs_load_nothing_from_another_host_and_run_one_script(client: httpx.Client) -> None:
    page = client.get("/docs")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3 and "openapi.json" in page.text
    for path in loaded:
        assert client.get(f"/{path}").status_code == 200, path
    (script,) = re.findall("<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(one.split(" ", 1) for one in page.headers["Content-Security-Policy"].split("; "))
    assert policy["script-src"] == f"'self' 'sha256-{digest}'" and policy["connect-src"] == "'self'"
    assert policy["default-src"] == "'none'" and "//" not in page.headers["Content-Security-Policy"]


def test_metrics_count_by_route_never_by_path(client: httpx.Client) -> None:
    client.get("/api/fail/known")
    client.get("/some/where/9")
    text = client.get("/metrics").text
    assert 'prism_requests_total{method="GET",route="/api/fail/{how}",status="409"}' in text
    assert "/some/where/9" not in text and 'route="other",status="404"' in text
    assert re.search(r"^prism_events_total ", text, re.MULTILINE)
    assert 'prism_request_seconds_count{route="/api/fail/{how}"}' in text


def test_series_and_quantiles_are_of_their_seconds() -> None:
    now = 1000.0
    metrics = Metrics("tokens", lambda: now)
    for second, milliseconds in ((1000, [1, 2, 3]), (1002, [10])):
        now = second + 0.5
        metrics.add(5)
        for one in milliseconds:
            metrics.request("GET", "/api/recommend/{user}", 200, one / 1000)
        metrics.request("GET", "/metrics", 200, 9.0)
    now = 1003.0
    series = metrics.series()
    assert series["Second"] == list(range(883, 1003)) and series["Tokens"][-3:] == [5, 0, 5]
    assert (
        series["Requests"][-3:] == [3, 0, 1] and series["P50"][-3:] == [2, 0, 10] and series["P99"][-3:] == [3, 0, 10]
    )
    now = 5000.0
    assert sum(metrics.series()["Tokens"]) == 0


def test_a_log_line_is_one_json_object() -> None:
    record = logging.LogRecord("prism.serve", logging.INFO, "", 0, "a\n%s", ("b",), None)
    record.fields = {"user": "ü\n", "n": 1}
    line = JsonLines().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["message"], found["user"], found["n"], found["level"]) == ("a\nb", "ü\n", 1, "info")


@pytest.mark.parametrize("grace", [0.0, 0.5])
def test_a_running_request_gets_the_grace_and_no_more(grace: float) -> None:
    settings = ServerSettings(port=0, grace=grace)
    app = create_app("rec", "endless", settings, Metrics("events"), lambda: None)
    entered = threading.Event()

    @app.get("/api/endless")
    async def endless() -> None:
        entered.set()
        await asyncio.sleep(8)

    bound = bind(settings)
    server = make_server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    lost: list[Exception] = []

    def ask() -> None:
        try:
            httpx.get(f"{url_of(bound)}/api/endless", timeout=60).raise_for_status()
        except httpx.HTTPError as error:
            lost.append(error)

    request = threading.Thread(target=ask)
    request.start()
    assert entered.wait(30)
    started, server.should_exit = time.monotonic(), True
    thread.join()
    assert grace <= time.monotonic() - started < grace + 4
    request.join()
    assert lost


def test_a_running_request_finishes_when_the_service_stops() -> None:
    settings = ServerSettings(port=0)
    app = create_app("rec", "slow", settings, Metrics("events"), lambda: "not yet")
    entered = threading.Event()

    @app.get("/api/slow")
    def slow() -> str:
        entered.set()
        time.sleep(0.3)
        return "done"

    bound = bind(settings)
    server = make_server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    url = url_of(bound)
    assert "not yet" in reason(httpx.get(f"{url}/api/health/ready"), 503)
    answers: list[httpx.Response] = []
    request = threading.Thread(target=lambda: answers.append(httpx.get(f"{url}/api/slow")))
    request.start()
    assert entered.wait(30)
    server.should_exit = True
    request.join()
    thread.join()
    assert answers[0].json() == "done"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
