"""Signed envelopes: the engine acts only on what the proxy sent.

A client can put anything into a request; the proxy removes what it must not say, and signs what it
says itself. The signature covers message id, protocol version and every action.
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
    """The envelope with its HMAC-SHA256 under ``secret``, in hexadecimal."""
    return msgspec.structs.replace(envelope, signature=_signature(envelope, secret))


def is_signed(envelope: Envelope, secret: str) -> bool:
    """Whether the envelope's signature is the one that ``secret`` gives; in constant time."""
    # As bytes: compare_digest refuses text that isn't ASCII.
    given = envelope.signature.encode("utf-8", "surrogatepass")
    return hmac.compare_digest(given, _signature(envelope, secret).encode())


def sign_bytes(body: bytes, secret: str) -> str:
    """HMAC-SHA256 of a message's bytes under ``secret``, in hexadecimal."""
    return hmac.new(secret.encode(), body, "sha256").hexdigest()


def is_signature_of(given: str, body: bytes, secret: str) -> bool:
    """Whether ``given`` is what :func:`sign_bytes` gives; in constant time."""
    wanted = sign_bytes(body, secret).encode()
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted)
