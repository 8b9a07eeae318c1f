"""Failed handshakes with clients: the reason, for the client and for the operator.

Both loops close a connection whose handshake fails without the alert that OpenSSL has prepared for
the client.
"""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import suppress
from contextvars import ContextVar
from time import time
from typing import Any

from ..model.tls import TlsRefusal

ACCEPTED: ContextVar[socket.socket | None] = ContextVar("leyline_accepted", default=None)
"""The socket of the handshake that a task makes."""

_NOT_VALID_YET, _EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_REASONS = {
    "HTTP_REQUEST": TlsRefusal.PLAIN_HTTP,
    "HTTPS_PROXY_REQUEST": TlsRefusal.PLAIN_HTTP,
    # Methods that OpenSSL doesn't know, and anything else that isn't TLS.
    "WRONG_VERSION_NUMBER": TlsRefusal.PLAIN_HTTP,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": TlsRefusal.NO_CERTIFICATE,
}


def _https_only() -> bytes:
    message = "This port speaks TLS. Begin the URL with https://."
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "tls_required",
    }
    body = json.dumps({"error": error}).encode()
    return (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


_HTTPS_ONLY = _https_only()


def refusal_of(error: BaseException) -> TlsRefusal:
    """Return the reason of a failed handshake."""
    if isinstance(error, TimeoutError):
        return TlsRefusal.TIMEOUT
    if isinstance(error, ssl.SSLCertVerificationError):
        outdated = error.verify_code in (_NOT_VALID_YET, _EXPIRED)
        return TlsRefusal.EXPIRED if outdated else TlsRefusal.UNTRUSTED
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason and "_ALERT_" in reason:
        return TlsRefusal.BY_CLIENT
    return _REASONS.get(reason or "", TlsRefusal.OTHER)


class RefusingContext(ssl.SSLContext):
    """A context whose connections give the client the reason when their handshake fails.

    The task that makes the handshake sets :data:`ACCEPTED`.
    """

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Return a connection's TLS."""
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if isinstance(made, _Refusing):
            made.outgoing, made.accepted = outgoing, ACCEPTED.get()
        return made


class _Refusing(ssl.SSLObject):
    outgoing: ssl.MemoryBIO
    accepted: socket.socket | None = None

    def do_handshake(self) -> None:
        """Take the next step."""
        try:
            super().do_handshake()
            if self.session_reused:
                _check_time(self.getpeercert())
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            plain = refusal_of(error) is TlsRefusal.PLAIN_HTTP
            words = _HTTPS_ONLY if plain else self.outgoing.read()
            if self.accepted is not None and words:
                with suppress(OSError):  # the client has left, or reads nothing
                    self.accepted.send(words)
            raise


def _check_time(certificate: Any) -> None:
    """Check the certificate of a resumed session, which OpenSSL doesn't verify again.

    OP_NO_TICKET leaves TLS 1.2 its session ids, and Python has no setting for those. The failed
    handshake takes the session out of OpenSSL's cache.

    Raises:
        ssl.SSLCertVerificationError: it has expired.
    """
    if certificate and ssl.cert_time_to_seconds(certificate["notAfter"]) < time():
        error = ssl.SSLCertVerificationError("the certificate of a resumed session has expired")
        error.verify_code = _EXPIRED
        raise error


RefusingContext.sslobject_class = _Refusing
