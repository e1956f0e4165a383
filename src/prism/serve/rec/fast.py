"""The two requests of every visit, answered before FastAPI's routing: one event stored, one recommendation.

The routes in `routes` define these operations and answer everything unusual: any header, parameter or fault that is not
expected here is passed on to them unchanged. What is answered here is answered in the same way, in a third of the time.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism.serve.errors import error_response
from prism.serve.rec.engine import Question
from prism.serve.rec.routes import sorted_events
from prism.serve.rec.schemas import Feedback, User
from prism.serve.rec.service import RecService
from prism.serve.rec.settings import MOST_EVENTS, MOST_N
from prism.serve.rec.store import Event, StoreError, Submission

_BODY = TypeAdapter(list[Feedback])
_USER = TypeAdapter(User)
_RECOMMEND = "/api/recommend/"
_UNUSUAL = frozenset({b"idempotency-key", b"x-api-version", b"transfer-encoding", b"content-encoding"})


class _Route:
    """What metrics call a request."""

    def __init__(self, path: str) -> None:
        self.path = path


_FEEDBACK_ROUTE, _RECOMMEND_ROUTE = _Route("/api/feedback"), _Route("/api/recommend/{user}")


class FastPath:
    """An ASGI layer in front of the application."""

    def __init__(self, app: ASGIApp, service: RecService) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not any(name in _UNUSUAL for name, _ in scope["headers"]):
            path = scope["path"]
            if scope["method"] == "POST" and path == "/api/feedback" and not scope["query_string"]:
                await self._feedback(scope, receive, send)
                return
            if scope["method"] == "GET" and path.startswith(_RECOMMEND):
                await self._recommend(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _feedback(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = []
        body = b""
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
            body += messages[-1].get("body", b"")

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        events = self._events(scope, body)
        if events is None:
            await self.app(scope, again, send)
            return
        scope["route"] = _FEEDBACK_ROUTE
        try:
            count = await self.service.append(Submission(events))
        except StoreError as error:
            await unavailable(error)(scope, receive, send)
            return
        await _reply(send, {"RowAffected": count})

    def _events(self, scope: Scope, body: bytes) -> list[Event] | None:
        """The events of a request, or None for one that is not answered here."""
        kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if kind != b"application/json":
            return None
        try:
            parsed = _BODY.validate_json(body)
        except ValidationError:
            return None
        return sorted_events(parsed) if 0 < len(parsed) <= MOST_EVENTS else None

    async def _recommend(self, scope: Scope, receive: Receive, send: Send) -> None:
        question = self._question(scope)
        if question is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = _RECOMMEND_ROUTE
        try:
            answer = await self.service.engine.ask(question)
        except StoreError as error:
            await unavailable(error)(scope, receive, send)
            return
        await _reply(send, [str(name) for name in self.service.recommender.catalogue.names(answer.rows)])

    def _question(self, scope: Scope) -> Question | None:
        """What a request asks, or None for one that is not answered here: only `n` may be given."""
        query, n = scope["query_string"], 10
        if query:
            digits = query[2:]
            if query[:2] != b"n=" or not digits.isdigit() or len(digits) > 4 or not 1 <= int(digits) <= MOST_N:
                return None
            n = int(digits)
        try:
            return Question(_USER.validate_python(scope["path"][len(_RECOMMEND) :]), n=n)
        except ValidationError:
            return None


def unavailable(error: StoreError) -> Any:
    """The answer while the store cannot be used."""
    message = f"{error}; nothing of this request is stored, try again"
    return error_response(503, message, code="store", headers={"Retry-After": "2"})


async def _reply(send: Send, value: Any) -> None:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
