"""The litmus cases, by name."""

from __future__ import annotations

from leyline_engine.claims.events import Run
from leyline_engine.contract import ClaimKind

from .litmus import Case, LitmusStage
from .verdict import Outcome


def _ordinary_eviction(stage: LitmusStage) -> None:
    stage.keep("old", 4)
    stage.keep("young", 4)
    stage.serve("active", "other", 6)


def _soft_priority(stage: LitmusStage) -> None:
    stage.keep("old", 4)
    stage.claim("old", 4, kind=ClaimKind.SOFT, priority=5)
    stage.keep("young", 4)
    stage.serve("active", "other", 6)


def _write_no_admit_alone(stage: LitmusStage) -> None:
    stage.keep("old", 8)
    stage.serve("active", "other", 6, admit=False)


def _accepted_hard_claim(stage: LitmusStage) -> None:
    stage.keep("old", 4)
    stage.claim("old", 4)
    stage.keep("young", 4)
    stage.serve("active", "other", 6)


def _materialization_failure(stage: LitmusStage) -> None:
    stage.keep("old", 8)
    stage.serve("active", "other", 6)
    stage.claim("old", 8)


def _demotion(stage: LitmusStage) -> None:
    stage.keep("old", 6)
    stage.claim("old", 6, priority=3)
    stage.runtime.demote("a", "c")
    stage.serve("active", "other", 8)


def _expiry(stage: LitmusStage) -> None:
    stage.keep("old", 6)
    stage.claim("old", 6, ttl_s=60)
    stage.runtime.tick(1, 59_999)
    stage.runtime.tick(2, 60_000)
    stage.serve("active", "other", 8)


def _release(stage: LitmusStage) -> None:
    stage.keep("old", 6)
    stage.claim("old", 6)
    stage.runtime.release("a", "c")
    stage.serve("active", "other", 8)


def _harm(stage: LitmusStage) -> None:
    stage.keep("old", 6)
    stage.claim("old", 6)
    stage.runtime.lose(Run("old", 2, 4), "device_fault")


def _active_refusal(stage: LitmusStage) -> None:
    stage.keep("old", 6)
    stage.claim("old", 6)
    stage.serve("active", "other", 7)


def _refusal_then_success(stage: LitmusStage) -> None:
    stage.keep("old", 6)
    stage.claim("old", 6, ttl_s=60)
    stage.runtime.tick(1, 20_000)
    refusal = stage.serve("active", "other", 9)
    if refusal is not None:
        stage.told.append(f"retry after {refusal.retry_after_ms} ms")
    stage.runtime.tick(2, 60_000)
    stage.serve("again", "other", 9)


def _revision_race(stage: LitmusStage) -> None:
    stage.keep("old", 6)
    stage.claim("old", 6, kind=ClaimKind.SOFT)
    stage.claim("old", 4, revision=3)
    stage.refused("old", 6, revision=2)
    stage.refused("old", 2, revision=3)


def _two_tenants(stage: LitmusStage) -> None:
    stage.keep("hers", 4)
    stage.keep("his", 3, tenant="b")
    stage.claim("hers", 4)
    stage.unknown("b", "c")
    stage.unknown("b", "never")
    stage.claim("his", 3, tenant="b")
    for tenant in ("a", "b", "x"):
        refusal = stage.serve(f"of-{tenant}", f"of-{tenant}", 5, tenant=tenant)
        if refusal is not None:
            stage.told.append(f"{tenant}: own {list(refusal.own)}, others {refusal.others}")
    stage.runtime.release("b", "c")


def _spliced_span(stage: LitmusStage) -> None:
    stage.keep("first", 20)
    stage.claim("first", 14, start=6)
    stage.runtime.edit("drops-before", "first", "second", 3, 5)
    stage.runtime.edit("drops-within", "second", "third", 9, 11)
    stage.runtime.edit("drops-all", "third", "fourth", 4, 10)


_C = "a/c"
_SERVED = (Outcome.SERVICE, "active")

CASES: tuple[Case, ...] = (
    Case(
        "ordinary_eviction", 10, _ordinary_eviction, ((Outcome.ORDINARY_EVICTION, "old"), _SERVED)
    ),
    Case(
        "soft_priority",
        10,
        _soft_priority,
        (
            (Outcome.SOFT_CLAIM, _C),
            (Outcome.ORDINARY_EVICTION, "young"),
            (Outcome.SOFT_PRIORITY, _C),
            _SERVED,
        ),
    ),
    Case(
        "write_no_admit_alone",
        10,
        _write_no_admit_alone,
        ((Outcome.ORDINARY_EVICTION, "old"), (Outcome.WRITE_NO_ADMIT, "active")),
    ),
    Case(
        "accepted_hard_claim",
        10,
        _accepted_hard_claim,
        ((Outcome.HARD_CLAIM, _C), (Outcome.ORDINARY_EVICTION, "young"), _SERVED),
    ),
    Case(
        "materialization_failure",
        10,
        _materialization_failure,
        ((Outcome.ORDINARY_EVICTION, "old"), _SERVED, (Outcome.MATERIALIZATION_FAILURE, _C)),
    ),
    Case(
        "demotion",
        10,
        _demotion,
        ((Outcome.HARD_CLAIM, _C), (Outcome.DEMOTION, _C), (Outcome.SOFT_EVICTION, _C), _SERVED),
    ),
    Case(
        "expiry",
        10,
        _expiry,
        (
            (Outcome.HARD_CLAIM, _C),
            (Outcome.EXPIRY, _C),
            (Outcome.ORDINARY_EVICTION, "old"),
            _SERVED,
        ),
    ),
    Case(
        "release",
        10,
        _release,
        (
            (Outcome.HARD_CLAIM, _C),
            (Outcome.RELEASE, _C),
            (Outcome.ORDINARY_EVICTION, "old"),
            _SERVED,
        ),
    ),
    Case(
        "harm",
        10,
        _harm,
        ((Outcome.HARD_CLAIM, _C), (Outcome.LOSS, "old"), (Outcome.HARM, _C)),
    ),
    Case(
        "active_refusal",
        10,
        _active_refusal,
        ((Outcome.HARD_CLAIM, _C), (Outcome.ACTIVE_REFUSAL, "active")),
    ),
    Case(
        "refusal_then_success_after_expiry",
        10,
        _refusal_then_success,
        (
            (Outcome.HARD_CLAIM, _C),
            (Outcome.ACTIVE_REFUSAL, "active"),
            (Outcome.EXPIRY, _C),
            (Outcome.ORDINARY_EVICTION, "old"),
            (Outcome.SERVICE, "again"),
        ),
        told=("retry after 40000 ms",),
    ),
    Case(
        "revision_race",
        10,
        _revision_race,
        (
            (Outcome.SOFT_CLAIM, _C),
            (Outcome.REVISION, _C),
            (Outcome.HARD_CLAIM, _C),
            (Outcome.STALE_REVISION, _C),
            (Outcome.STALE_REVISION, _C),
        ),
        told=("revision", "revision"),
    ),
    Case(
        "two_tenants",
        10,
        _two_tenants,
        (
            (Outcome.HARD_CLAIM, _C),
            (Outcome.HARD_CLAIM, "b/c"),
            (Outcome.ACTIVE_REFUSAL, "of-a"),
            (Outcome.ACTIVE_REFUSAL, "of-b"),
            (Outcome.ACTIVE_REFUSAL, "of-x"),
            (Outcome.RELEASE, "b/c"),
        ),
        told=(
            "no claim has this id",
            "no claim has this id",
            "a: own ['c'], others 1",
            "b: own ['c'], others 1",
            "x: own [], others 2",
        ),
    ),
)

SPLICING_CASES: tuple[Case, ...] = (
    Case(
        "claim_over_a_spliced_span",
        110,
        _spliced_span,
        (
            (Outcome.HARD_CLAIM, _C),
            (Outcome.SERVICE, "drops-before"),
            (Outcome.MOVE, _C),
            (Outcome.HARD_CLAIM, _C),
            (Outcome.SERVICE, "drops-within"),
            (Outcome.SHRINK, _C),
            (Outcome.HARD_CLAIM, _C),
            (Outcome.SERVICE, "drops-all"),
            (Outcome.HARM, _C),
        ),
    ),
)
"""Cases for engines that also splice."""
