"""What the reader says of a trace: outcomes by name, and how things stand at its end. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """What became of a claim, a request or pages."""

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
    """An edit put a claim's tokens elsewhere, and the claim went along."""
    SHRINK = "shrink"
    """The same, and some of them are gone."""
    SOFT_PRIORITY = "soft_priority"
    """Pages stayed that would have gone first without their claim's priority."""
    SOFT_EVICTION = "soft_eviction"
    """A claim that locks nothing gave way to a request."""
    ORDINARY_EVICTION = "ordinary_eviction"
    LOSS = "loss"
    ADMISSION = "admission"
    SERVICE = "service"
    WRITE_NO_ADMIT = "write_no_admit"
    """Served, and nothing of it kept for reuse."""
    ACTIVE_REFUSAL = "active_refusal"
    """A request refused for the claims that ``detail`` names."""


class Finding(msgspec.Struct, frozen=True):
    """One outcome, in the order of the trace."""

    outcome: Outcome
    subject: str
    """``tenant/claim``, a request, or a source."""
    pages: int = 0
    """How many it is about."""
    detail: str = ""
    """Cause, terms, or the request that it happened for."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand at the end."""

    free: int
    resident: dict[str, int]
    """Pages by source."""
    locked: int
    claims: dict[str, str]
    """Phase by ``tenant/claim``."""
    running: tuple[str, ...]
    unfinished: tuple[str, ...]
    """What the trace broke off in the middle of."""
    now_ms: int
    ticks: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The reader's answer."""

    void: str = ""
    """Why the trace can't be what happened; all else is empty then."""
    findings: tuple[Finding, ...] = ()
    balance: Balance | None = None

    def of(self, outcome: Outcome) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(finding for finding in self.findings if finding.outcome is outcome)
