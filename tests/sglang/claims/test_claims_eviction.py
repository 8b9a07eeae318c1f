"""Soft claims in SGLang's eviction: who goes first, and that nothing stays locked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from claim_scheduler import ClaimScheduler, opens, text
from scheduler_kit import sealed, source_of
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult

from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    DemoteClaim,
    Directive,
    SourceRef,
    apply_directives,
)
from leyline_engine.sglang.turn import Phase

pytestmark = pytest.mark.usefixtures("server_args")

SOFT = ClaimKind.SOFT


@pytest.fixture(autouse=True)
def nothing_contained(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failure inside SGLang's loop is logged and not raised: it must fail the test."""
    yield
    errors = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not errors


def fill(scheduler: ClaimScheduler, *names: str) -> None:
    """Sessions of 20 tokens each, the earlier named the less recently used."""
    for name in names:
        scheduler.serve(text(name, 19), opens(name))


def left(scheduler: ClaimScheduler, *names: str) -> set[str]:
    """Return the sessions that are cached as a whole."""
    return {name for name in names if scheduler.cached(text(name, 19)) == 19}


def evict(scheduler: ClaimScheduler, tokens: int) -> None:
    """Evict at least so many tokens."""
    result = scheduler.cache.evict(EvictParams(num_tokens=tokens))
    assert result.num_tokens_evicted >= tokens
    scheduler.check()


def test_what_ranks_lower_goes_first() -> None:
    """KV without a claim goes first, however recent; then by priority, however old."""
    scheduler = ClaimScheduler(200)
    names = ["nine", "one", "five", "none"]
    fill(scheduler, *names)
    for name, priority in (("five", 5), ("nine", 9), ("one", 1)):
        scheduler.claim(name, 20, id=name, kind=SOFT, priority=priority)
    for gone in ("none", "one", "five", "nine"):
        evict(scheduler, 20)
        names.remove(gone)
        assert left(scheduler, *names, gone) == set(names)
        if gone != "none":
            assert scheduler.status(gone).state is ClaimState.EVICTED
        assert all(scheduler.status(n).state is ClaimState.MATERIALIZED for n in names)
    assert scheduler.status("nine").pressure == 3


def test_of_equal_ranks_the_least_recently_used_goes_first() -> None:
    """Among claims of one priority, recency counts as it does among unclaimed KV."""
    scheduler = ClaimScheduler(200)
    fill(scheduler, "x", "y", "z")
    for name in ("y", "z", "x"):
        scheduler.claim(name, 20, id=name, kind=SOFT, priority=5)
    fill(scheduler, "y")
    evict(scheduler, 20)
    assert left(scheduler, "x", "y", "z") == {"x", "y"}
    evict(scheduler, 20)
    assert left(scheduler, "x", "y") == {"y"}


def test_a_claim_of_priority_0_ranks_as_what_nobody_claims() -> None:
    """It goes by recency, and the claim is notified."""
    scheduler = ClaimScheduler(200)
    fill(scheduler, "zero")
    scheduler.claim("zero", 20, kind=SOFT, priority=0)
    fill(scheduler, "young")
    evict(scheduler, 20)
    assert left(scheduler, "zero", "young") == {"young"}
    assert scheduler.status().state is ClaimState.EVICTED


def test_a_share_holds_until_too_little_is_left() -> None:
    """A claim of two fifths outlives the end of its path, and ends with what it asks for."""
    scheduler = ClaimScheduler(200)
    shared = text("shared", 15)
    one, two = [*shared, *text("one", 15)], [*shared, *text("two", 15)]
    scheduler.serve(one, opens("one"))
    scheduler.serve(two, opens("two"))
    scheduler.claim("one", 30, kind=SOFT, share=0.4, priority=1)
    evict(scheduler, 16)
    assert (scheduler.cached(one), scheduler.cached(two)) == (30, 15)
    evict(scheduler, 15)
    assert scheduler.cached(one) == 15
    status = scheduler.status()
    assert (status.state, status.resident_tokens) == (ClaimState.MATERIALIZED, 15)
    evict(scheduler, 15)
    assert scheduler.status().state is ClaimState.EVICTED


def test_a_claim_on_the_end_of_a_path_ranks_all_that_it_depends_on() -> None:
    """KV before the claimed span is evicted no earlier than the span."""
    scheduler = ClaimScheduler(200)
    shared = text("shared", 20)
    scheduler.serve(shared, opens("short"))
    scheduler.serve([*shared, *text("long", 20)], opens("long"))
    scheduler.claim("long", 40, start=30, kind=SOFT, priority=1)
    fill(scheduler, "young")
    evict(scheduler, 20)
    assert left(scheduler, "young") == set()
    assert scheduler.cached([*shared, *text("long", 20)]) == 40
    assert scheduler.status().resident_tokens == 10


def test_a_demoted_claim_keeps_its_rank() -> None:
    """It goes after unclaimed KV and before higher ranks."""
    scheduler = ClaimScheduler(200)
    fill(scheduler, "hard", "soft", "none")
    scheduler.claim("hard", 20, id="hard", priority=3)
    scheduler.claim("soft", 20, id="soft", kind=SOFT, priority=5)
    scheduler.send(DemoteClaim("a", "hard"))
    assert scheduler.status("hard").state is ClaimState.DEMOTED
    assert scheduler.cache.protected_size() == 0
    evict(scheduler, 20)
    assert left(scheduler, "hard", "soft", "none") == {"hard", "soft"}
    evict(scheduler, 20)
    assert left(scheduler, "hard", "soft") == {"soft"}
    assert scheduler.status("hard").state is ClaimState.EVICTED


def test_ranks_are_evictable_all_the_same() -> None:
    """They take nothing from what SGLang reckons with, and a request may have it all."""
    scheduler = ClaimScheduler(100)
    fill(scheduler, "x", "y", "z")
    evictable = scheduler.cache.evictable_size()
    for priority, name in enumerate(("x", "y", "z")):
        scheduler.claim(name, 20, id=name, kind=SOFT, priority=priority)
    assert scheduler.cache.evictable_size() == evictable
    assert scheduler.cache.protected_size() == 0
    req, _ = scheduler.serve(text("active", 96))
    assert len(req.output_ids) == 2
    assert {scheduler.status(name).state for name in "xyz"} == {ClaimState.EVICTED}
    scheduler.check_idle()


class BrokenEvictionError(RuntimeError):
    """The injected failure."""


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_eviction_that_raises_leaves_nothing_locked(call: int) -> None:
    """All ranked paths can be evicted afterwards, whichever step of it fails."""
    scheduler = ClaimScheduler(100)
    fill(scheduler, "x", "y")
    scheduler.claim("x", 20, id="x", kind=SOFT, priority=1)
    scheduler.claim("y", 20, id="y", kind=SOFT, priority=2)
    calls = 0

    def breaks(_: EvictParams) -> EvictResult:
        nonlocal calls
        calls += 1
        if calls == call:
            raise BrokenEvictionError
        return EvictResult()

    with pytest.raises(BrokenEvictionError):
        scheduler.engine.claims.shelf.evict(breaks, EvictParams(num_tokens=40))
    scheduler.check_idle()
    evict(scheduler, 40)


def test_a_lock_that_raises_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths that were held before it are let go of."""
    scheduler = ClaimScheduler(100)
    fill(scheduler, "x", "y")
    scheduler.claim("x", 20, id="x", kind=SOFT, priority=1)
    scheduler.claim("y", 20, id="y", kind=SOFT, priority=1)
    lock: Callable[[Any], Any] = scheduler.cache.lock
    calls = count(1)

    def breaks(node: Any) -> Any:
        if next(calls) == 2:
            raise BrokenEvictionError
        return lock(node)

    with monkeypatch.context() as broken:
        broken.setattr(scheduler.cache, "lock", breaks)
        with pytest.raises(BrokenEvictionError):
            scheduler.cache.evict(EvictParams(num_tokens=10))
    scheduler.check_idle()
    evict(scheduler, 40)


def test_ranks_over_one_another() -> None:
    """Of overlapping claims the higher one holds; what it shares with a lock stays put."""
    scheduler = ClaimScheduler(100)
    tokens = text("s", 40)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 40, id="low", kind=SOFT, priority=1, share=0.2)
    scheduler.claim("s", 30, id="high", kind=SOFT, priority=9)
    scheduler.claim("s", 10, id="hard")
    assert scheduler.cache.evictable_size() == 31
    evict(scheduler, 1)
    assert scheduler.cached(tokens) == 40
    evict(scheduler, 5)
    assert scheduler.cached(tokens) == 30
    assert scheduler.status("low").resident_tokens == 30
    evict(scheduler, 5)
    assert scheduler.cached(tokens) == 10
    assert scheduler.status("high").state is ClaimState.EVICTED
    assert scheduler.status("low").resident_tokens == 10
    assert scheduler.status("hard").resident_tokens == 10


@pytest.mark.parametrize("priority", [0, 1])
def test_a_claim_on_a_beginning_goes_with_the_higher_one_after_it(priority: int) -> None:
    """It isn't evicted before the path that continues it, and is notified as soon as that goes."""
    scheduler = ClaimScheduler(100)
    tokens = text("s", 40)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 20, id="beginning", kind=SOFT, priority=priority)
    scheduler.claim("s", 40, start=30, id="end", kind=SOFT, priority=9)
    evict(scheduler, 1)
    evict(scheduler, 35)
    assert scheduler.cached(tokens) == 0
    assert scheduler.status("end").state is ClaimState.EVICTED
    assert scheduler.status("beginning").state is ClaimState.EVICTED


def test_a_claim_over_a_spliced_path_ranks_its_copies() -> None:
    """The keys of what a splice moved are its lineage's; eviction finds them like any others."""
    scheduler = ClaimScheduler(300)
    first, _ = scheduler.serve(text("s", 100), opens("s"))
    edited, record = scheduler.edit(first, "s", "t2", (Directive(40, 60),))
    assert record.receipt.tokens.spliced > 0
    turn = scheduler.engine.turn_of(edited)
    assert turn is not None
    keys = turn.keys(source_of(edited))[:80]
    scheduler.claim("s", 80, source="t2", kind=SOFT, priority=1)
    fill(scheduler, "young")
    evict(scheduler, 80)
    assert left(scheduler, "young") == set()
    assert scheduler.cached(keys) == 80
    evict(scheduler, 80)
    assert scheduler.status().state is ClaimState.EVICTED


def test_what_a_waiting_splice_held_is_not_lost_in_silence() -> None:
    """When memory is short, a waiting splice lets its sources go. A claim that ranks them is
    notified when they are evicted."""
    scheduler = ClaimScheduler(200)
    first, _ = scheduler.serve(text("s", 100), opens("s"))
    scheduler.claim("s", 100, kind=SOFT, priority=5)
    tokens, cuts = source_of(first), (Directive(40, 60, (1, 2, 3)),)
    ref = SourceRef("t1", len(tokens), sealed(first))
    payload = opens("s", "t2", sources=(ref,), directives=cuts)
    req = scheduler.submit([*apply_directives(tokens, cuts), 7], payload)
    turn = scheduler.engine.turn_of(req)
    assert turn is not None
    no_token = AddReqResult.NO_TOKEN
    assert scheduler.engine.admission.admit(turn, lambda _: no_token, lambda: 100) is no_token
    assert turn.phase is Phase.STAGING
    assert scheduler.cache.evictable_size() == 0
    scheduler.cache.evict(EvictParams(num_tokens=150))
    assert scheduler.cached(tokens) == 0
    scheduler.check_claims()
    assert scheduler.status().state is ClaimState.EVICTED
    scheduler.drain()
    assert len(req.output_ids) == 2
