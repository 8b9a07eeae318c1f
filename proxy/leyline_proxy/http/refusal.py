"""Engines' refusals as answers and errors for the caller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import orjson
from starlette.responses import Response

from ..errors import ProxyError, UpstreamRefusalError, UpstreamUnreachableError
from ..upstream.headers import downstream_headers
from .errors import error_response

_STATUS_OF_TYPE = {
    "badrequest": 400,
    "badrequesterror": 400,
    "invalid_request_error": 400,
    "authentication_error": 502,
    "not_found_error": 404,
    "notfounderror": 404,
    "rate_limit_error": 429,
    "abort": 503,
    "service_unavailable": 503,
    "overloaded_error": 503,
}
_OWN_CREDENTIALS = frozenset({401, 403, 407})


def refusal_response(upstream: httpx.Response, body: bytes, headers: Mapping[str, str]) -> Response:
    """Return the engine's non-200 answer, with its own body if that is OpenAI-shaped."""
    status = upstream.status_code
    if httpx.codes.is_error(status) and status not in _OWN_CREDENTIALS and _is_shaped(body):
        kept = {**downstream_headers(upstream.headers), **headers}
        return Response(body, status_code=status, headers=kept)
    return error_response(refusal_of_answer(status, body), dict(headers))


def refusal_of_answer(status: int, body: bytes) -> ProxyError:
    """Return the engine's non-200 answer as an error with its message."""
    if status in _OWN_CREDENTIALS:
        # The caller's key never went upstream, so a 401 would mislead the caller.
        return UpstreamUnreachableError(
            "The engine refuses the proxy's own credentials (upstream_api_key).",
            code="upstream_credentials",
        )
    if not httpx.codes.is_error(status):
        return UpstreamUnreachableError(f"The engine answered with status {status}.")
    return _shape(status, body)


def answer_of(body: bytes) -> dict[str, Any]:
    """Decode the engine's whole answer.

    Raises:
        UpstreamRefusalError: it is no JSON object; cut off, for instance.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = _lenient(body)
    if not isinstance(document, dict):
        raise UpstreamRefusalError(
            502,
            "The engine's answer is not a JSON object, or it was cut off.",
            kind="upstream_error",
            code="upstream_invalid_response",
        )
    return document


def _lenient(body: bytes) -> object:
    """Decode JSON with ``NaN`` and ``Infinity``, which some engines write; None if invalid."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def refusal_of_event(error: Mapping[str, Any]) -> ProxyError:
    """Return the error event that an engine sent before the first token, with its own status."""
    kind = str(error.get("type") or "upstream_error")
    code = error.get("code")
    status = code if isinstance(code, int) and not isinstance(code, bool) else None
    if status is None and isinstance(code, str) and code.isdigit():
        status = int(code)
    if status is None or not httpx.codes.is_error(status):
        status = _STATUS_OF_TYPE.get(kind.lower(), 502)
    if status in _OWN_CREDENTIALS:
        status = 502
    message = str(error.get("message") or "The engine refused the request.")
    return UpstreamRefusalError(
        status, message, kind=kind, code=code if isinstance(code, str) else "upstream_error"
    )


def _is_shaped(body: bytes) -> bool:
    document = _object(body)
    return isinstance(document.get("error"), dict) and "message" in document["error"]


def _shape(status: int, body: bytes) -> ProxyError:
    """Return an error for a body. SGLang and FastAPI servers may nest nothing:
    ``{"object": "error", "message": …}``."""
    document = _object(body)
    if isinstance(document.get("error"), dict):
        document = document["error"]
    message = document.get("message") or document.get("detail") or document.get("error")
    text = message if isinstance(message, str) else f"The engine answered with status {status}."
    client_fault = status < httpx.codes.INTERNAL_SERVER_ERROR
    kind = "invalid_request_error" if client_fault else "upstream_error"
    return UpstreamRefusalError(status, text, kind=kind, code="upstream_error")


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
