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
from ..upstream.overflows import PromptTooLongError, overflow_of
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


def refusal_response(
    upstream: httpx.Response,
    body: bytes,
    headers: Mapping[str, str],
    *,
    prompt: int = 0,
    param: str = "messages",
) -> Response:
    """Return the engine's non-200 answer, with its own body if that is OpenAI-shaped and doesn't
    say in other words than OpenAI's that the prompt is too long.

    Args:
        prompt: see :func:`overflow_in`.
        param: see :func:`overflow_in`.
    """
    status = upstream.status_code
    if (error := overflow_in(status, body, prompt=prompt, param=param)) is not None:
        return error_response(error, dict(headers))
    if httpx.codes.is_error(status) and status not in _OWN_CREDENTIALS and _is_shaped(body):
        kept = {**downstream_headers(upstream.headers), **headers}
        return Response(body, status_code=status, headers=kept)
    return error_response(refusal_of_answer(status, body), dict(headers))


def refusal_of_answer(
    status: int, body: bytes, *, prompt: int = 0, param: str = "messages"
) -> ProxyError:
    """Return the engine's non-200 answer as an error with its message.

    Args:
        prompt: see :func:`overflow_in`.
        param: see :func:`overflow_in`.
    """
    if status in _OWN_CREDENTIALS:
        # The caller's key never went upstream, so a 401 would mislead the caller.
        return UpstreamUnreachableError(
            "The engine refuses the proxy's own credentials (upstream_api_key).",
            code="upstream_credentials",
        )
    if not httpx.codes.is_error(status):
        return UpstreamUnreachableError(f"The engine answered with status {status}.")
    return overflow_in(status, body, prompt=prompt, param=param) or _shape(status, body)


def overflow_in(
    status: int, body: bytes, *, prompt: int = 0, param: str = "messages"
) -> PromptTooLongError | None:
    """Return the error for an engine's refusal of a prompt that is too long; None for others.

    Args:
        prompt: tokens of the prompt as the proxy counts them; 0 if it doesn't know.
        param: the field with the prompt.
    """
    if not httpx.codes.is_error(status):
        return None
    error, reason = _told(_object(body))
    overflow = overflow_of(status, reason, error)
    if overflow is None:
        return None
    return PromptTooLongError(overflow.counted(prompt), reason, param=param)


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


def refusal_of_event(error: Mapping[str, Any], *, param: str = "messages") -> ProxyError:
    """Return the error event that an engine sent before the first token, with its own status.

    Args:
        param: see :func:`overflow_in`.
    """
    kind = str(error.get("type") or "upstream_error")
    code = error.get("code")
    status = code if isinstance(code, int) and not isinstance(code, bool) else None
    if status is None and isinstance(code, str) and code.isdigit():
        status = int(code)
    told = status is not None and httpx.codes.is_error(status)
    if status is None or not told:
        status = _STATUS_OF_TYPE.get(kind.lower(), 502)
    if status in _OWN_CREDENTIALS:
        status = 502
    message = str(error.get("message") or "The engine refused the request.")
    if (overflow := overflow_of(status if told else None, message, error)) is not None:
        return PromptTooLongError(overflow, message, param=param)
    return UpstreamRefusalError(
        status, message, kind=kind, code=code if isinstance(code, str) else "upstream_error"
    )


def _is_shaped(body: bytes) -> bool:
    document = _object(body)
    return isinstance(document.get("error"), dict) and "message" in document["error"]


def _shape(status: int, body: bytes) -> ProxyError:
    """Return an error for a body."""
    _, reason = _told(_object(body))
    client_fault = status < httpx.codes.INTERNAL_SERVER_ERROR
    kind = "invalid_request_error" if client_fault else "upstream_error"
    text = reason or f"The engine answered with status {status}."
    return UpstreamRefusalError(status, text, kind=kind, code="upstream_error")


def _told(document: Mapping[str, Any], depth: int = 2) -> tuple[Mapping[str, Any], str]:
    """Return an error's members and its reason, however deep they are.

    SGLang and vLLM may nest nothing (``{"object": "error", "message": …}``). FastAPI has a
    ``detail``: a text, a list of faults, or, of gateways, the whole answer of an engine.
    """
    for name in ("error", "message", "detail"):
        value = document.get(name)
        inner = _object(value.encode()) if isinstance(value, str) else value
        if isinstance(inner, Mapping) and inner and depth:
            return _told(inner, depth - 1)
        if isinstance(value, str) and value:
            return document, value
        if isinstance(value, list) and (faults := [*map(_fault, value)]):
            return document, "; ".join(fault for fault in faults if fault)
    return document, ""


def _fault(fault: object) -> str:
    """Return one of FastAPI's faults, without what the request had there."""
    if isinstance(fault, str):
        return fault
    if not isinstance(fault, Mapping):
        return ""
    where, text = fault.get("loc"), fault.get("msg")
    place = ".".join(map(str, where[1:] or where)) if isinstance(where, list) else ""
    return f"{place}: {text}" if place and text else str(text or "")


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
