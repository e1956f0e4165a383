"""The page at `/` of a server, its styles and scripts: plain files, held in memory, sent with strict headers.

Nothing is loaded from another host, no script or style stands in the HTML, and scripts never turn text into HTML, so the
policy below can forbid all of that. The pages are open without the API key: they hold no data, and ask for the key.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response

TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Ending of a file → its content type. Other files of the folder are not sent."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""`no-cache` means: ask again with the ETag. After an upgrade the browser never mixes old scripts with new ones."""


def page_files() -> dict[str, bytes]:
    """Name → content of every file that a page may load, the pages included."""
    folder = files(__name__)
    found = {item.name: item for item in folder.iterdir() if item.name.rpartition(".")[2] in TYPES}
    return {name: found[name].read_bytes() for name in sorted(found)}


def add_pages(app: FastAPI, page: Literal["rec", "lm"]) -> None:
    """Serve the page of a recommender or of a language model at `/`, and its files under `/pages/`."""
    loaded = page_files()
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:24]}"' for name, content in loaded.items()}

    def answer(name: str, request: Request) -> Response:
        headers = {**HEADERS, "ETag": tags[name]}
        if tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(loaded[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root(request: Request) -> Response:
        return answer(f"{page}.html", request)

    @app.api_route("/pages/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        if name not in loaded:
            return Response("No such file.", 404, media_type="text/plain")
        return answer(name, request)
