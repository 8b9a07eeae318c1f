"""The paper's probe: a resident claim and an active request in pools of growing size.

A claim of 60 pages and a request of 70, with its output and reserve, coexist from 130 pages on.
Below that one has to give way; the policy decides which, and if anyone is notified.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from leyline_engine.claims.events import AnyEvent, Opened
from leyline_engine.contract import ClaimKind

from .litmus import PREPARATION, LitmusStage, OpenRuntime
from .reader import read
from .verdict import Outcome

CLAIMED = 60
ACTIVE = 70
POOLS = tuple(range(80, 150, 10))


class SweepPolicy(StrEnum):
    """The protection of the resident pages."""

    NATIVE = "native"
    SOFT = "soft"
    WRITE_NO_ADMIT = "write_no_admit"
    HARD = "hard"


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One pool under one policy, as the reader reports it."""

    policy: SweepPolicy
    usable: int
    served: bool
    resident: int
    """Pages left of the 60."""
    lost: int
    blocking: tuple[str, ...]
    """Claims that the refusal named."""
    kept: int
    """Pages that the active request left in the cache."""
    void: str = ""


def run_sweep(open_runtime: OpenRuntime, pools: Iterable[int] = POOLS) -> tuple[SweepRow, ...]:
    """Run every policy on every pool, each on its own engine."""
    sizes = tuple(pools)
    return tuple(_probe(open_runtime, policy, size) for policy in SweepPolicy for size in sizes)


def _probe(open_runtime: OpenRuntime, policy: SweepPolicy, usable: int) -> SweepRow:
    events: list[AnyEvent] = []
    stage = LitmusStage(open_runtime(usable, events.append))
    stage.keep("resident", CLAIMED)
    if policy in (SweepPolicy.SOFT, SweepPolicy.HARD):
        stage.claim("resident", CLAIMED, kind=ClaimKind(policy.value), priority=1)
    stage.serve("active", "active", ACTIVE, admit=policy is not SweepPolicy.WRITE_NO_ADMIT)
    verdict = read(events)
    opened = events[0]
    scale = stage.runtime.unit // opened.page_size if isinstance(opened, Opened) else 1
    refusals = verdict.of(Outcome.ACTIVE_REFUSAL)
    resident = verdict.balance.resident if verdict.balance else {}
    return SweepRow(
        policy=policy,
        usable=usable,
        served=any(
            finding.outcome in (Outcome.SERVICE, Outcome.WRITE_NO_ADMIT)
            for finding in verdict.findings
            if not finding.subject.startswith(PREPARATION)
        ),
        resident=resident.get("resident", 0) // scale,
        lost=CLAIMED - resident.get("resident", 0) // scale,
        blocking=tuple(name for found in refusals for name in found.detail.split(", ")),
        kept=resident.get("active", 0) // scale,
        void=verdict.void,
    )
