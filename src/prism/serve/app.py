"""The FastAPI application that both services share: errors, key, limits, metrics, health, /docs and the page."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from prism import __version__
from prism.serve.docs import docs_page
from prism.serve.errors import ERRORS, ApiError, add_error_handlers
from prism.serve.metrics import Metrics
from prism.serve.middleware import RequestMiddleware
from prism.serve.pages import add_pages
from prism.serve.settings import ServerSettings

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    """The service can do its work."""

    Ready: bool


def create_app(
    kind: Literal["rec", "lm"],
    title: str,
    settings: ServerSettings,
    metrics: Metrics,
    not_ready: Callable[[], str | None],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """An application with everything but the service's routes; add these with `app.include_router`.

    Args:
        kind: which page is shown at `/`.
        title: heading of /docs.
        not_ready: why the service cannot do its work now, or None if it can. It is asked at every /api/health/ready.
        lifespan: as FastAPI's: an async context manager around the service's life, which starts and stops its threads.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
        redirect_slashes=False,
    )
    if settings.api_key is not None:
        _say_key(app)
    app.add_middleware(RequestMiddleware, settings=settings, metrics=metrics)
    add_error_handlers(app)
    add_pages(app, kind)

    @app.get("/api/health/live", tags=["operation"])
    async def live() -> Health:
        """Whether the process answers."""
        return Health(Ready=True)

    @app.get("/api/health/ready", tags=["operation"])
    def ready() -> Health:
        """Whether requests can be answered: model loaded, store reachable."""
        why = not_ready()
        if why is not None:
            raise ApiError(503, why, code="not_ready", headers={"Retry-After": "2"})
        return Health(Ready=True)

    @app.get("/metrics", tags=["operation"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def prometheus() -> Response:
        """Prometheus metrics of this process."""
        return Response(metrics.render(), media_type=PROMETHEUS)

    page = docs_page(title)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return page

    return app


def _say_key(app: FastAPI) -> None:
    """Have the document say that a key is needed: /docs asks for it then."""
    plain = app.openapi

    def with_key() -> dict[str, Any]:
        document = plain()
        document["components"]["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
        return {**document, "security": [{"key": []}]}

    app.openapi = with_key  # type: ignore[method-assign]
