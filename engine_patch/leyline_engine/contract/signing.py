"""Signed envelopes: the engine acts only on the proxy's.

A client can put anything into a request; the proxy removes what a client must not send, and signs
its own envelope. The signature covers message id, protocol version and every action.
"""

from __future__ import annotations

import hmac

import msgspec

from .envelope import Envelope


def _signature(envelope: Envelope, secret: str) -> str:
    bare = msgspec.structs.replace(envelope, signature="")
    message = msgspec.json.encode(bare, order="deterministic")
    return hmac.new(secret.encode(), message, "sha256").hexdigest()


def sign_envelope(envelope: Envelope, secret: str) -> Envelope:
    """Return the envelope with its HMAC-SHA256 under ``secret``, in hexadecimal."""
    return msgspec.structs.replace(envelope, signature=_signature(envelope, secret))


def is_signed(envelope: Envelope, secret: str) -> bool:
    """Return True if ``secret`` gives the envelope's signature; takes constant time."""
    # As bytes: compare_digest refuses text that isn't ASCII.
    given = envelope.signature.encode("utf-8", "surrogatepass")
    return hmac.compare_digest(given, _signature(envelope, secret).encode())


def sign_bytes(body: bytes, secret: str) -> str:
    """Return the HMAC-SHA256 of a message's bytes under ``secret``, in hexadecimal."""
    return hmac.new(secret.encode(), body, "sha256").hexdigest()


def is_signature_of(given: str, body: bytes, secret: str) -> bool:
    """Return True if :func:`sign_bytes` gives ``given``; takes constant time."""
    wanted = sign_bytes(body, secret).encode()
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted)
