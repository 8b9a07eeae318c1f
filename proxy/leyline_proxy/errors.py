"""The errors that reach a caller, grouped by the party at fault.

The HTTP layer renders each as an OpenAI-style JSON error. No message ever holds prompt text.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .overflow import Overflow


class ProxyError(Exception):
    """A failure with a status, a stable code and, if one field is wrong, its name."""

    status = 500
    kind = "api_error"
    code = "internal_error"
    overflow: Overflow | None = None  # figures of a prompt that is too long
    header: tuple[str, str] | None = None
    """An extra response header."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Extra response headers."""
        return {} if self.header is None else dict([self.header])

    @property
    def members(self) -> dict[str, Any]:
        """Members of the error's JSON besides message, type, param and code."""
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
    header = ("connection", "close")  # the rest of the body may still come, and is no request


class MediaTypeError(BadRequestError):
    """The request body has an unsupported type."""

    status = 415
    code = "unsupported_media_type"


class UnauthorizedError(ProxyError):
    """No API key, or one that belongs to no tenant."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"
    header = ("www-authenticate", "Bearer")


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


class ConflictError(ProxyError):
    """The request conflicts with the current state."""

    status = 409
    kind = "invalid_request_error"
    code = "conflict"


class LimitError(ProxyError):
    """The tenant or the engine has reached a limit; ``param`` names it."""

    status = 429
    kind = "rate_limit_error"
    code = "limit"


class TryLaterError(LimitError):
    """A limit that ends with time.

    Args:
        retry_after_s: seconds until the next try.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self._retry_after_s = max(1, math.ceil(retry_after_s))

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self._retry_after_s)}


class AuditUnavailableError(TryLaterError):
    """The audit log can't be written, and what isn't recorded isn't served."""

    status = 503
    kind = "server_error"
    code = "audit_unavailable"

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"The audit log has failed: {problem}. Without it, nothing is served that changes "
            "anything (audit_on_fault). Make room on its disk, or give the proxy access to its "
            "file, which the proxy's log names; the proxy then continues by itself.",
            5.0,
        )


class RateLimitError(TryLaterError):
    """The tenant has used up its requests of this minute."""

    code = "rate_limit_exceeded"

    def __init__(self, per_minute: float, retry_after_s: float) -> None:
        super().__init__(f"More than {per_minute:g} requests per minute.", retry_after_s)


class QueueFullError(TryLaterError):
    """Too many of the tenant's requests are already waiting."""

    code = "queue_full"

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{limit} requests are already waiting, which is this tenant's limit (max_queued).",
            retry_after_s,
        )


class QueueTimeoutError(TryLaterError):
    """The request has waited for a place for as long as it may."""

    status = 503
    kind = "server_error"
    code = "queue_timeout"

    def __init__(self, waited_s: float, retry_after_s: float) -> None:
        super().__init__(
            f"No place became free within {waited_s:g} s (queue_timeout_s).", retry_after_s
        )


class ForgetsOwedError(TryLaterError):
    """Too many of the tenant's forgets wait for engines; another one would be lost."""

    status = 503
    kind = "server_error"
    code = "forgets_owed"

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{limit} sessions already wait for engines to confirm a forget (max_owed_forgets). "
            "This request demands another forget, so it was not sent.",
            retry_after_s,
        )


class PartsUnavailableError(TryLaterError):
    """The store of evicted texts is out of reach."""

    status = 503
    kind = "server_error"
    code = "parts_unavailable"

    def __init__(self) -> None:
        super().__init__("Evicted texts can't be read at the moment (recall_store).", 5.0)


class SessionStoreGoneError(TryLaterError):
    """The session store is out of reach, and what was asked for would be lost with the process."""

    status = 503
    kind = "server_error"
    code = "session_store_unavailable"

    def __init__(self) -> None:
        super().__init__("The session store can't be reached now, so nothing was done.", 5.0)


class RequestTimeoutError(ProxyError):
    """The request didn't arrive in time."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"
    header = ("connection", "close")


class UnsupportedError(ProxyError):
    """This engine doesn't support the request."""

    status = 501
    kind = "invalid_request_error"
    code = "unsupported"
    header = ("x-should-retry", "false")  # else clients retry a 501


class UpstreamFailedError(ProxyError):
    """An engine failed a request."""

    kind = "upstream_error"
    upstream: str | None = None
    """Name of the engine, once it is known."""

    def blame(self, upstream: str) -> None:
        """Name the engine, in the message and as a member, unless one is named already."""
        if self.upstream is None:
            self.upstream = upstream
            self.message = f"{self.message} Engine: {upstream}."

    @property
    def members(self) -> dict[str, Any]:
        return {} if self.upstream is None else {"upstream": self.upstream}


class UpstreamUnreachableError(UpstreamFailedError):
    """The engine can't be reached, or it disconnected before it answered."""

    status = 502
    code = "upstream_unreachable"


class UpstreamBusyError(UpstreamUnreachableError):
    """All connections to the engine are in use; it may be healthy."""

    status = 503
    code = "upstream_busy"


class UpstreamTimeoutError(UpstreamFailedError):
    """The engine didn't answer in time."""

    status = 504
    code = "upstream_timeout"


class AnswerTooLargeError(UpstreamFailedError):
    """The engine's answer, or an event of it, is too long. No other engine is asked: its answer
    would be just as long."""

    status = 502
    code = "upstream_answer_too_large"


class UpstreamRefusalError(ProxyError):
    """The engine answered a stream with an error event instead of a first token."""

    kind = "upstream_error"
    code = "upstream_error"

    def __init__(self, status: int, message: str, *, kind: str, code: str | None) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.kind = kind


class RefusedByClaimError(ProxyError):
    """A request that doesn't fit beside hard claims.

    Args:
        own: ids of the claims in its way that are the caller's tenant's.
        others: number of claims of other tenants.
        retry_after_ms: time until deadlines alone make room; None if it takes a release.
        headers: extra response headers.
    """

    status = 503
    kind = "server_error"
    code = "refused_by_claim"

    def __init__(
        self,
        own: Sequence[str],
        others: int,
        retry_after_ms: int | None,
        headers: Mapping[str, str],
    ) -> None:
        self._own, self._others = tuple(own), others
        self._wait_s = None if retry_after_ms is None else max(1, math.ceil(retry_after_ms / 1000))
        self._headers = dict(headers)
        blocking = [_own_claims(self._own)] if own else []
        blocking += [f"{others} of other tenants"] if others else []
        way_out = (
            "Release a claim, or make one shorter."
            if self._wait_s is None
            else f"Retry after {self._wait_s} s, when claims have expired, or release one."
        )
        super().__init__(
            "The request doesn't fit into the KV cache beside hard claims. In its way: "
            f"{' and '.join(blocking) or 'claims'}. {way_out}"
        )

    @property
    def headers(self) -> dict[str, str]:
        if self._wait_s is None:
            return self._headers
        return {**self._headers, "retry-after": str(self._wait_s)}

    @property
    def members(self) -> dict[str, Any]:
        return {"claims": list(self._own), "other_claims": self._others}


class PolicyFailedClosedError(ProxyError):
    """A policy that removes content that must not reach the model failed; nothing was sent.

    Args:
        policy: the policy's name.
        fault: its fault.
    """

    status = 502
    code = "policy_failed_closed"
    header = ("x-should-retry", "false")  # else clients retry, and fail again

    def __init__(self, policy: str, fault: str) -> None:
        self._faults = [{"policy": policy, "fault": fault}]
        super().__init__(
            f"The policy {policy} failed ({fault}). It removes content that must not reach the "
            "model, so the request wasn't sent. The operator can change this with on_fault: skip.",
            param=policy,
        )

    @property
    def members(self) -> dict[str, Any]:
        return {"policy_faults": self._faults}


class ClientDisconnected(Exception):  # noqa: N818 - an event of the connection, nobody's fault
    """The caller disconnected before its answer was complete."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known names, or all of them if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return "Did you mean " + " or ".join(repr(item) for item in near) + "?"
    return "Known: " + (", ".join(repr(item) for item in names[:20]) or "none") + "."


_NAMED_CLAIMS = 8


def _own_claims(ids: Sequence[str]) -> str:
    more = len(ids) - _NAMED_CLAIMS
    named = ", ".join(ids[:_NAMED_CLAIMS])
    return f"your {named} and {more} more" if more > 0 else f"your {named}"


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the one from which each was raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
