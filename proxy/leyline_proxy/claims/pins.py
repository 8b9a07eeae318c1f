"""Pinned messages as claims: those that a turn asks for, and when to send them again. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice

from leyline_engine.contract import Claim, Predicate

from ..model.session import RetainedTurn
from ..request.annotations import Pin
from .documents import message_spans

MAX_PINS = 64
"""Largest number of pinned messages in a session."""

REASON = "pinned message"


@dataclass(frozen=True, slots=True)
class WantedPin:
    """A pinned message in a turn that the engine retains."""

    terms: Pin
    predicate: Predicate
    place: str
    """Equal for two turns exactly if the span's KV is the same."""

    def claim(self, key: str, tenant: str, session: str, revision: int) -> Claim:
        """Return the claim that keeps the message."""
        return Claim(
            id=key,
            tenant=tenant,
            session=session,
            kind=self.terms.kind,
            predicate=self.predicate,
            priority=self.terms.priority,
            ttl_s=self.terms.ttl_s,
            revision=revision,
            reason=REASON,
        )


@dataclass(frozen=True, slots=True)
class HeldPin:
    """The last request to the engine for a pinned message."""

    wanted: WantedPin
    revision: int
    sent_at: float
    """Seconds of some clock."""

    def is_due(self, wanted: WantedPin, now: float) -> bool:
        """Return True if the claim must be sent again: its KV or terms have changed, or half of its
        time is over."""
        if (wanted.terms, wanted.place) != (self.wanted.terms, self.wanted.place):
            return True
        return now - self.sent_at >= self.wanted.terms.ttl_s / 2


def pin_key(session: str, message: str) -> str:
    """Return the id of a message's claim, from the session's id and the message's stable name."""
    digest = hashlib.blake2b(f"{session}\0{message}".encode(), digest_size=10)
    return f"pin-{digest.hexdigest()}"


def wanted_pins(turn: RetainedTurn, pins: Mapping[int, Pin], session: str) -> dict[str, WantedPin]:
    """Return the pinned messages of a turn that have tokens in it, by claim id.

    Args:
        pins: terms by index in the client's list; at most :data:`MAX_PINS` count.
    """
    if not pins:
        return {}
    spans = message_spans(turn)
    counted = {index: terms for index, terms in islice(pins.items(), MAX_PINS) if index in spans}
    before = _histories(turn, {spans[index][1] for index in counted})
    wanted: dict[str, WantedPin] = {}
    for index, terms in counted.items():
        start, end = spans[index]
        key = pin_key(session, turn.names.client[index].id)
        place = f"{turn.model_fingerprint}/{start}/{before[end]}"
        wanted[key] = WantedPin(terms, Predicate(turn.turn, start, end), place)
    return wanted


def _histories(turn: RetainedTurn, ends: Collection[int]) -> dict[int, str]:
    """Return digests, in one pass, of everything that the KV before each position depends on."""
    digest = hashlib.blake2b(digest_size=16)
    found: dict[int, str] = {}
    cursor = 0
    for end in sorted(ends):
        digest.update(turn.tokens[cursor:end])
        lineage = "".join(f"/{run.start}:{run.lineage}" for run in turn.lineage if run.start < end)
        found[end] = f"{digest.hexdigest()}{lineage}"
        cursor = end
    return found
