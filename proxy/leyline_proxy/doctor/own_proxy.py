"""A proxy of these settings that runs on this machine, and requests to it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress

import httpx
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificates

from ..settings import Settings
from ..tls.peers import checked_peer


class OtherCertificateError(ssl.SSLCertVerificationError):
    """The peer's certificate isn't that of ``tls_cert``."""


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
    own = b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # its signer, name and time don't matter
    # Files that don't serve are a finding of their own; then no connection succeeds.
    with suppress(OSError, ValueError):
        own = load_pem_x509_certificates(settings.tls_cert.read_bytes())[0].public_bytes(
            Encoding.DER
        )
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    context.sslobject_class = _with(own)
    return context


def _with(own: bytes) -> type[ssl.SSLObject]:
    """Return connections that end the handshake unless the peer's certificate is ``own``, in
    DER."""

    def check(connection: ssl.SSLObject) -> None:
        if connection.getpeercert(binary_form=True) != own:
            raise OtherCertificateError("its certificate isn't that of tls_cert")

    return checked_peer(check)


def _reachable_at(host: str) -> str:
    """Return the host part of a URL for what listens on ``host``."""
    there = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{there}]" if ":" in there else there
