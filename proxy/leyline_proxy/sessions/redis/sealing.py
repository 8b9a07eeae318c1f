"""Encryption of prompt text at rest. Without a key, no text is written."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_PLAIN, _SEALED = b"P", b"E"
_ID_BYTES, _NONCE_BYTES, _KEY_BYTES, _TAG_BYTES = 4, 12, 32, 16
_SESSIONS = "leyline session at rest 1"


@dataclass(frozen=True, slots=True, repr=False)
class _Key:
    name: bytes
    """Name that distinguishes several keys, and reveals nothing of the key."""
    secret: bytes


class Seal:
    """Closes and opens the stored data of sessions.

    Uses AES-256-GCM, with a separate key for every session (HKDF-SHA256 over tenant and session
    id), and those ids as associated data: a value copied to another session's place doesn't open.

    Args:
        secrets: the first one closes, all open. Without any, only data without text may be closed.
        domain: separates the keys from those that other stores make of the same secrets.
    """

    def __init__(self, secrets: Sequence[str] = (), domain: str = _SESSIONS) -> None:
        self._domain = domain.encode() + b"\0"
        self._keys = [
            _Key(self._derive(s.encode(), b"name")[:_ID_BYTES], s.encode()) for s in secrets
        ]

    @property
    def hides(self) -> bool:
        """True if closed data can't be read without a key."""
        return bool(self._keys)

    def close(self, data: bytes, owner: bytes) -> bytes:
        """Return the data in a form that may be stored."""
        if not self._keys:
            return _PLAIN + data
        key, nonce = self._keys[0], os.urandom(_NONCE_BYTES)
        sealed = AESGCM(self._derive(key.secret, owner)).encrypt(nonce, data, owner)
        return b"".join((_SEALED, key.name, nonce, sealed))

    def open(self, stored: bytes, owner: bytes) -> bytes | None:
        """Return closed data; None if it is damaged, another session's, or its key is unknown."""
        if not self._keys:
            return stored[1:] if stored.startswith(_PLAIN) else None
        # With keys, unencrypted data may have been put there by others.
        if not stored.startswith(_SEALED):
            return None
        name, rest = stored[1 : 1 + _ID_BYTES], stored[1 + _ID_BYTES :]
        for key in self._keys:
            if key.name == name:
                try:
                    cipher = AESGCM(self._derive(key.secret, owner))
                    return cipher.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], owner)
                except (InvalidTag, ValueError):
                    return None
        return None

    def tags(self, *parts: str) -> tuple[str, ...]:
        """Return names that reveal nothing of the parts, one by each secret in order."""
        raw = [part.encode("utf-8", "surrogatepass") for part in parts]
        data = b"".join(len(part).to_bytes(4, "little") + part for part in raw)
        keys = (self._derive(key.secret, b"tags") for key in self._keys)
        return tuple(hmac.digest(key, data, "sha256")[:_TAG_BYTES].hex() for key in keys)

    def _derive(self, secret: bytes, purpose: bytes) -> bytes:
        info = self._domain + purpose
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(secret)


def owner_of(tenant: str, session_id: str) -> bytes:
    """Return tenant and session as associated data, different for each pair."""
    first = tenant.encode("utf-8", "surrogatepass")
    return len(first).to_bytes(4, "little") + first + session_id.encode("utf-8", "surrogatepass")
