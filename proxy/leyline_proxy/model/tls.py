"""The sides of TLS connections, and the reasons for which a handshake with a client fails."""

from __future__ import annotations

from enum import StrEnum


class TlsSide(StrEnum):
    """The peers of a proxy."""

    CLIENTS = "clients"
    ENGINES = "engines"


class TlsRefusal(StrEnum):
    """One reason."""

    NO_CERTIFICATE = "no_certificate"
    EXPIRED = "expired"
    """The client's certificate has expired, or isn't valid yet."""
    UNTRUSTED = "untrusted"
    """The client's certificate is of another authority, or not for clients."""
    BY_CLIENT = "by_client"
    """The client doesn't trust the proxy's certificate."""
    PLAIN_HTTP = "plain_http"
    TIMEOUT = "timeout"
    BUSY = "busy"
    """Too many handshakes were under way."""
    OTHER = "other"
    """The client left, or both have no version or cipher in common."""
