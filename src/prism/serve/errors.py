"""Errors of a service: one JSON body for all of them, in the form that clients of OpenAI's API read."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException


class ErrorReason(BaseModel):
    """Why a request was refused."""

    message: str = Field(description="One sentence for people.")
    type: str = Field(description="invalid_request_error, authentication_error, unavailable_error or server_error.")
    param: str | None = Field(None, description="The field or parameter that is wrong.")
    code: str | None = Field(None, description="A word for programs.")


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorReason


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused."},
    "503": {"model": ErrorBody, "description": "The service cannot do this now: try again later."},
}
"""Answers to declare for every operation: `APIRouter(responses=ERRORS)`."""


class ApiError(Exception):
    """A request that is refused with this status and sentence.

    Args:
        param: the field or parameter that is wrong.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    if status in (401, 403):
        kind = "authentication_error"
    elif status in (429, 503):
        kind = "unavailable_error"
    else:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(status, message, param, code), status, headers=dict(headers or {}))


def add_error_handlers(app: FastAPI) -> None:
    """Answer every kind of refusal with `ErrorBody`. For other errors, `RequestMiddleware` does."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error_response(error.status, error.message, error.param, error.code, error.headers)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404 and message == HTTPStatus(404).phrase:
            message = f"there is no {request.url.path}: /docs lists what there is"
        if error.status_code == 405:
            message = f"{request.method} is not possible for {request.url.path}"
        return error_response(error.status_code, message, headers=error.headers)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        more = len(error.errors()) - 1
        message = f"{place}: {first['msg']}" + (f" (and {more} more)" if more else "")
        return error_response(422, message, place, first["type"])

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
