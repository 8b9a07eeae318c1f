"""Encryption of manifests, bound to tenant, model and tokenizer.

::

    LYWS 1 | key's name | tenant's tag | engine's tag | nonce | AES-256-GCM

A manifest's tags are in its name, too, and are keyed hashes: a folder shows no tenant and no model.
The whole header is associated data, and the file's own key depends on the tags: a manifest that is
renamed, or gets another's header, doesn't open.
"""

from __future__ import annotations

import hmac
import os
import re

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .runs import Group, ManifestError, Outcome

SUFFIX = ".warm"
_MAGIC = b"LYWS\x01"
_ID_BYTES, _TAG_BYTES, _NONCE_BYTES, _KEY_BYTES, _GCM_BYTES = 4, 8, 12, 32, 16
_HEADER_BYTES = len(_MAGIC) + _ID_BYTES + 2 * _TAG_BYTES + _NONCE_BYTES
OVERHEAD = _HEADER_BYTES + _GCM_BYTES
"""Bytes of a manifest beside its content."""

NAME = re.compile(rf"[0-9a-f]{{{2 * _TAG_BYTES}}}-[0-9a-f]{{{2 * _TAG_BYTES}}}\{SUFFIX}")
"""Form of a manifest's name."""


class ManifestSeal:
    """Closes and opens manifests with keys made from one secret (HKDF-SHA256)."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._id = self._derived(b"name")[:_ID_BYTES]
        self._tag_key = self._derived(b"tags")

    def name(self, group: Group) -> str:
        """Return the name of a manifest."""
        tenant, engine = self._tags(group)
        return f"{tenant.hex()}-{engine.hex()}{SUFFIX}"

    def close(self, content: bytes, group: Group) -> bytes:
        """Return the encrypted manifest."""
        tags = b"".join(self._tags(group))
        nonce = os.urandom(_NONCE_BYTES)
        header = b"".join((_MAGIC, self._id, tags, nonce))
        return header + AESGCM(self._derived(b"file\0" + tags)).encrypt(nonce, content, header)

    def open(self, data: bytes, name: str) -> bytes:
        """Return the content of a manifest.

        Args:
            name: of its file.

        Raises:
            ManifestError: damaged, renamed, or closed with another secret.
        """
        if len(data) < OVERHEAD or not data.startswith(_MAGIC):
            raise ManifestError(Outcome.CORRUPT)
        header, sealed = data[:_HEADER_BYTES], data[_HEADER_BYTES:]
        rest = header[len(_MAGIC) :]
        if rest[:_ID_BYTES] != self._id:
            raise ManifestError(Outcome.WRONG_KEY)
        tags = rest[_ID_BYTES:-_NONCE_BYTES]
        tenant, _, engine = name.removesuffix(SUFFIX).partition("-")
        if tags[:_TAG_BYTES].hex() != tenant:
            raise ManifestError(Outcome.OTHER_TENANT)
        if tags[_TAG_BYTES:].hex() != engine:
            raise ManifestError(Outcome.OTHER_MODEL)
        try:
            cipher = AESGCM(self._derived(b"file\0" + tags))
            return cipher.decrypt(rest[-_NONCE_BYTES:], sealed, header)
        except InvalidTag as error:
            raise ManifestError(Outcome.CORRUPT) from error

    def check(self, group: Group, name: str) -> None:
        """Check that an opened manifest is the one that its name promises.

        Raises:
            ManifestError: it isn't.
        """
        if self.name(group) != name:
            raise ManifestError(Outcome.OTHER_TENANT)

    def _tags(self, group: Group) -> tuple[bytes, bytes]:
        return self._tag(group.tenant), self._tag(*group.identity)

    def _tag(self, *parts: str) -> bytes:
        digest = hmac.new(self._tag_key, digestmod="sha256")
        for part in (str(len(parts)), *parts):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.digest()[:_TAG_BYTES]

    def _derived(self, purpose: bytes) -> bytes:
        info = b"leyline warm start 1\0" + purpose
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(
            self._secret
        )
