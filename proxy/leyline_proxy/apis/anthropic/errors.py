"""Error documents in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...overflow import Overflow

ANTHROPIC_VERSION = "anthropic-version"
"""Header of clients of the API."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_SERVER_FAULT = 500


def error_type(status: int) -> str:
    """Return Anthropic's ``error.type`` for an HTTP status."""
    return _TYPES.get(status, "api_error" if status >= _SERVER_FAULT else "invalid_request_error")


def too_long(overflow: Overflow, message: str) -> str:
    """Return the text for a prompt that is too long, in the API's own words.

    Clients read the figures from it. Some ask for a shorter answer if that is enough.

    Args:
        message: the error's text in other words; kept if figures are missing.
    """
    prompt, limit, answer = overflow.prompt, overflow.limit, overflow.answer
    if prompt is None or limit is None:
        return f"prompt is too long. {message}"
    text = f"prompt is too long: {overflow.total} tokens > {limit} maximum"
    if answer is None:
        return text
    return (
        f"{text} (input length and `max_tokens` exceed context limit: {prompt} + {answer} > "
        f"{limit}, decrease input length or `max_tokens` and try again)"
    )


def error_document(
    status: int,
    message: str,
    *,
    request_id: str,
    account: Mapping[str, Any],
    code: str | None = None,
) -> dict[str, Any]:
    """Return the body of an error, or the data of an ``error`` event.

    Args:
        code: the ``error_code`` of its ``details``, if it has any.
        account: the extra member ``leyline``, with facts that the shape has no place for.
    """
    details = {} if code is None else {"details": {"error_code": code}}
    return {
        "type": "error",
        "error": {"type": error_type(status), "message": message, **details},
        "request_id": request_id,
        "leyline": dict(account),
    }
