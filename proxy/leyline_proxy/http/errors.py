"""Error responses in the shape of the called API; a traceback never leaves the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from http import HTTPStatus
from uuid import uuid4

import orjson
import structlog
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..apis.anthropic.errors import ANTHROPIC_VERSION, error_document, too_long
from ..errors import BadRequestError, NotFoundError, ProxyError, TryLaterError
from ..telemetry.logging import frames_of
from .path_hints import KnownPaths, google_error, hint, is_anthropic, is_gemini, shown_path

log = structlog.get_logger("leyline.http")

_SHOWN_FRAMES = 4
_LONGEST_METHOD = 20


class MethodError(ProxyError):
    """A path that has other methods.

    Args:
        path: as it is shown.
        allowed: the methods.
    """

    status = 405
    kind = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        shown = ", ".join(allowed)
        super().__init__(f"{method} is not possible on {path}. It takes {shown}.")
        self.header = ("allow", shown)


def error_body(error: ProxyError) -> bytes:
    """Return the JSON body ``{"error": {message, type, param, code}}``."""
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
    """Return an error as an event of a stream."""
    return b"data: " + error_body(error) + b"\n\n"


def error_response(error: ProxyError, headers: dict[str, str] | None = None) -> Response:
    """Return ``error`` as a response with its own status and headers."""
    return Response(
        error_body(error),
        status_code=error.status,
        headers={**error.headers, **(headers or {})},
        media_type="application/json",
    )


def as_proxy_error(error: Exception) -> ProxyError:
    """Return an error that a caller may see: unforeseen failures become a bare 500."""
    if isinstance(error, ProxyError):
        return error
    if isinstance(error, RecursionError):
        # The first code to walk the body meets its depth: a decoder or a policy.
        log.warning("nested_too_deeply", frames=frames_of(error)[-_SHOWN_FRAMES:])
        return BadRequestError("The request body is nested too deeply.", code="invalid_json")
    log.error("unhandled_error", error=type(error).__name__, frames=frames_of(error))
    return ProxyError("The proxy failed on this request; the log of the proxy says where.")


def anthropic_message(error: ProxyError) -> str:
    """Return an error's text for Anthropic's API."""
    if error.overflow is None:
        return error.message
    return too_long(error.overflow, error.message)


def anthropic_response(error: ProxyError) -> Response:
    """Return ``error`` in the shape of Anthropic's API, for failures outside of an exchange."""
    request_id = f"req_{uuid4().hex}"
    account = {"code": error.code, "param": error.param, **error.members}
    return Response(
        orjson.dumps(
            error_document(
                error.status, anthropic_message(error), request_id=request_id, account=account
            )
        ),
        status_code=error.status,
        headers={**error.headers, "request-id": request_id},
        media_type="application/json",
    )


def shaped_response(
    request: Request, error: ProxyError, headers: dict[str, str] | None = None
) -> Response:
    """Return ``error`` in the shape of the path's API."""
    path = _path_of(request)
    if is_gemini(path):
        return Response(
            orjson.dumps(google_error(error.status, error.message)),
            status_code=error.status,
            headers={**error.headers, **(headers or {})},
            media_type="application/json",
        )
    if not is_anthropic(path) and ANTHROPIC_VERSION not in request.headers:
        return error_response(error, headers)
    answer = anthropic_response(error)
    answer.headers.update(headers or {})
    return answer


def method_error(request: Request, known: KnownPaths) -> MethodError:
    """Return the error for a method that a path doesn't have."""
    path = _path_of(request)
    return MethodError(request.method[:_LONGEST_METHOD], shown_path(path), known.allowed(path))


def _path_of(request: Request) -> str:
    """Return the path below the application, which may be mounted in another one."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


def _described(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the path and the methods of routes that are described; those for any path aren't."""
    for route in routes:
        if isinstance(route, Route) and (route.include_in_schema or "{" not in route.path):
            yield route.path, route.methods or ()


def install_error_handlers(app: Starlette, other: Iterable[tuple[str, Iterable[str]]] = ()) -> None:
    """Give every failure of ``app`` the shape of the called API.

    A path that isn't there is never redirected: clients lose their bodies on the way.

    Args:
        other: further paths that requests may have, with their methods.
    """
    app.router.redirect_slashes = False

    @cache
    def known() -> KnownPaths:
        return KnownPaths([*_described(app.routes), *other])

    app.state.known_paths = known

    async def proxy_error(request: Request, error: Exception) -> Response:
        return shaped_response(request, as_proxy_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class only
        if error.status_code == HTTPStatus.NOT_FOUND:
            path = _path_of(request)
            told = hint(path, known(), request.method)
            missing = NotFoundError(f"No such path: {shown_path(path)}. {told}")
            return shaped_response(request, missing)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return shaped_response(request, method_error(request, known()))
        shaped = BadRequestError(f"{HTTPStatus(error.status_code).phrase}.")
        shaped.status = error.status_code
        shaped.code = HTTPStatus(error.status_code).name.lower()
        return shaped_response(request, shaped, dict(error.headers or {}))

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return shaped_response(request, BadRequestError(f"{field}: {first['msg']}.", param=field))

    app.add_exception_handler(ProxyError, proxy_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, proxy_error)


class StoppingError(TryLaterError):
    """The proxy is about to stop; another one may answer."""

    status = 503
    kind = "server_error"
    code = "stopping"

    def __init__(self) -> None:
        super().__init__("This proxy is about to stop. Send the request again.", 1)
