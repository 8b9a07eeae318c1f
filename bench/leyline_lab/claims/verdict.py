"""The reader's verdict on a trace: outcomes by name, and the state at its end. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """The outcome of a claim, a request or pages."""

    ACCEPTANCE = "acceptance"
    CLAIM_REFUSAL = "claim_refusal"
    STALE_REVISION = "stale_revision"
    REVISION = "revision"
    HARD_CLAIM = "hard_claim"
    """An accepted hard claim, materialised and locked."""
    SOFT_CLAIM = "soft_claim"
    MATERIALIZATION_FAILURE = "materialization_failure"
    DEMOTION = "demotion"
    EXPIRY = "expiry"
    RELEASE = "release"
    HARM = "harm"
    MOVE = "move"
    """An edit moved a claim's tokens, and the claim followed."""
    SHRINK = "shrink"
    """An edit moved a claim's tokens, and removed some of them."""
    SOFT_PRIORITY = "soft_priority"
    """Pages stayed that would have gone first without their claim's priority."""
    SOFT_EVICTION = "soft_eviction"
    """A claim that locks nothing gave way to a request."""
    ORDINARY_EVICTION = "ordinary_eviction"
    FURTHER_EVICTION = "further_eviction"
    """More pages of a source from which the same request had pages evicted before, as where pages
    are taken step by step. No claim holds them."""
    LOSS = "loss"
    ADMISSION = "admission"
    SERVICE = "service"
    WRITE_NO_ADMIT = "write_no_admit"
    """A request served, of which nothing is kept for reuse."""
    ACTIVE_REFUSAL = "active_refusal"
    """A request refused because of the claims that ``detail`` names."""


class TraceFinding(msgspec.Struct, frozen=True):
    """One outcome, in the order of the trace."""

    outcome: Outcome
    subject: str
    """``tenant/claim``, a request, or a source."""
    pages: int = 0
    """Number of pages concerned."""
    detail: str = ""
    """Cause, terms, or the request for which it happened."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The state at the end."""

    free: int
    resident: dict[str, int]
    """Number of resident pages by source."""
    locked: int
    claims: dict[str, str]
    """Phase by ``tenant/claim``."""
    running: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Claims and requests that the trace's end left unfinished."""
    now_ms: int
    ticks: int


class TraceVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The reader's answer."""

    void: str = ""
    """Reason why the trace can't have happened; all else is empty then."""
    findings: tuple[TraceFinding, ...] = ()
    balance: Balance | None = None

    def of(self, outcome: Outcome) -> tuple[TraceFinding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.outcome is outcome)
