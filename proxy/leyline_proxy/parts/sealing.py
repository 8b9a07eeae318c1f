"""Encryption of entries, bound to tenant, session, address and time.

::

    length of the first | facts or mark, sealed | text, sealed

Each part is sealed by :class:`~leyline_proxy.sessions.redis.sealing.Seal` with a key of its own,
made from the secret, the owner and the entry's name: an entry that is moved or renamed doesn't
open. Without secrets, which only a store in memory may lack, nothing is encrypted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from secrets import token_hex

import msgspec

from ..model.parts import PartFacts, StoredPart
from ..sessions.redis.sealing import Seal, owner_of
from .limits import Owner
from .marks import Mark
from .names import Shelf

_DOMAIN = "leyline evicted text at rest 1"
_LENGTH = 4

HEAD_BYTES = 4096
"""Bytes of an entry that hold the facts of nearly every one."""


class PartSeal:
    """Names, closes and opens entries.

    Args:
        secrets: the first one closes and names, all open and find.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._seal = Seal(secrets, _DOMAIN)
        self._namer = self._seal if secrets else Seal((token_hex(32),), _DOMAIN)

    def shelves(self, owner: Owner) -> tuple[Shelf, ...]:
        """Return a session's shelves, one by each secret; what is new goes to the first."""
        tenants = self._namer.tags("tenant", owner[0])
        return (*zip(tenants, self._namer.tags("session", *owner), strict=True),)

    def tenants(self, tenant: str) -> tuple[str, ...]:
        """Return a tenant's hashes, one by each secret."""
        return self._namer.tags("tenant", tenant)

    def tags(self, owner: Owner, address: str) -> tuple[str, ...]:
        """Return an address's hashes, one by each secret."""
        return self._namer.tags("address", *owner, address)

    def close_part(self, owner: Owner, name: str, part: StoredPart) -> bytes:
        """Return the entry of a text."""
        # Names of tools may have lone surrogates, which only this encoding takes.
        facts = json.dumps(msgspec.to_builtins(part.facts)).encode()
        head = self._seal.close(facts, _place(owner, name, b"facts"))
        text = part.text.encode("utf-8", "surrogatepass")
        sealed = self._seal.close(text, _place(owner, name, b"text"))
        return len(head).to_bytes(_LENGTH, "little") + head + sealed

    def open_facts(self, owner: Owner, name: str, entry: bytes) -> PartFacts | None:
        """Return the facts of an entry, or of its beginning; None if it doesn't open."""
        facts = self._seal.open(entry[_LENGTH : head_end(entry)], _place(owner, name, b"facts"))
        if facts is None:
            return None
        try:
            return msgspec.convert(json.loads(facts), PartFacts)
        except (ValueError, msgspec.ValidationError):
            return None

    def open_part(self, owner: Owner, name: str, entry: bytes) -> StoredPart | None:
        """Return the text of an entry; None if it doesn't open."""
        facts = self.open_facts(owner, name, entry)
        text = self._seal.open(entry[head_end(entry) :], _place(owner, name, b"text"))
        if facts is None or text is None:
            return None
        values = {field: getattr(facts, field) for field in PartFacts.__struct_fields__}
        return StoredPart(**values, text=text.decode("utf-8", "surrogatepass"))

    def close_mark(self, owner: Owner, name: str, mark: Mark) -> bytes:
        """Return the entry of a mark."""
        return self._seal.close(mark.encoded(), _place(owner, name, b"mark"))

    def open_mark(self, owner: Owner, name: str, entry: bytes) -> Mark | None:
        """Return a mark; None if it doesn't open."""
        data = self._seal.open(entry, _place(owner, name, b"mark"))
        return Mark.decoded(data) if data is not None else None


def head_end(entry: bytes) -> int:
    """Return the end of the facts in a text's entry."""
    return _LENGTH + int.from_bytes(entry[:_LENGTH], "little")


def _place(owner: Owner, name: str, section: bytes) -> bytes:
    raw = owner_of(*owner)
    return b"".join((section, b"\0", name.encode(), b"\0", raw))
