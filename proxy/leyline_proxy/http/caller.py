"""The tenant that sends a request: by its key or token, or by its connection's certificate."""

from __future__ import annotations

from asyncio import BaseTransport
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from ..tenants import Tenant
from ..tls.peers import names_of
from ..wiring.services import Services

READS = frozenset({"GET", "HEAD"})
"""Methods that change nothing."""

CERTIFICATE = "leyline.certificate"
"""Member of the scope: the names in the client's certificate; None if it showed none."""


def certificate_names(transport: BaseTransport) -> tuple[str, ...] | None:
    """Return the names in the certificate of a connection's client; None if it showed none."""
    secured: Any = transport.get_extra_info("ssl_object")
    certificate = secured.getpeercert() if secured is not None else None
    return names_of(certificate) if certificate else None


async def caller_of(services: Services, connection: HTTPConnection) -> Tenant:
    """Return the tenant of a request.

    Raises:
        UnauthorizedError, ForbiddenError: it has none.
        KeysGoneError: its token can't be checked now.
        AuditUnavailableError: it may change something, which can't be recorded now.
    """
    names = connection.scope.get(CERTIFICATE)
    if names is not None and _from_another_site(connection.headers):
        # A browser shows its certificate for the page of any site.
        names = None
    tenant = await services.tenants.identify(connection.headers, names)
    if connection.scope.get("method") not in READS:
        services.audit.check()
    return tenant


def _from_another_site(headers: Headers) -> bool:
    """Return True if a web page of another site may have sent the request."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        return True
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
