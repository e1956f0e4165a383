"""The application of a language-model service: OpenAI's routes, states, and figures for the page."""

from __future__ import annotations

from fastapi import FastAPI

from prism.serve.app import create_app
from prism.serve.lm.openai import openai_routes
from prism.serve.lm.schemas import Stats
from prism.serve.lm.service import LmService
from prism.serve.lm.state_routes import state_routes
from prism.serve.settings import ServerSettings


def lm_app(service: LmService, server: ServerSettings) -> FastAPI:
    """The application of a service."""
    app = create_app("lm", "PRISM language model", server, service.metrics, service.not_ready, service.lifespan)
    app.include_router(openai_routes(service))
    app.include_router(state_routes(service))

    @app.get("/api/stats", tags=["operation"])
    def stats() -> Stats:
        """What the service does now, and did in the last two minutes."""
        return service.stats()

    return app
