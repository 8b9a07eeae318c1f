"""Claims in SGLang's own tree and admission: locked KV stays, and refused requests get a reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from claim_scheduler import ClaimScheduler, opens, text
from scheduler_kit import source_of

from leyline_engine.contract import ClaimKind, ClaimState, Directive, ProblemCode, Reason

pytestmark = pytest.mark.usefixtures("server_args")

HARD, SOFT = ClaimKind.HARD, ClaimKind.SOFT


@pytest.fixture(autouse=True)
def nothing_contained(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failure inside SGLang's loop is logged and not raised: it must fail the test."""
    yield
    errors = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not errors


def test_a_hard_claim_survives_pressure_and_its_neighbour_goes() -> None:
    """The older session's KV stays because it is claimed, the younger one's goes."""
    scheduler = ClaimScheduler(100)
    old, young = text("old", 30), text("young", 30)
    scheduler.serve(old, opens("old"))
    scheduler.claim("old", 31)
    scheduler.serve(young, opens("young"))
    scheduler.serve(text("active", 60))
    assert scheduler.cached(old) == 30
    assert scheduler.cached(young) < 10
    assert scheduler.status().state is ClaimState.MATERIALIZED
    assert scheduler.status().resident_tokens == 31


@pytest.mark.parametrize(
    ("start", "end", "share", "locked"),
    [
        pytest.param(0, 20, 1.0, 20, id="the front"),
        pytest.param(10, 20, 1.0, 20, id="the middle, and what it depends on"),
        pytest.param(10, 20, 0.5, 15, id="half of the middle, from its front"),
        pytest.param(0, 31, 0.01, 1, id="a token"),
    ],
)
def test_nothing_beyond_the_edge_is_held(start: int, end: int, share: float, locked: int) -> None:
    """A path is split where the claim ends, so that its continuation can be evicted."""
    scheduler = ClaimScheduler(100)
    tokens = text("s", 30)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", end, start=start, share=share)
    assert scheduler.cache.protected_size() == locked
    scheduler.serve(text("active", 96 - locked))
    assert scheduler.cached(tokens) == locked


def test_sessions_that_share_a_prefix_lock_it_once() -> None:
    """Two tenants' claims over the same KV count once, and the first release frees nothing."""
    scheduler = ClaimScheduler(200)
    system = text("system", 40)
    one, two = [*system, *text("one", 10)], [*system, *text("two", 10)]
    scheduler.serve(one, opens("one"))
    scheduler.serve(two, opens("two", tenant="b"))
    scheduler.claim("one", 50)
    scheduler.claim("two", 50, tenant="b")
    assert scheduler.keeper.book.protected_pages == 60
    scheduler.check()
    scheduler.release()
    assert scheduler.keeper.book.protected_pages == 50
    scheduler.serve(text("active", 140))
    assert scheduler.cached(two) == 50
    assert scheduler.cached(one) == 40
    scheduler.release(tenant="b")
    scheduler.check_idle()


def test_turns_of_one_name_are_not_mixed_up() -> None:
    """Sessions may call different turns alike: their claims lock, and lose, their own KV."""
    scheduler = ClaimScheduler(200)
    mine, theirs = text("mine", 30), text("theirs", 30)
    scheduler.serve(mine, opens("s"))
    scheduler.serve(theirs, opens("s", tenant="b"))
    scheduler.claim("s", 31)
    scheduler.claim("s", 31, tenant="b")
    assert scheduler.keeper.book.protected_pages == 62
    scheduler.check()
    scheduler.serve(mine, opens("s", "t2", forget=("all",)))
    assert scheduler.status().state is ClaimState.HARMED
    assert scheduler.status(tenant="b").state is ClaimState.MATERIALIZED
    assert scheduler.cached(theirs) == 30
    scheduler.check()


@pytest.mark.parametrize(("prompt", "runs"), [(56, True), (57, False)])
def test_the_limit_is_sglangs_own_to_the_token(prompt: int, runs: bool) -> None:
    """Prompt, output and a page must be less than what 40 claimed tokens leave of 100."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 40), opens("s"))
    scheduler.claim("s", 40)
    req = scheduler.submit(text("active", prompt), opens("active"), decode=2)
    scheduler.drain()
    if runs:
        assert len(req.output_ids) == 2
        return
    refusal = scheduler.refusal(req)
    assert (refusal.needed, refusal.protected, refusal.usable) == (60, 40, 100)
    assert (refusal.own, refusal.others, refusal.retry_after_ms) == (("c",), 0, None)
    assert scheduler.engine.registry.get(("a", "active"), "t1") is None


def test_what_is_matched_under_a_lock_counts_once() -> None:
    """A request that continues from claimed KV fits where a stranger's of the same length can't."""
    scheduler = ClaimScheduler(100)
    tokens = text("s", 60)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 60)
    goes_on, _ = scheduler.serve([*tokens, *text("more", 20)], opens("s", "t2"))
    assert len(goes_on.output_ids) == 2
    stranger = scheduler.submit(text("stranger", 80), opens("x", tenant="b"))
    refusal = scheduler.refusal(stranger)
    assert (refusal.own, refusal.others) == ((), 1)
    assert refusal.protected == 60


def test_a_plain_request_is_refused_without_names() -> None:
    """A request without an envelope has no tenant: the sentence counts claims and names none."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 60), opens("s"))
    scheduler.claim("s", 60, id="secret-name", ttl_s=9)
    scheduler.tick(1500)
    req = scheduler.submit(text("plain", 60))
    assert req not in scheduler.waiting
    sent = scheduler.aborted[req.rid].finished_reason
    assert sent is not None
    assert (sent["status_code"], sent["err_type"]) == (503, "refused_by_claim")
    assert "1 claims leave 40 of 100. It can run when 8 s have passed." in sent["message"]
    assert "secret-name" not in sent["message"]


def test_a_request_that_no_pool_could_hold_is_not_the_claims_fault() -> None:
    """It is left to SGLang, which has its own word for it."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 40), opens("s"))
    scheduler.claim("s", 40)
    req = scheduler.submit(text("huge", 120), opens("huge"))
    assert req.rid not in scheduler.aborted
    assert req in scheduler.waiting


@pytest.mark.parametrize("how", ["release", "expire"])
def test_what_was_refused_runs_when_the_claim_is_gone(how: str) -> None:
    """The same request is served after the release, or when the claim's time is up."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 60), opens("s"))
    scheduler.claim("s", 60, ttl_s=2)
    refused = scheduler.submit(text("active", 60), opens("active"))
    assert scheduler.refusal(refused).retry_after_ms == 2000
    if how == "release":
        assert scheduler.release().state is ClaimState.RELEASED
    else:
        scheduler.tick(1999)
        assert scheduler.status().state is ClaimState.MATERIALIZED
        scheduler.tick(1)
        assert scheduler.status().state is ClaimState.EXPIRED
    scheduler.check_idle()
    served, _ = scheduler.serve(text("active", 60), opens("active"))
    assert len(served.output_ids) == 2


def test_who_waits_is_refused_when_a_claim_comes() -> None:
    """A waiting request that no longer fits ends at the next batch; the one that runs continues."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 30), opens("s"))
    runs = scheduler.submit(text("runs", 40), opens("runs"), decode=8)
    scheduler.step()
    waits = scheduler.submit(text("waits", 70), opens("waits"))
    scheduler.step()
    assert waits in scheduler.waiting
    scheduler.claim("s", 30)
    scheduler.step()
    assert scheduler.refusal(waits).needed == 73
    assert waits not in scheduler.waiting
    scheduler.drain()
    assert len(runs.output_ids) == 8
    assert scheduler.engine.turns == {}


def test_what_is_retracted_and_no_longer_fits_says_so() -> None:
    """A request that gave way to another in decoding is not queued again after a claim."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 40), opens("s"))
    one = scheduler.submit(text("one", 10), opens("one"), decode=20)
    two = scheduler.submit(text("two", 10), opens("two"), decode=56)
    scheduler.step()
    scheduler.step()
    scheduler.claim("s", 40)
    scheduler.retract(scheduler.running[1])
    assert scheduler.refusal(two).needed == 67
    turn = scheduler.engine.turn_of(two)
    assert turn is not None
    receipt = scheduler.sender.records[turn.message_id].receipt
    assert (receipt.reason, receipt.turn) == (Reason.REFUSED_BY_CLAIM, "")
    assert receipt.detail == "decoding outgrew what claims leave"
    scheduler.drain()
    assert len(one.output_ids) == 20


def test_decoding_that_outgrows_the_claims_ends_with_their_name() -> None:
    """A claim that comes while a request decodes leaves it no room: stream and receipt say why."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 50), opens("s"))
    req = scheduler.submit(text("active", 30), opens("active"), decode=60)
    scheduler.step()
    scheduler.claim("s", 50)
    scheduler.drain()
    assert len(req.output_ids) < 60
    assert scheduler.refusal(req).own == ("c",)
    assert scheduler.engine.turns == {}
    scheduler.release()
    scheduler.check_idle()


def test_a_claim_that_moves_lets_nobody_wait_for_it() -> None:
    """A claim's move may lock more than before, where its old place was another's as well. Who
    waits and no longer fits is refused then, though no command came."""
    scheduler = ClaimScheduler(300)
    system = text("system", 100)
    first, _ = scheduler.serve(system, opens("s"))
    scheduler.serve(system, opens("other"))
    scheduler.claim("s", 100)
    scheduler.claim("other", 100, id="d")
    assert scheduler.keeper.book.protected_pages == 100
    waits = scheduler.submit(text("waits", 180), opens("waits"))
    scheduler.waiting.remove(waits)
    scheduler.edit(first, "s", "t2", (Directive(40, 50),))
    assert scheduler.keeper.book.protected_pages == 150
    scheduler.waiting.append(waits)
    scheduler.step()
    assert set(scheduler.refusal(waits).own) == {"c", "d"}


def test_what_matches_less_than_it_did_lets_nobody_wait() -> None:
    """A request fits by what it shares with a claim. If it shares that no more when it is
    admitted, it is refused instead of waiting for the claim's end."""
    scheduler = ClaimScheduler(200)
    tokens = text("s", 120)
    first, _ = scheduler.serve(tokens, opens("s"))
    edited, record = scheduler.edit(first, "s", "t2", (Directive(40, 50),))
    scheduler.claim("s", 110, source="t2")
    scheduler.step()
    prompt = [*source_of(edited), *text("more", 20)]
    goes_on = opens("s", "t3", lineage=record.receipt.lineage)
    req = scheduler.submit(prompt, goes_on)
    assert req in scheduler.waiting
    turn = scheduler.engine.turn_of(req)
    assert turn is not None
    scheduler.engine.forgets.fall_back(turn, Reason.TRANSFORM_FAILED, "the test's doing")
    scheduler.drain()
    assert scheduler.refusal(req).own == ("c",)


def test_a_claim_comes_back_as_another_kind() -> None:
    """Revisions take the locks, give them back and take them again; older ones change nothing."""
    scheduler = ClaimScheduler(100)
    tokens = text("s", 40)
    scheduler.serve(tokens, opens("s"))
    for revision, kind, end, locked in (
        (1, HARD, 40, 40),
        (2, SOFT, 40, 0),
        (4, HARD, 30, 30),
        (5, HARD, 40, 40),
    ):
        status = scheduler.claim("s", end, kind=kind, revision=revision)
        assert status.state is ClaimState.MATERIALIZED
        assert scheduler.cache.protected_size() == locked
        scheduler.check()
    reply = scheduler.try_claim("s", 10, kind=SOFT, revision=5)
    assert reply.problem is not None
    assert reply.problem.code is ProblemCode.STALE_REVISION
    assert scheduler.cache.protected_size() == 40
    scheduler.serve(text("active", 56))
    assert scheduler.cached(tokens) == 40


def test_hits_and_pressure_are_counted() -> None:
    """A hit is a request that found all of the claim; pressure, one that was refused for it."""
    scheduler = ClaimScheduler(100)
    tokens = text("s", 40)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 30)
    scheduler.serve([*tokens, 1, 2], opens("s", "t2"))
    scheduler.serve(tokens[:20], opens("s", "t3"))
    scheduler.serve(tokens, opens("stranger"))
    assert scheduler.status().hits == 1
    scheduler.submit(text("active", 90), opens("active"))
    assert (scheduler.status().hits, scheduler.status().pressure) == (1, 1)


@pytest.mark.parametrize("chunk", [None, 16])
def test_write_no_admit_leaves_nothing_behind(chunk: int | None) -> None:
    """KV that the session computes isn't found by its next request and isn't retained; KV shared
    with others, and others' own, is kept as ever."""
    scheduler = ClaimScheduler(200, chunk=chunk)
    tokens = text("s", 20)
    scheduler.serve(tokens, opens("s"))
    scheduler.claim("s", 20, kind=SOFT, write_no_admit=True)
    evictable = scheduler.cache.evictable_size()
    longer = [*tokens, *text("private", 40)]
    req, record = scheduler.serve(longer, opens("s", "t2"))
    assert record is not None
    assert (record.receipt.turn, record.receipt.tokens.prefix) == ("", 20)
    assert len(req.output_ids) == 2
    assert scheduler.cached(longer) == 20
    assert scheduler.cache.evictable_size() == evictable
    assert scheduler.engine.registry.get(("a", "s"), "t2") is None
    _, again = scheduler.serve(longer, opens("s", "t3"))
    assert again is not None and again.receipt.tokens.prefix == 20
    scheduler.serve(longer, opens("other"))
    assert scheduler.cached(longer) == 60
    scheduler.release()
    scheduler.serve([*longer, 5], opens("s", "t4"))
    assert scheduler.engine.registry.get(("a", "s"), "t4") is not None
    scheduler.check_idle()


def test_write_no_admit_splices_nothing_and_says_why() -> None:
    """An edit would leave its copies in the tree; the request runs as an ordinary prefill."""
    scheduler = ClaimScheduler(200)
    first, _ = scheduler.serve(text("s", 60), opens("s"))
    scheduler.claim("s", 20, kind=SOFT, write_no_admit=True)
    _, record = scheduler.edit(first, "s", "t2", (Directive(40, 45),))
    assert record.receipt.reason is Reason.REFUSED_BY_CLAIM
    assert record.receipt.tokens.spliced == 0
    scheduler.check()


def test_a_claim_between_two_chunks_ends_no_server() -> None:
    """SGLang relies on what it admitted. Where a claim took the slots of the next chunk, the
    prompt ends with the claim's name instead of the scheduler with an exception."""
    scheduler = ClaimScheduler(200, chunk=24)
    scheduler.serve(text("s", 80), opens("s"))
    req = scheduler.submit(text("long", 170), opens("long"))
    for _ in range(3):
        scheduler.step()
    assert scheduler.chunked is req
    scheduler.claim("s", 80)
    scheduler.drain()
    assert scheduler.refusal(req).own == ("c",)
    assert scheduler.engine.turns == {}
    scheduler.release()
    scheduler.check_idle()


def test_a_chunk_that_finds_no_room_beside_others_is_refused_for_now() -> None:
    """The claims alone would leave room, but not beside what runs: it may be sent again at once."""
    scheduler = ClaimScheduler(200, chunk=24)
    scheduler.serve(text("s", 40), opens("s"))
    runs = scheduler.submit(text("runs", 20), opens("runs"), decode=30)
    scheduler.step()
    req = scheduler.submit(text("long", 145), opens("long"))
    scheduler.step()
    assert scheduler.chunked is req
    scheduler.claim("s", 40)
    scheduler.drain()
    refusal = scheduler.refusal(req)
    assert (refusal.own, refusal.retry_after_ms) == (("c",), 0)
    assert len(runs.output_ids) == 30
    again = scheduler.submit(text("long", 145), opens("long", "t2"))
    scheduler.drain()
    assert len(again.output_ids) == 2
