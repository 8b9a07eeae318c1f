"""The errors that reach a caller, split by whose fault they are.

The HTTP layer renders each as an OpenAI-shaped JSON error. No message ever holds prompt text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ProxyError(Exception):
    """A failure with a status, a stable code and, where one field is to blame, its name."""

    status = 500
    kind = "api_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Extra response headers."""
        return {}


class BadRequestError(ProxyError):
    """The caller's request can't be understood; ``param`` names the field."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"


class BodyTooLargeError(BadRequestError):
    """The request body exceeds the configured limit."""

    status = 413
    code = "request_too_large"


class UnauthorizedError(ProxyError):
    """No API key, or one that belongs to no tenant."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class ForbiddenError(ProxyError):
    """The tenant may not do this."""

    status = 403
    kind = "permission_error"
    code = "forbidden"


class NotFoundError(ProxyError):
    """A model, session or page that doesn't exist (for this tenant)."""

    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class UnsupportedError(ProxyError):
    """What was asked for can't be done with this engine."""

    status = 501
    kind = "invalid_request_error"
    code = "unsupported"


class UpstreamUnreachableError(ProxyError):
    """The engine can't be reached, or it broke off before it answered."""

    status = 502
    kind = "upstream_error"
    code = "upstream_unreachable"


class UpstreamTimeoutError(ProxyError):
    """The engine didn't answer in time."""

    status = 504
    kind = "upstream_error"
    code = "upstream_timeout"


class UpstreamRefusalError(ProxyError):
    """The engine answered a stream with an error event instead of a first token."""

    kind = "upstream_error"
    code = "upstream_error"

    def __init__(self, status: int, message: str, *, kind: str, code: str | None) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.kind = kind


class ClientDisconnected(Exception):  # noqa: N818 - an event of the connection, nobody's fault
    """The caller went away before its answer was complete."""


def closest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known names, or all of them when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return "Did you mean " + " or ".join(repr(item) for item in near) + "?"
    return "Known: " + (", ".join(repr(item) for item in names[:20]) or "none") + "."
