"""Can this request ever run beside the claims that are locked? Pure arithmetic.

    protected_resident + active_live <= usable

Requests that run now end by themselves and are not asked about; a claim may never end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from leyline_engine.contract import ClaimRefusal

from .events import Run
from .protection import ClaimKey, Protection


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an engine reckons what a request takes.

    SGLang (``PrefillAdder.add_one_req``) adds to the tokens that it must compute the output, at
    most 4,096 of it, and a page; all that must be *less* than what it can free.
    """

    page_size: int = 1
    clip_output: int = 4096
    strict: bool = True
    whole_pages: bool = False
    """Whether prompt and output are rounded up to pages before the reserve is added."""

    def needed(self, tokens: int, max_new_tokens: int) -> int:
        """Tokens that a request takes.

        Args:
            tokens: of its prompt, those that aren't there already.
        """
        work = tokens + min(max_new_tokens, self.clip_output)
        if self.whole_pages:
            work = -(-work // self.page_size) * self.page_size
        return work + self.page_size

    def shortfall(self, needed: int, room: int) -> int:
        """Tokens of room that are missing; 0 or less where it fits."""
        return needed + self.strict - room


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request is known to want before it is queued."""

    tenant: str
    prompt_tokens: int
    max_new_tokens: int
    matched: tuple[Run, ...] = ()
    """Leading pages of its prompt that are resident, in order."""


class Feasibility(StrEnum):
    """Whether it can run."""

    FITS = "fits"
    BLOCKED = "blocked"
    """Not before a claim goes."""
    TOO_LARGE = "too_large"
    """Not even in an empty pool; no claim's fault."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer, in tokens."""

    feasibility: Feasibility
    needed: int
    """Beyond what is locked for a claim and matched by the request."""
    held: int
    """Locked and matched: counted once, as the claim's."""
    protected: int
    usable: int
    blocking: tuple[ClaimKey, ...] = ()
    """All of them, for the engine's own log."""
    own: tuple[str, ...] = ()
    """Ids of the caller's tenant among them."""
    retry_after_ms: int | None = None
    """Until deadlines alone will have made room; None if it takes a release."""

    @property
    def others(self) -> int:
        """How many blocking claims are other tenants', which is all that the caller is told."""
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
    """Whether a request fits beside the claims, and what is in its way.

    What it matches without a claim's lock counts as its own: it must stay while the request runs.
    What it matches under a lock counts as the claim's, so nothing is counted twice.

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
    """What a request is told that fits beside the claims, but not beside all that runs as well.

    Every locked claim is in its way, and it may come again as soon as others have ended.
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
