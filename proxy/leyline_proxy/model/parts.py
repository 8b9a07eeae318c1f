"""Texts that policies evicted from a conversation, by the address in their stubs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec


class PartFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An evicted text's provenance, without the text."""

    address: str
    """``sha256:`` and the first 32 digits of the text's SHA-256; see
    :func:`leyline_policies.recall.address_of`."""
    role: str
    """Role of the message that had it; empty for a run of several messages."""
    tool: str = ""
    """Name of the tool whose result it is; empty if it is none's."""
    tokens: int
    """Approximate number of its tokens."""
    tags: tuple[str, ...] = ()
    """Tags of the message."""
    policy: str
    """Name of the policy that evicted it."""
    turn: str
    """Name of the turn that evicted it last."""
    index: int
    """Number of that turn in its session."""
    demands: int = 0
    """Number of the session's demands to forget when that turn was planned; see
    ``Session.demands``."""
    forgets: bool = False
    """True if that turn demanded a forget itself."""
    created: float = 0.0
    """Time at which that turn was planned, in seconds since the epoch."""
    sources: tuple[str, ...] = ()
    """Addresses of the messages' whole texts that it holds, or is a piece of."""
    certain: bool = False
    """True if the session had a certain name at that turn. Else anyone may have sent it, so that
    the text is for requests whose own messages show it."""

    @property
    def level(self) -> int:
        """The session's demands after that turn. If the session has had more since, a forget
        reaches the text."""
        return self.demands + self.forgets

    def holds_any(self, addresses: Collection[str]) -> bool:
        """Return True if the text, or a message's that it comes from, has one of the addresses."""
        return any(each in addresses for each in (self.address, *self.sources))


class StoredPart(PartFacts, frozen=True, kw_only=True):
    """An evicted text."""

    text: str

    @property
    def facts(self) -> PartFacts:
        """The provenance alone."""
        values = {name: getattr(self, name) for name in PartFacts.__struct_fields__}
        return PartFacts(**values)


@dataclass(frozen=True, slots=True)
class FoundParts:
    """The state of addresses in one session; those in neither member are unknown."""

    parts: Mapping[str, StoredPart] = field(default_factory=dict)
    """Parts that can be recalled, by address."""
    forgotten: frozenset[str] = frozenset()
    """Addresses of parts that the session had, and that a forget removed."""


@dataclass(frozen=True, slots=True)
class Barred:
    """The texts that a session has forgotten for good."""

    addresses: frozenset[str] = frozenset()
    everything: bool = False
    """True if more were forgotten than it remembers, so that nothing may come back."""
    known: bool = True
    """False if the store has no mark of the session."""
