"""The chain: each line of the log names the line before it and is sealed by a hash. Pure.

A line is a JSON object whose first members are ``seq`` and ``prev`` and whose last is ``hash``::

    {"seq":7,"prev":"…","time":"…","kind":"turn",…,"hash":"…"}

``hash`` covers the bytes of the line before ``,"hash"``, so no canonical form of JSON is needed.
With a key it is an HMAC: without the key, a changed line can't be sealed again.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

GENESIS = "0" * 64
"""``prev`` of the first line."""

_HASH_MEMBER = b',"hash":"'
_END = b'"}'
_TAIL = len(_HASH_MEMBER) + 64 + len(_END)

_DIGEST_CHARS = 32
"""Length of the hashes of texts: 128 bits."""


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a chain."""

    seq: int = 0
    hash: str = GENESIS


@dataclass(frozen=True, slots=True, repr=False)
class AuditKey:
    """Values derived from the operator's secret: keys for lines, texts and proofs, and a name."""

    lines: bytes
    texts: bytes
    id: str
    """Identifies the key in the log without revealing it."""
    proofs: bytes = b""

    @classmethod
    def derive(cls, secret: str) -> AuditKey:
        """Return the keys of a secret."""
        raw = secret.encode()
        lines, texts, name, proofs = (
            hmac.digest(raw, b"leyline audit " + use, "sha256")
            for use in (b"lines", b"texts", b"name", b"proofs")
        )
        return cls(lines, texts, name.hex()[:16], proofs)

    def digest(self, text: str) -> str:
        """Return the keyed hash of a text, in the form used in records."""
        raw = text.encode("utf-8", "surrogatepass")
        return hmac.digest(self.texts, raw, "sha256").hex()[:_DIGEST_CHARS]


def key_id(key: AuditKey | None) -> str | None:
    """Return the key's name; None for no key."""
    return None if key is None else key.id


def seal(head: Head, record: Mapping[str, Any], key: AuditKey | None) -> tuple[bytes, Head]:
    """Return the line of ``record`` after ``head``, with its newline, and the new head."""
    body = msgspec.json.encode({"seq": head.seq + 1, "prev": head.hash, **record})[:-1]
    digest = line_hash(body, key)
    line = b"".join((body, _HASH_MEMBER, digest.encode(), _END, b"\n"))
    return line, Head(head.seq + 1, digest)


def line_hash(body: bytes, key: AuditKey | None) -> str:
    """Return the hash over a line's bytes before ``,"hash"``."""
    if key is None:
        return sha256(body).hexdigest()
    return hmac.digest(key.lines, body, "sha256").hex()


class Line(msgspec.Struct, frozen=True):
    """The members of a line that the chain needs."""

    seq: int
    prev: str
    kind: str
    hash: str
    key: str | None = None
    """Name of the key, in a record that begins a file or a run."""


_DECODER = msgspec.json.Decoder(Line)


def read_line(line: bytes) -> Line | None:
    """Return a line's place in the chain; None for other bytes. Checks no hash."""
    if line[-_TAIL : -_TAIL + len(_HASH_MEMBER)] != _HASH_MEMBER or not line.startswith(b'{"seq":'):
        return None
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_sealed(line: bytes, key: AuditKey | None) -> bool:
    """Return True if the hash at a line's end matches the line."""
    found = line[-_TAIL + len(_HASH_MEMBER) : -len(_END)]
    return (
        line.endswith(_END)
        and line[-_TAIL : -_TAIL + len(_HASH_MEMBER)] == _HASH_MEMBER
        and hmac.compare_digest(found, line_hash(line[:-_TAIL], key).encode())
    )
