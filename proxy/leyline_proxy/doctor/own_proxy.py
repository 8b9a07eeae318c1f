"""A proxy of these settings that runs on this machine, and requests to it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress

import httpx

from ..settings import Settings

_END = "-----END CERTIFICATE-----"


def origin_of(settings: Settings, host: str, port: int) -> str:
    """Return the URL of what listens on ``host`` and ``port``."""
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{_reachable_at(host)}:{port}"


def client_for(
    settings: Settings,
    origin: str,
    *,
    timeout_s: float = 5.0,
    headers: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """Return a client of the proxy. Over TLS, only its own certificate is taken.

    It is shown, too: where a port asks for clients' certificates, the proxy's may be of the same
    authority.
    """
    return httpx.AsyncClient(
        base_url=origin,
        headers=headers,
        timeout=timeout_s,
        trust_env=False,
        verify=_context(settings),
    )


def _context(settings: Settings) -> ssl.SSLContext | bool:
    if settings.tls_cert is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is called by its address on this machine
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Files that don't serve are a finding of their own; then no connection succeeds.
    with suppress(OSError, ValueError):
        chain = settings.tls_cert.read_text(encoding="ascii")
        # Of a chain, the others may have signed certificates for anybody.
        context.load_verify_locations(cadata=chain[: chain.index(_END) + len(_END)])
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    return context


def _reachable_at(host: str) -> str:
    """Return the host part of a URL for what listens on ``host``."""
    there = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{there}]" if ":" in there else there
