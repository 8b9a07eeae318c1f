"""A turn's working set: the texts that a request needs in its prompt, and those that it excludes.

A *piece* is a text of the session that has an address: a message of the client's list, or a part
that a policy evicted and that the store keeps. See ``docs/concepts/working-set.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import msgspec

from .parts import PartFacts

ADDRESS_PREFIX = "sha256:"
ADDRESS_DIGITS = 32
"""Number of digits in a stored address; further digits of a selector aren't compared."""

MAX_PIECES = 1024
"""Largest number of pieces that one request's selectors may bring into its reports."""

Extent = tuple[int, int]
"""Half-open range of the prompt's tokens."""

SelectorKind = Literal["address", "tag", "tool"]


class Selector(msgspec.Struct, frozen=True):
    """Pieces that a request names together."""

    kind: SelectorKind
    value: str
    """Name of the tag or tool; of an address, ``sha256:`` and its first digits, at most 32."""


class Treatment(StrEnum):
    """The effect of policies, the caller's edits and the session's verdicts on a message."""

    WHOLE = "whole"
    """It is sent as the client has it."""
    EVICTED = "evicted"
    """An edit that amortizes left a stub with an address in its place."""
    DROPPED = "dropped"
    """An edit that amortizes removed or shortened it, and left no address."""
    FORGOTTEN = "forgotten"
    """An edit that forgets concerns it."""
    QUARANTINED = "quarantined"
    """It is in quarantine."""


FORBIDDEN = frozenset({Treatment.FORGOTTEN, Treatment.QUARANTINED})
"""Treatments that no working set undoes."""


class ContextPiece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message of the client's list."""

    client_index: int
    role: str
    tool: str = ""
    """Name of the tool whose result it is; empty if it is none's."""
    tags: tuple[str, ...] = ()
    tokens: int
    """Approximate number of its tokens."""
    address: str | None = None
    """Address of its text; None if it has none."""
    treatment: Treatment = Treatment.WHOLE
    part: str | None = None
    """Address in the stub, for an evicted message: that of its own text, or of a run of messages
    that one stub replaces; the neighbours in the run then have the same."""
    policy: str = ""
    """Name of the policy that changed it."""

    def __post_init__(self) -> None:
        if (self.treatment is Treatment.EVICTED) != (self.part is not None):
            raise ValueError("an evicted message has a part, and no other has")


@dataclass(frozen=True, slots=True)
class PieceCatalogue:
    """The pieces of a session, as far as a turn may know them.

    Nothing of another session belongs here, so an address of one is like any unknown address.
    """

    messages: tuple[ContextPiece, ...]
    """The client's list, whole and in order."""
    parts: tuple[PartFacts, ...] = ()
    """Parts in the store, oldest first."""
    forgotten: frozenset[str] = frozenset()
    """Addresses of parts that a forget removed."""
    problem: str | None = None
    """The reason that the store can't be read; None if it was."""
    present: frozenset[str] = frozenset()
    """Addresses of texts that earlier recalls put back and that the prompt still has."""
    forgets: bool = False
    """True if this turn demands a forget: it reaches whatever the store has, so none of that is
    appended."""

    def __post_init__(self) -> None:
        if any(each.client_index != at for at, each in enumerate(self.messages)):
            raise ValueError("messages must be the client's list, whole and in order")


class PieceVerdict(StrEnum):
    """The outcome for a piece that a request names."""

    HIT = "hit"
    """It is in the prompt, and its KV was resident: prefix, spliced or reused."""
    FAULT = "fault"
    """It is in the prompt; its text came from the store, and its KV had to be made."""
    RECOMPUTE = "recompute"
    """It is in the prompt; its text is in the client's own list, and it was prefilled again."""
    REFUSE = "refuse"
    """It isn't allowed."""
    ABSTAIN = "abstain"
    """It isn't known, doesn't fit, or can't be looked up now."""


class PieceCause(StrEnum):
    """The reason for a refusal or an abstention."""

    FORGOTTEN = "forgotten"
    """An edit that forgets concerns it, or removed it before."""
    QUARANTINED = "quarantined"
    """It is in quarantine."""
    POLICY = "policy"
    """A policy removed it without an address, so nothing brings it back."""
    TENANT = "tenant"
    """The tenant has no recall."""
    EXCLUDED = "excluded"
    """The request itself excludes it."""
    INSTRUCTIONS = "instructions"
    """Instructions can't be excluded."""
    LAST_USER = "last_user"
    """The user's last message can't be excluded."""
    UNKNOWN = "unknown"
    """Nothing of this session answers to the selector."""
    MALFORMED = "malformed"
    """It is no address."""
    AMBIGUOUS = "ambiguous"
    """The digits are the beginning of several addresses."""
    OVER_BUDGET = "over_budget"
    """It doesn't fit into the rest of the budget."""
    TOO_LARGE = "too_large"
    """It alone exceeds the proxy's limit, whatever budget the request names."""
    STORE_DOWN = "store_down"
    """The store can't be read now."""
    REPEATED = "repeated"
    """Selectors before it name all that it names."""
    LIMIT = "limit"
    """The selectors name too many pieces."""


class PieceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one piece, or on a selector that names none; without text."""

    selector: str
    """The first selector that names it, as in ``need[2]``."""
    verdict: PieceVerdict
    cause: PieceCause | None = None
    """None for a piece in the prompt."""
    address: str | None = None
    """None for a message without text, and for a selector that names nothing."""
    messages: tuple[int, ...] = ()
    """Its indices in the client's list; none if it came from the store."""
    tokens: int = 0
    """Number of its tokens: approximate until its place in the prompt is known."""
    price_tokens: int = 0
    """Number of tokens prefilled for it, or that would be if it fitted."""

    def document(self) -> dict[str, Any]:
        """Return the report for the account."""
        return {
            "selector": self.selector,
            "verdict": self.verdict.value,
            "cause": self.cause.value if self.cause is not None else None,
            "address": self.address,
            "messages": list(self.messages),
            "tokens": self.tokens,
            "price_tokens": self.price_tokens,
        }


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The changes that a turn's ``need`` and ``exclude`` make to its messages."""

    restore: tuple[int, ...] = ()
    """Indices in the client's list of evicted messages that are sent after all, ascending."""
    append: tuple[str, ...] = ()
    """Addresses of parts that are only in the store, in order of need."""
    evict: tuple[int, ...] = ()
    """Indices in the client's list of messages whose text leaves, ascending. Role, calls and ids
    stay, so that calls and results stay paired."""
    reports: tuple[PieceReport, ...] = ()
    """One for each needed piece, in order of need; at least one for each selector. Until
    :func:`~leyline_proxy.edits.working_set.settled`, a piece in the prompt is a HIT, one to be
    restored a RECOMPUTE, and one to be appended a FAULT."""
    refusals: tuple[PieceReport, ...] = ()
    """Reports on exclusions without effect."""
    spent_tokens: int = 0
    """Tokens of the pieces to be restored and appended; at most ``budget_tokens``."""
    budget_tokens: int = 0
    """The request's budget, or the proxy's limit if that is less."""


def joined_extents(extents: Iterable[Extent]) -> list[Extent]:
    """Return the same tokens as disjoint extents, sorted; empty extents are left out."""
    joined: list[Extent] = []
    for start, end in sorted(extents):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
