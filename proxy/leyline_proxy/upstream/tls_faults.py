"""Failures of TLS in a client's errors, in words."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import aiohttp
import httpx

BROKE_OFF = "the body broke off"
"""The text of an error after the beginning of an answer."""

_BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


def tls_problem(error: BaseException) -> str:
    """Return the reason that TLS with an engine failed; empty if it wasn't TLS.

    The text holds no name of a certificate: callers see it.
    """
    for each in _chain(error):
        if isinstance(each, aiohttp.ClientError):
            continue  # it is one of ssl's errors without what that says
        if isinstance(each, ssl.SSLCertVerificationError):
            why = getattr(each, "verify_message", "") or str(each.args[-1])
            # Host names follow the reason.
            return f"the proxy refuses its certificate: {why.partition(',')[0]}"
        if isinstance(each, ssl.SSLError):
            reason = (each.reason or "no reason given").lower().replace("_", " ")
            if "alert" in reason:
                return f"it refuses the proxy's certificate or TLS version: {reason}"
            return f"TLS failed: {reason}"
    if isinstance(error, _BROKEN) and _is_secured(error) and str(error) != BROKE_OFF:
        # Many servers, uvicorn among them, give no reason when they refuse a certificate.
        return "it closed the connection; it may refuse the proxy's certificate, or its lack of one"
    return ""


def _is_secured(error: httpx.RequestError) -> bool:
    try:
        return error.request.url.scheme == "https"
    except RuntimeError:  # a transport may raise it without its request
        return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # aiohttp keeps the original in attributes.
        for name in ("certificate_error", "os_error"):
            inner = getattr(error, name, None)
            if isinstance(inner, BaseException):
                yield inner
        error = error.__cause__ or error.__context__
