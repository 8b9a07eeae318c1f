"""OpenAI-shaped error responses; a traceback never leaves the process."""

from __future__ import annotations

from http import HTTPStatus

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import BadRequestError, NotFoundError, ProxyError
from ..telemetry.logging import frames_of

log = structlog.get_logger("leyline.http")


def error_body(error: ProxyError) -> bytes:
    """The JSON body ``{"error": {message, type, param, code}}``."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
                **error.members,
            }
        }
    )


def error_event(error: ProxyError) -> bytes:
    """The same as an event of a stream."""
    return b"data: " + error_body(error) + b"\n\n"


def error_response(error: ProxyError, headers: dict[str, str] | None = None) -> Response:
    """``error`` as a response with its own status and headers."""
    return Response(
        error_body(error),
        status_code=error.status,
        headers={**error.headers, **(headers or {})},
        media_type="application/json",
    )


def as_proxy_error(error: Exception) -> ProxyError:
    """``error`` as something to show a caller: unforeseen failures become a bare 500."""
    if isinstance(error, ProxyError):
        return error
    log.error("unhandled_error", error=type(error).__name__, frames=frames_of(error))
    return ProxyError("The proxy failed on this request; the log of the proxy says where.")


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of ``app`` OpenAI-shaped."""

    async def proxy_error(_: Request, error: Exception) -> Response:
        return error_response(as_proxy_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class only
        if error.status_code == HTTPStatus.NOT_FOUND:
            return error_response(
                NotFoundError(f"No such path: {request.url.path}. The API starts at /v1.")
            )
        shaped = BadRequestError(f"{request.method} is not possible on {request.url.path}.")
        shaped.status = error.status_code
        shaped.code = HTTPStatus(error.status_code).name.lower()
        return error_response(shaped, dict(error.headers or {}))

    async def validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return error_response(BadRequestError(f"{field}: {first['msg']}.", param=field))

    app.add_exception_handler(ProxyError, proxy_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, proxy_error)
