"""A claim in the book: its terms, its state, and the pages held for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_engine.contract import Claim, ClaimStatus

from .events import ClaimRequested, Run
from .protection import ClaimKey
from .runs import count
from .states import State


@dataclass(slots=True)
class ClaimEntry:
    """The book's record of one claim; the book alone changes it."""

    claim: Claim
    required: int
    """Pages that must be resident."""
    state: State = State.REQUESTED
    deadline_ms: int | None = None
    entered_ms: int = 0
    runs: tuple[Run, ...] = ()
    """Pages locked or ranked for it."""
    support: int = 0
    """Number of those pages that the predicate doesn't ask for, but depends on."""
    floor: int = 0
    """Number of pages below which the predicate fails."""
    locked: bool = False
    sources: tuple[str, ...] = ()
    """Sources of the pages that it holds."""
    hits: int = 0
    pressure: int = 0

    @property
    def key(self) -> ClaimKey:
        return self.claim.tenant, self.claim.id

    def status(self, now_ms: int, page_size: int) -> ClaimStatus:
        """Return the claim and its state."""
        deadline = self.deadline_ms
        return ClaimStatus(
            claim=self.claim,
            state=self.state,
            remaining_ms=None if deadline is None else max(0, deadline - now_ms),
            age_ms=now_ms - self.entered_ms,
            resident_tokens=max(0, count(self.runs) - self.support) * page_size,
            required_tokens=self.required * page_size,
            hits=self.hits,
            pressure=self.pressure,
        )


def requested(claim: Claim, required: int) -> ClaimRequested:
    """Return the event that a claim begins with.

    Args:
        required: pages that must be resident.
    """
    predicate = claim.predicate
    return ClaimRequested(
        tenant=claim.tenant,
        claim=claim.id,
        session=claim.session,
        kind=claim.kind,
        priority=claim.priority,
        source=predicate.source,
        start=predicate.start,
        end=predicate.end,
        required=required,
        ttl_s=claim.ttl_s,
        write_no_admit=claim.write_no_admit,
        revision=claim.revision,
    )
