"""Encryption of what a compaction leaves, for clients that carry it from turn to turn."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

import msgspec

from ..model.compaction import SEALED, Compacted
from .redis.sealing import Seal, owner_of

_DOMAIN = "leyline compaction 1"
_PREFIX = f"{SEALED}1."


class _Content(msgspec.Struct, omit_defaults=True):
    summary: str
    kept: tuple[dict[str, Any], ...] = ()
    session: str | None = None


_decoder = msgspec.json.Decoder(_Content)


class CompactionSeal:
    """Closes and opens compactions, each bound to its tenant and model.

    Args:
        secrets: the first one closes, all open.
        own: closes and opens if there are none; random by default.
    """

    def __init__(self, secrets: Sequence[str] = (), own: str | None = None) -> None:
        self.key_origin = (
            "encrypted by session_secret"
            if secrets
            else "encrypted by a key of this process alone; set session_secret to share it"
        )
        """The origin of the key, in words."""
        self._seal = Seal(secrets or (own or token_hex(32),), _DOMAIN)

    def close(self, compacted: Compacted, *, tenant: str, model: str) -> str:
        """Return a compaction in a form that a client may carry."""
        told = _Content(compacted.summary, compacted.kept, compacted.session)
        content = msgspec.json.encode(told)
        return (
            _PREFIX + urlsafe_b64encode(self._seal.close(content, _bound(tenant, model))).decode()
        )

    def open(self, carried: str, *, tenant: str, model: str) -> Compacted | None:
        """Return a closed compaction; None if it was changed, or closed for another tenant or
        model, or with another secret."""
        if not carried.startswith(_PREFIX):
            return None
        try:
            sealed = urlsafe_b64decode(carried.removeprefix(_PREFIX).encode("ascii"))
        except (binascii.Error, UnicodeEncodeError, ValueError):
            return None
        content = self._seal.open(sealed, _bound(tenant, model))
        if content is None:
            return None
        found = _decoder.decode(content)
        return Compacted(found.summary, found.kept, found.session)


def _bound(tenant: str, model: str) -> bytes:
    return owner_of(tenant, model)
