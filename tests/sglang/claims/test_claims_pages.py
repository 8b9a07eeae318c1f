"""Claims where SGLang's pages hold more than one token."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from claim_scheduler import ClaimScheduler, opens, text
from scheduler_kit import source_of
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from leyline_engine.claims.events import Found, Locked
from leyline_engine.claims.feasibility import Demand
from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    DemoteClaim,
    Directive,
    ListClaims,
    Outcome,
    ProblemCode,
    token_array,
)
from leyline_engine.occupancy import held_by_claims
from leyline_engine.records.sources import SourceRegistry
from leyline_engine.server.claim_clock import ClaimMessage
from leyline_engine.sglang.claim_desk import SchedulerClaims

pytestmark = pytest.mark.usefixtures("server_args")

PAGES = [16, 32, 64, 128]
SOFT = ClaimKind.SOFT


@pytest.fixture(autouse=True)
def nothing_contained(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failure inside SGLang's loop is logged and not raised: it must fail the test."""
    yield
    errors = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not errors


def pages(scheduler: ClaimScheduler) -> tuple[int, int, int]:
    """(resident, required, protected) pages of the claim ``c`` and of all."""
    status = scheduler.status()
    size = scheduler.page
    assert status.resident_tokens % size == status.required_tokens % size == 0
    protected = scheduler.cache.protected_size()
    return status.resident_tokens // size, status.required_tokens // size, protected // size


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    ("ends", "share", "resident", "locked"),
    [
        pytest.param((0.0, 2.0), 1.0, 2, 2, id="whole pages"),
        pytest.param((0.1, 0.2), 1.0, 1, 1, id="a part of a page"),
        pytest.param((1.5, 2.5), 1.0, 2, 3, id="parts of two pages, and the page before"),
        pytest.param((1.0, 3.0), 0.5, 1, 2, id="half of two pages, from the front"),
        pytest.param((0.0, 4.3), 1.0, 4, 4, id="all, but for the last partial page"),
    ],
)
def test_a_claim_locks_the_pages_that_hold_its_tokens(
    page: int, ends: tuple[float, float], share: float, resident: int, locked: int
) -> None:
    """They survive pressure; the pages after them, of the same node until then, are evicted."""
    scheduler = ClaimScheduler(10 * page, page=page)
    tokens = text("s", 4 * page + page // 3)
    scheduler.serve(tokens, opens("s"))
    span = int(ends[0] * page), min(int(ends[1] * page), len(tokens))
    scheduler.claim("s", span[1], start=span[0], share=share)
    assert pages(scheduler) == (resident, resident, locked)
    scheduler.check()
    scheduler.serve(text("active", (9 - locked) * page - 3))
    scheduler.cache.evict(EvictParams(num_tokens=scheduler.capacity))
    assert scheduler.cached(tokens) == locked * page
    assert scheduler.status().state is ClaimState.MATERIALIZED
    scheduler.release()
    scheduler.check_idle()


@pytest.mark.parametrize("page", PAGES)
def test_tokens_that_fill_no_page_cannot_be_claimed(page: int) -> None:
    """SGLang keeps no partial page. The refusal gives the field, the reason and the fix."""
    scheduler = ClaimScheduler(10 * page, page=page)
    scheduler.serve(text("s", 2 * page + 7), opens("s"))
    scheduler.serve(text("short", page - 5), opens("short"))
    for session, start, end, fix in (
        ("s", 2 * page, 2 * page + 8, f"begin before {2 * page}, or claim a later turn"),
        ("s", 2 * page + 3, 2 * page + 4, f"begin before {2 * page}, or claim a later turn"),
        ("short", 0, page - 4, "claim a later turn"),
    ):
        problem = scheduler.try_claim(session, end, start=start).problem
        assert problem is not None
        assert (problem.code, problem.field) == (ProblemCode.INVALID_CLAIM, "predicate.start")
        assert f"whole pages of {page} tokens" in problem.message
        assert problem.message.endswith(f"fill none: {fix}")
    assert scheduler.send(ListClaims("a")).claims == ()
    assert scheduler.cache.protected_size() == 0
    assert len(scheduler.keeper.names) == 0
    later = [*text("short", page - 5), *text("more", 9)]
    scheduler.serve(later, opens("short", "t2"))
    assert scheduler.claim("short", page - 4, source="t2").resident_tokens == page


def would_admit(scheduler: ClaimScheduler, req: Req) -> bool:
    """SGLang's own answer for a request, with nothing else running."""
    adder = PrefillAdder(
        scheduler.page, scheduler.cache, scheduler.allocator, None, 1.0, 1 << 20, None
    )
    req.init_next_round_input(scheduler.cache)
    result: AddReqResult = adder.add_one_req(req, False, None)
    admitted = req in adder.can_run_list
    if admitted:
        scheduler.cache.unlock(req.lock)
        req.lock = None
    else:
        assert result is AddReqResult.NO_TOKEN
    return admitted


@pytest.mark.parametrize("page", [1, *PAGES])
@pytest.mark.parametrize("decode", [2, 37])
@pytest.mark.parametrize("shares", [0, 2.4, 4.2])
def test_the_limit_is_sglangs_own_to_the_token(page: int, decode: int, shares: float) -> None:
    """The claims refuse exactly those prompts that SGLang's admission has no tokens for: below,
    at and above each edge, with a prefix that is locked, that isn't, and without one."""
    scheduler = ClaimScheduler(14 * page + 80, page=page)
    tokens = text("s", 5 * page)
    scheduler.serve(tokens, opens("s"))
    scheduler.serve(text("other", 2 * page), opens("other"))
    scheduler.claim("s", 3 * page)
    scheduler.claim("other", 2 * page - page // 2, id="d")
    common = tokens[: int(shares * page)]
    held = min(3, int(shares)) * page
    edge = scheduler.capacity - 5 * page - decode - page + held
    answers = []
    for length in {edge - page, edge - 2, edge - 1, edge, edge + 1, edge + page // 2}:
        prompt = [*common, *text("active", length - len(common))]
        req = Req("r", "", token_array(prompt), sampling(decode), vocab_size=500)
        req.extra_key = req.cache_salt = None
        blocked = scheduler.engine.claims.bars(
            req, None, lambda req=req: scheduler.engine.cached_slots(req)
        )
        assert blocked is not would_admit(scheduler, req), length - edge
        assert blocked is (length >= edge), length - edge
        answers.append(blocked)
    assert {*answers} == {True, False}
    scheduler.check()


def sampling(decode: int) -> Any:
    """Parameters of a request for ``decode`` tokens."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(max_new_tokens=decode, ignore_eos=True)
    parameters.normalize(None)
    return parameters


@pytest.mark.parametrize("page", [16, 64])
def test_a_refusal_reports_tokens_and_waits_for_no_claim(page: int) -> None:
    """The numbers are SGLang's, in tokens; after the claim's time the same request runs."""
    scheduler = ClaimScheduler(10 * page, page=page)
    scheduler.serve(text("s", 4 * page), opens("s"))
    scheduler.claim("s", 4 * page - 5, ttl_s=2)
    prompt = text("active", 5 * page)
    refusal = scheduler.refusal(scheduler.submit(prompt, opens("active")))
    assert (refusal.needed, refusal.protected) == (6 * page + 2, 4 * page)
    assert (refusal.usable, refusal.own, refusal.retry_after_ms) == (10 * page, ("c",), 2000)
    scheduler.tick(2000)
    assert scheduler.status().state is ClaimState.EXPIRED
    scheduler.check_idle()
    served, _ = scheduler.serve(prompt, opens("active"))
    assert len(served.output_ids) == 2


@pytest.mark.parametrize("page", [16, 64])
def test_soft_claims_rank_whole_pages(page: int) -> None:
    """Unclaimed pages of a node go before its claimed ones, and the claim ends with the last that
    it requires."""
    scheduler = ClaimScheduler(20 * page, page=page)
    tokens = text("s", 6 * page)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 4 * page - 3, kind=SOFT, priority=3, share=0.5)
    scheduler.serve(text("young", 2 * page), opens("young"))
    assert pages(scheduler) == (4, 2, 0)
    scheduler.cache.evict(EvictParams(num_tokens=4 * page))
    assert scheduler.cached(tokens) == 4 * page
    assert scheduler.cached(text("young", 2 * page)) == 0
    assert pages(scheduler) == (4, 2, 0)
    scheduler.cache.evict(EvictParams(num_tokens=1))
    assert scheduler.status().state is ClaimState.EVICTED
    scheduler.check()


@pytest.mark.parametrize("page", [16, 64])
def test_a_ranked_claim_has_what_an_eviction_leaves(page: int) -> None:
    """Of its four pages two are another session's, too; when the others go, it has those."""
    scheduler = ClaimScheduler(20 * page, page=page)
    tokens = text("s", 4 * page)
    scheduler.serve(tokens, opens("s"))
    scheduler.serve([*tokens[: 2 * page], *text("other", page)], opens("other"))
    scheduler.claim("s", 4 * page, kind=SOFT, priority=1, share=0.5)
    scheduler.cache.evict(EvictParams(num_tokens=page))
    assert pages(scheduler) == (4, 2, 0)
    scheduler.cache.evict(EvictParams(num_tokens=1))
    assert pages(scheduler) == (2, 2, 0)
    assert scheduler.status().state is ClaimState.MATERIALIZED
    scheduler.check()
    scheduler.cache.evict(EvictParams(num_tokens=1))
    assert scheduler.status().state is ClaimState.EVICTED


@pytest.mark.parametrize("page", [16, 64])
def test_a_demoted_claim_keeps_its_pages_longest(page: int) -> None:
    """Its locks are gone, and its pages go after those of nobody."""
    scheduler = ClaimScheduler(20 * page, page=page)
    tokens = text("s", 3 * page + 2)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 3 * page + 2, priority=3)
    assert scheduler.cache.protected_size() == 3 * page
    scheduler.send(DemoteClaim("a", "c"))
    scheduler.serve(text("young", 2 * page), opens("young"))
    assert (scheduler.status().state, scheduler.cache.protected_size()) == (ClaimState.DEMOTED, 0)
    scheduler.cache.evict(EvictParams(num_tokens=2 * page))
    assert scheduler.cached(tokens) == 3 * page
    scheduler.cache.evict(EvictParams(num_tokens=1))
    assert scheduler.status().state is ClaimState.EVICTED
    scheduler.check()


@pytest.mark.parametrize("page", [16, 64])
def test_a_forget_takes_claimed_pages(page: int) -> None:
    """Whole pages go: the claim is harmed, and nothing stays locked."""
    scheduler = ClaimScheduler(20 * page, page=page)
    tokens = text("s", 4 * page + 3)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 4 * page)
    scheduler.serve([*tokens[: page // 2], 1, 2], opens("s", "t2", forget=("all",)))
    status = scheduler.status()
    assert (status.state, status.cause, status.resident_tokens) == (
        ClaimState.HARMED,
        "forgotten",
        0,
    )
    assert scheduler.cached(tokens) == 0
    scheduler.check_idle()


@pytest.mark.parametrize("page", [16, 64])
def test_tenants_share_the_pages_of_a_prefix(page: int) -> None:
    """Two claims over one prefix lock it once; the page in which their prompts part is each one's
    own."""
    scheduler = ClaimScheduler(20 * page, page=page)
    system = text("system", 2 * page + page // 2)
    one, two = [*system, *text("one", page)], [*system, *text("two", page)]
    scheduler.serve(one, opens("one"))
    scheduler.serve(two, opens("two", tenant="b"))
    scheduler.claim("one", 3 * page)
    scheduler.claim("two", 3 * page, tenant="b")
    assert scheduler.keeper.book.protected_pages == 4
    scheduler.check()
    scheduler.release()
    assert scheduler.keeper.book.protected_pages == 3
    assert len(scheduler.keeper.names) == 3
    scheduler.check()


@pytest.mark.parametrize("page", [1, 16, 32])
@pytest.mark.parametrize(
    "cut", [Directive(70, 75), Directive(70, 102), Directive(230, 240, (1, 2, 3))]
)
def test_a_claim_follows_its_tokens_across_page_edges(page: int, cut: Directive) -> None:
    """An edit before the claim moves its tokens by any number; no token is lost at the edges of
    the pages that are copied, though those are computed again."""
    scheduler = ClaimScheduler(1600, page=page)
    first, _ = scheduler.serve(text("s", 400), opens("s"))
    scheduler.claim("s", 330, start=250)
    moved = cut.end - cut.start - len(cut.replacement)
    edited, record = scheduler.edit(first, "s", "t2", (cut,))
    assert record.receipt.outcome is Outcome.SPLICED
    claim = scheduler.status().claim.predicate
    assert (claim.source, claim.start, claim.end) == ("t2", 250 - moved, 330 - moved)
    assert scheduler.status().state is ClaimState.MATERIALIZED
    whole = -(-claim.end // page) * page
    assert scheduler.cache.protected_size() == whole
    turn = scheduler.engine.turn_of(edited)
    assert turn is not None
    locked = scheduler.cache.peek(turn.keys(source_of(edited))[:whole], turn.space)
    assert set(locked.tolist()) == scheduler.locked_slots()
    scheduler.check()


@pytest.mark.parametrize("page", [16, 64])
def test_a_claim_moves_to_the_page_that_an_edit_computed_again(page: int) -> None:
    """The edit is after the claim, but in its last page: the session uses another page now."""
    scheduler = ClaimScheduler(40 * page, page=page)
    first, _ = scheduler.serve(text("s", 6 * page), opens("s"))
    end = 2 * page - 6
    scheduler.claim("s", end)
    edited, _ = scheduler.edit(first, "s", "t2", (Directive(end + 2, end + 4),))
    assert scheduler.status().claim.predicate.source == "t2"
    turn = scheduler.engine.turn_of(edited)
    assert turn is not None
    held = scheduler.cache.peek(turn.keys(source_of(edited))[: 2 * page], turn.space)
    assert set(held.tolist()) == scheduler.locked_slots()
    assert pages(scheduler) == (2, 2, 2)
    scheduler.check()


@pytest.mark.parametrize("page", [16, 64])
def test_an_edit_that_leaves_no_page_harms_the_claim(page: int) -> None:
    """Some of its tokens are still there, in a page that the turn doesn't fill."""
    scheduler = ClaimScheduler(20 * page, page=page)
    first, _ = scheduler.serve(text("s", 4 * page), opens("s"))
    scheduler.claim("s", 4 * page, start=page)
    scheduler.edit(first, "s", "t2", (Directive(4, 4 * page - 3),))
    status = scheduler.status()
    assert (status.state, status.cause) == (ClaimState.HARMED, "edited away")
    scheduler.check_idle()


@pytest.mark.parametrize("page", [16, 64])
def test_hits_and_levels_are_of_whole_pages(page: int) -> None:
    """A hit found all pages of a claim; levels are tokens."""
    scheduler = ClaimScheduler(20 * page, page=page)
    tokens = text("s", 4 * page)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 2 * page - 5)
    scheduler.serve([*tokens[: 2 * page - 5], 1, 2], opens("s", "t2"))
    assert scheduler.status().hits == 0
    scheduler.serve([*tokens[: 2 * page], 1, 2], opens("s", "t3"))
    assert scheduler.status().hits == 1
    assert held_by_claims(scheduler.keeper.holds(), page).total == 2 * page


@pytest.mark.parametrize("page", [16, 64])
def test_events_count_pages(page: int) -> None:
    """Runs, needs and what is free are pages of the engine, and the pool is of whole pages."""
    scheduler = ClaimScheduler(10 * page + 5, page=page)
    scheduler.serve(text("s", 4 * page), opens("s"))
    scheduler.claim("s", 3 * page)
    scheduler.submit(text("active", 7 * page - 1), opens("active"))
    opened, *_, arrived, refused = scheduler.keeper.ledger
    assert (opened.usable, opened.page_size, opened.strict) == (10, page, True)
    (found,) = [event for event in scheduler.keeper.ledger if isinstance(event, Found)]
    (locked,) = [event for event in scheduler.keeper.ledger if isinstance(event, Locked)]
    assert found.runs == locked.runs and [run.pages for run in found.runs] == [3]
    assert (arrived.prompt, arrived.pages) == (7, 8)
    assert (refused.protected, refused.held, refused.matched) == (3, 0, ())


@pytest.mark.parametrize("page", [2, 8, 256])
def test_pages_of_other_sizes_take_no_claims(page: int) -> None:
    """The refusal names the sizes that do."""
    tree = tree_of(None)
    desk = SchedulerClaims(tree, SourceRegistry(), usable=4096, page_size=page)
    message = refused(desk)
    assert f"pages of {page} tokens" in message
    assert "--page-size of 1, 16, 32, 64, 128" in message


def test_slots_that_fill_no_page_are_nobodys() -> None:
    """SGLang's allocator has whole pages only."""
    tree = tree_of(None)
    desk = SchedulerClaims(tree, SourceRegistry(), usable=10 * 64 + 5, page_size=64)
    assert desk.keeper.book.crowded(Demand("a", 1, 1)).usable == 10 * 64


def test_a_sharded_pool_takes_no_claims() -> None:
    """SGLang reserves more than a page for each request there."""
    pool: Any = SimpleNamespace()
    allocator = PageInterleavePoolAllocator(1024, 64, 2, torch.float32, "cpu", pool, False)
    tree = tree_of(allocator)
    desk = SchedulerClaims(tree, SourceRegistry(), usable=2048, page_size=64)
    assert "drop --enable-kv-cache-sharding" in refused(desk)


def tree_of(allocator: Any) -> Any:
    """The part of a tree on which it depends if claims are taken."""
    return SimpleNamespace(row_allocator=allocator, speculative="", cache_controller=None)


def refused(desk: SchedulerClaims) -> str:
    """The answer of a desk that takes no claims."""
    reply = desk.carry_out(ClaimMessage(1, 0, '{"command":"list"}')).reply
    assert reply.problem is not None
    assert reply.problem.code is ProblemCode.UNSUPPORTED
    return reply.problem.message
