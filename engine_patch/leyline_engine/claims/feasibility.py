"""The check that a request can ever run beside the locked claims. Pure arithmetic.

    protected_resident + active_live <= usable

Running requests end by themselves and don't count; a claim may never end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from leyline_engine.contract import ClaimRefusal

from .events import Run
from .protection import ClaimKey, Protection


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """An engine's arithmetic for the room that a request takes.

    SGLang (``PrefillAdder.add_one_req``) adds to the tokens that it must compute the output, at
    most 4,096 of it, and a page; all that must be *less* than what it can free.
    """

    page_size: int = 1
    clip_output: int = 4096
    strict: bool = True
    whole_pages: bool = False
    """True if prompt and output are rounded up to pages before the reserve is added."""
    reserve: int | None = None
    """Tokens added to what a request computes; None for a page."""

    def needed(self, tokens: int, max_new_tokens: int) -> int:
        """Return the tokens that a request takes.

        Args:
            tokens: tokens of its prompt that aren't cached.
        """
        work = tokens + min(max_new_tokens, self.clip_output)
        if self.whole_pages:
            work = -(-work // self.page_size) * self.page_size
        return work + (self.page_size if self.reserve is None else self.reserve)

    def pages(self, needed: int) -> int:
        """Return tokens as pages that fit where the tokens fit.

        So a reader, who sees pages only, comes to the same answer.
        """
        return needed // self.page_size if self.strict else -(-needed // self.page_size)

    def shortfall(self, needed: int, room: int) -> int:
        """Return the tokens of room that are missing; 0 or less if the request fits."""
        return needed + self.strict - room


@dataclass(frozen=True, slots=True)
class Demand:
    """A request's needs, as far as they are known before it is queued."""

    tenant: str
    prompt_tokens: int
    max_new_tokens: int
    matched: tuple[Run, ...] = ()
    """Resident leading pages of its prompt, in order."""


class Feasibility(StrEnum):
    """The answer: it can run, or why it can't."""

    FITS = "fits"
    BLOCKED = "blocked"
    """It can't run before a claim ends."""
    TOO_LARGE = "too_large"
    """It can't run even in an empty pool; no claim is at fault."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a request, in tokens."""

    feasibility: Feasibility
    needed: int
    """Tokens beyond those that are both locked for a claim and matched by the request."""
    held: int
    """Tokens both locked and matched: counted once, as the claim's."""
    protected: int
    usable: int
    blocking: tuple[ClaimKey, ...] = ()
    """All blocking claims, for the engine's own log."""
    own: tuple[str, ...] = ()
    """Ids of the blocking claims that are the caller's tenant's."""
    retry_after_ms: int | None = None
    """Time until deadlines alone will have made room; None if it takes a release."""

    @property
    def others(self) -> int:
        """Number of other tenants' claims among them; the caller learns no more of those."""
        return len(self.blocking) - len(self.own)

    @property
    def refusal(self) -> ClaimRefusal:
        """The answer as the request's owner may see it."""
        return ClaimRefusal(
            needed=self.needed,
            protected=self.protected - self.held,
            usable=self.usable,
            own=self.own,
            others=self.others,
            retry_after_ms=self.retry_after_ms,
        )


def check(
    demand: Demand, protection: Protection, arithmetic: Arithmetic, usable: int, now_ms: int
) -> Admission:
    """Check if a request fits beside the claims, and name those in its way.

    Pages that it matches without a claim's lock count as its own: they must stay while it runs.
    Pages that it matches under a lock count as the claim's, so nothing is counted twice.

    Args:
        usable: tokens of the pool.
    """
    page = arithmetic.page_size
    held = protection.count(demand.matched) * page
    protected = protection.pages * page
    needed = arithmetic.needed(demand.prompt_tokens - held, demand.max_new_tokens)
    short = arithmetic.shortfall(needed, usable - protected)
    if short <= 0:
        return Admission(Feasibility.FITS, needed, held, protected, usable)
    if arithmetic.shortfall(needed, usable - held) > 0:
        return Admission(Feasibility.TOO_LARGE, needed, held, protected, usable)
    free_at = protection.free_at(-(-short // page), demand.matched)
    return Admission(
        Feasibility.BLOCKED,
        needed,
        held,
        protected,
        usable,
        protection.blocking(demand.matched),
        protection.blocking_of(demand.tenant, demand.matched),
        None if free_at is None else max(0, free_at - now_ms),
    )


def crowded(
    demand: Demand, protection: Protection, arithmetic: Arithmetic, usable: int
) -> Admission:
    """Return the answer for a request that fits beside the claims, but not beside running requests.

    Every locked claim is in its way, and it may retry as soon as other requests have ended.
    """
    return Admission(
        Feasibility.BLOCKED,
        arithmetic.needed(demand.prompt_tokens, demand.max_new_tokens),
        0,
        protection.pages * arithmetic.page_size,
        usable,
        protection.blocking(()),
        protection.blocking_of(demand.tenant, ()),
        0,
    )
