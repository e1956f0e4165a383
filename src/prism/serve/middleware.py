"""What stands in front of every request: API key, size of the body, origin of pages, counting and logging.

One ASGI layer, not several: each layer costs every request time, and streams must pass through unchanged.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism.serve.errors import error_response
from prism.serve.metrics import Metrics
from prism.serve.settings import ServerSettings

log = logging.getLogger("prism.serve")
OPEN = frozenset({"/", "/docs", "/openapi.json", "/api/health/live", "/api/health/ready"})
"""Paths that need no key: they show nothing of the data. Files of the pages are open too."""


class RequestMiddleware:
    """Let a request through, or answer it with 401, 403, 413 or 500 and a reason; count and log it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._large = f"the body has more than {settings.max_body:,} bytes: send it in parts"
        self._key = None if settings.api_key is None else settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, headers = time.perf_counter(), 500, dict(scope["headers"])
        read, answering = 0, False

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.settings.max_body:
                await self._read_rest(receive, message.get("more_body", False))
                raise HTTPException(413, self._large)
            return message

        async def counted(message: Message) -> None:
            nonlocal status, answering
            if message["type"] == "http.response.start":
                status, answering = message["status"], True
            await send(message)

        self.metrics.running.inc()
        try:
            refusal = self._refusal(scope, headers)
            if refusal is None:
                await self.app(scope, limited, counted)
            else:
                await self._read_rest(receive)
                await refusal(scope, receive, counted)
        except Exception as error:
            # Raised on, it would make the server close the connection after the answer, under the client's next request.
            if answering:
                raise
            log.error("unexpected error", exc_info=error, extra={"fields": {"path": scope["path"]}})
            failure = error_response(500, "an unexpected error, which the log of the service describes")
            await failure(scope, receive, counted)
        finally:
            self.metrics.running.dec()
            self._count(scope, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Any:
        """The answer to a request that is not let through; None for one that is."""
        path: str = scope["path"]
        if self._key is not None and path not in OPEN and not path.startswith("/pages/"):
            given = headers.get(b"x-api-key")
            if given is None:
                scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
                given = token.strip() if scheme.lower() == b"bearer" else None
            if given is None or not hmac.compare_digest(given, self._key):
                what = "this service needs an API key" if given is None else "the API key is wrong"
                way = "send it as X-API-Key, or as Authorization: Bearer"
                return error_response(401, f"{what}: {way}", code="api_key", headers={"WWW-Authenticate": "Bearer"})
        origin = headers.get(b"origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD") and not _same_host(origin, headers):
            return error_response(403, f"the page of {origin.decode('latin-1')} may not use this service")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.settings.max_body:
            return error_response(413, self._large)
        return None

    async def _read_rest(self, receive: Receive, more: bool = True) -> None:
        """Read what a refused request sends, up to the limit: closed with unread bytes, a connection loses its answer."""
        read = 0
        while more and read <= self.settings.max_body:
            message = await receive()
            read, more = read + len(message.get("body", b"")), message.get("more_body", False)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = (
            getattr(scope.get("route"), "path", None) or "other"
        )  # never the path itself: ids would fill the metrics
        self.metrics.request(scope["method"], route, status, seconds)
        if log.isEnabledFor(logging.DEBUG if status < 400 else logging.INFO):
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(seconds * 1000, 2),
                "client": (scope.get("client") or ("",))[0],
            }
            level = logging.DEBUG if status < 400 else logging.WARNING if status >= 500 else logging.INFO
            log.log(level, "request", extra={"fields": fields})


def _same_host(origin: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether a page of the service itself asks. A page of another site could otherwise write to a local service."""
    return urlsplit(origin.decode("latin-1")).netloc.lower() == headers.get(b"host", b"").decode("latin-1").lower()
