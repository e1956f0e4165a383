"""/docs: Swagger UI for the OpenAPI document, with nothing from another host."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode

from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse

from prism.serve.pages import HEADERS


def docs_page(title: str) -> HTMLResponse:
    """FastAPI's page, which may run its one script and the files with it, and no other."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=title,
        swagger_js_url="pages/swagger-ui-bundle.js",
        swagger_css_url="pages/swagger-ui.css",
        swagger_favicon_url="pages/icon.svg",
        swagger_ui_parameters={"validatorUrl": None},  # would be asked whether the document is valid
    )
    (script,) = re.findall(r"<script>(.*?)</script>", bytes(page.body).decode(), re.DOTALL)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page.headers.update(HEADERS)
    page.headers["Content-Security-Policy"] = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page
