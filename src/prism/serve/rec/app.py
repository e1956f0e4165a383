"""The recommender's application: service, routes, and what happens at start and stop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from prism.serve.app import create_app
from prism.serve.errors import error_response
from prism.serve.rec.routes import data_routes, feedback_routes, recommend_routes
from prism.serve.rec.service import RecService
from prism.serve.rec.store import StoreError
from prism.serve.settings import ServerSettings

STORE_THREADS = 6
"""Most requests that read the store directly at once; each has a connection."""


def rec_app(service: RecService, settings: ServerSettings) -> FastAPI:
    """The application of a service that has not started; it starts and stops with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = STORE_THREADS
        service.start()
        yield
        await run_in_threadpool(service.stop)

    async def store_failed(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StoreError)
        message = f"{error}; nothing of this request is stored, try again"
        return error_response(503, message, code="store", headers={"Retry-After": "2"})

    app = create_app("rec", "PRISM recommender", settings, service.metrics, service.not_ready, lifespan)
    app.add_exception_handler(StoreError, store_failed)
    for routes in (feedback_routes, recommend_routes, data_routes):
        app.include_router(routes(service))
    return app
