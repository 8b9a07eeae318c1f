"""Claims on vLLM: what they hold, and the requests that they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from claimant import Claimant, claiming_engine, refusal
from contract_kit import BLOCK

from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    EditPayload,
    Outcome,
    ProblemCode,
    Reason,
)

BLOCKS = 64
POOL = (BLOCKS - 1) * BLOCK
HELD = 288
"""Tokens of a claim: nine blocks of a turn of 300."""
SOFT = ClaimKind.SOFT


@pytest.fixture(scope="module")
def started(vllm_model: Path) -> Iterator[Claimant]:
    """An engine of few blocks."""
    with claiming_engine(vllm_model, BLOCKS) as opened:
        yield opened


@pytest.fixture
def claimant(started: Claimant, caplog: pytest.LogCaptureFixture) -> Iterator[Claimant]:
    """Claims on it; in the end all is free, and nothing has failed inside vLLM's loop."""
    yield started
    started.check()
    started.rest()
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


def of(session: str, turn: str = "a", *, tenant: str = "t") -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope=tenant, turn=turn)


def test_a_lock_survives_pressure_until_it_is_released(claimant: Claimant) -> None:
    """A hard claim keeps its tokens cached; without it, they go like all others."""
    claimed, control = claimant.opened("s"), claimant.opened("other")
    claimant.claim("s", HELD)
    claimant.check()
    claimant.press()
    assert claimant.cached(control.tokens) == 0, "control: there was no pressure"
    assert claimant.cached(claimed.tokens) == HELD
    claimant.release("s")
    claimant.press()
    assert claimant.cached(claimed.tokens) == 0


@pytest.mark.parametrize(
    ("start", "end", "share", "locked"),
    [
        pytest.param(0, 100, 1.0, 4, id="the front"),
        pytest.param(64, 160, 1.0, 5, id="the middle, and what it depends on"),
        pytest.param(64, 192, 0.5, 4, id="half of the middle, from its front"),
        pytest.param(0, 300, 0.01, 1, id="a block"),
    ],
)
def test_nothing_beyond_the_edge_is_held(
    claimant: Claimant, start: int, end: int, share: float, locked: int
) -> None:
    """Blocks after the claim's last one go like all others."""
    claimed = claimant.opened("s")
    claimant.claim("s", end, start=start, share=share)
    claimant.check()
    assert sorted(claimant.leyline.claims.shelf.held.values()) == [1] * locked
    claimant.press()
    assert claimant.cached(claimed.tokens) == locked * BLOCK


def test_sessions_that_share_a_prefix_lock_it_once(claimant: Claimant) -> None:
    """Two tenants' claims over the same KV count once, and the first release frees nothing."""
    shared = claimant.text(320)
    one = claimant.opened("s", (*shared, *claimant.text(70)))
    two = claimant.opened("s", (*shared, *claimant.text(70)), tenant="u")
    claimant.claim("s", 384)
    claimant.claim("s", 384, tenant="u")
    book = claimant.leyline.claims.keeper.book
    assert book.protected_pages == 10 + 2 + 2
    claimant.check()
    claimant.release("s")
    assert book.protected_pages == 12
    claimant.press()
    assert claimant.cached(two.tokens) == 384
    assert claimant.cached(one.tokens) == 320


def test_a_request_that_never_fits_beside_a_claim_ends_at_once(claimant: Claimant) -> None:
    """It isn't queued; each tenant learns its own claims by name and others' by number; and it
    runs after the release."""
    claimant.opened("s")
    claimant.claim("s", HELD)
    prompt = claimant.text(1700)
    refused = {}
    for tenant in ("t", "u"):
        name = claimant.engine.start(prompt, of("big", tenant=tenant), decode=100)
        assert not claimant.engine.scheduler.waiting
        (refused[tenant],) = claimant.engine.run([name])
        assert not refused[tenant].output
    mine, theirs = refusal(refused["t"]), refusal(refused["u"])
    assert (mine.own, mine.others, theirs.own, theirs.others) == (("s",), 0, (), 1)
    # A prompt and all of its answer but the last token, in whole blocks.
    assert (mine.needed, mine.protected, mine.usable) == (57 * BLOCK, HELD, POOL)
    assert "yours: s" in refused["t"].error and "yours" not in refused["u"].error
    (plain,) = claimant.engine.run([claimant.engine.start(prompt, decode=100)])
    assert plain.error.endswith(
        "1 claims leave 1728 of 2016. It can run when one of them is released."
    )
    assert claimant.status("s").pressure == 3
    claimant.release("s")
    assert len(claimant.engine.ask(prompt, of("big"), decode=100).output) == 100


@pytest.mark.parametrize(("prompt", "runs"), [(1728 - 7, True), (1728 - 6, False)])
def test_the_limit_is_vllms_own_to_the_token(claimant: Claimant, prompt: int, runs: bool) -> None:
    """Beside 9 claimed blocks of 63, a request may fill the other 54; its last token has no KV."""
    claimant.opened("s")
    claimant.claim("s", HELD)
    answer = claimant.engine.ask(claimant.text(prompt), of("edge"), decode=8)
    if runs:
        assert len(answer.output) == 8
    else:
        assert refusal(answer).needed == 55 * BLOCK


def test_what_is_matched_under_a_lock_counts_once(claimant: Claimant) -> None:
    """A request that continues claimed KV fits where a stranger's of the same length can't."""
    claimed = claimant.opened("s")
    claimant.claim("s", HELD)
    more = claimant.text(1500)
    goes_on = claimant.engine.ask((*claimed.tokens, *more), of("s", "b"))
    assert (len(goes_on.output), goes_on.cached) == (8, HELD)
    assert claimant.status("s").hits == 1
    stranger = claimant.engine.ask((*claimant.text(len(claimed.tokens)), *more), of("x"))
    assert refusal(stranger).own == ("s",)


@pytest.mark.parametrize("how", ["release", "expire"])
def test_what_was_refused_runs_when_the_claim_is_gone(claimant: Claimant, how: str) -> None:
    """The same request is served after the release, or when the claim's time is up."""
    claimed = claimant.opened("s")
    claimant.claim("s", HELD, ttl_s=2)
    prompt = claimant.text(1750)
    assert refusal(claimant.engine.ask(prompt, of("big"))).retry_after_ms == 2000
    if how == "release":
        claimant.release("s")
    else:
        claimant.tick(1999)
        assert claimant.state("s") is ClaimState.MATERIALIZED
        assert refusal(claimant.engine.ask(prompt, of("big"))).retry_after_ms == 1
        claimant.tick(1)
        assert claimant.state("s") is ClaimState.EXPIRED
    claimant.check()
    assert len(claimant.engine.ask(prompt, of("big")).output) == 8
    claimant.press()
    assert claimant.cached(claimed.tokens) == 0


def test_who_waits_is_refused_when_a_claim_comes(claimant: Claimant) -> None:
    """A waiting request that no longer fits ends at the next step; one that runs continues."""
    claimant.opened("s")
    runs = claimant.engine.start(claimant.text(600), of("runs"), decode=30)
    claimant.step(3)
    waits = claimant.engine.start(claimant.text(1750), of("waits"))
    claimant.step(2)
    assert len(claimant.engine.scheduler.waiting) == 1
    claimant.claim("s", HELD)
    claimant.step()
    assert not claimant.engine.scheduler.waiting
    answers = claimant.engine.run([runs])
    assert len(answers[0].output) == 30
    receipt = claimant.engine.sent.records[waits].receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.REFUSED_BY_CLAIM)
    assert receipt.refused is not None and receipt.refused.own == ("s",)
    assert receipt.detail == "claims leave too little room"


@pytest.mark.parametrize("decode", [60, 300])
def test_decoding_that_outgrows_the_claims_ends_with_their_name(
    claimant: Claimant, decode: int
) -> None:
    """A claim that comes while a request decodes leaves it no room. vLLM preempts it; it is
    refused then, with what it has written, instead of beginning again for ever."""
    claimant.opened("s")
    name = claimant.engine.start(claimant.text(1690), of("long"), decode=decode)
    claimant.step(8)
    claimant.claim("s", HELD)
    (answer,) = claimant.engine.run([name])
    # 54 blocks, and the token that has no KV yet.
    assert len(answer.tokens) == 54 * BLOCK + 1
    assert refusal(answer).own == ("s",)
    assert answer.record is not None
    assert answer.record.receipt.detail == "decoding outgrew what claims leave"
    assert claimant.state("s") is ClaimState.MATERIALIZED


def test_a_preempted_request_that_still_fits_goes_on(claimant: Claimant) -> None:
    """Two requests outgrow what a claim leaves together: one waits, and both end."""
    claimant.opened("s")
    claimant.claim("s", HELD)
    names = [
        claimant.engine.start(claimant.text(800), of(f"n{number}"), decode=120)
        for number in range(2)
    ]
    answers = claimant.engine.run(names)
    assert [len(answer.output) for answer in answers] == [120, 120]
    assert claimant.state("s") is ClaimState.MATERIALIZED


def test_a_claim_comes_back_as_another_kind(claimant: Claimant) -> None:
    """Revisions take the locks, give them back and take them again; older ones change nothing."""
    claimant.opened("s")
    hard = ClaimKind.HARD
    for kind, end, locked in ((hard, HELD, 9), (SOFT, HELD, 0), (hard, 100, 4), (hard, HELD, 9)):
        claimant.claim("s", end, kind=kind)
        assert len(claimant.leyline.claims.shelf.held) == locked
        claimant.check()
    reply = claimant.try_claim("s", 100, revision=1)
    assert reply.problem is not None
    assert reply.problem.code is ProblemCode.STALE_REVISION
    assert len(claimant.leyline.claims.shelf.held) == 9


def test_a_claim_on_what_is_no_longer_cached_fails(claimant: Claimant) -> None:
    """KV that was evicted before it was claimed is not promised."""
    claimant.opened("s")
    claimant.press()
    (status,) = claimant.try_claim("s", HELD).claims
    assert status.state is ClaimState.MATERIALIZATION_FAILED
    assert status.cause == "0 of 9 pages resident"


@pytest.mark.parametrize("running", [False, True], ids=["idle", "with requests"])
def test_a_flush_harms_what_it_takes(claimant: Claimant, running: bool) -> None:
    """Locked, ranked or demoted: nothing is left, and each claim says why. vLLM empties its cache
    under requests only if it may preempt them."""
    for name in ("hard", "soft", "demoted"):
        claimant.opened(name)
        claimant.claim(name, 96, kind=SOFT if name == "soft" else ClaimKind.HARD, priority=2)
    claimant.demote("demoted")
    if running:
        name = claimant.engine.start(claimant.text(100), of("runs"), decode=20)
        claimant.step(3)
        assert not claimant.engine.scheduler.reset_prefix_cache()
        assert claimant.state("hard") is ClaimState.MATERIALIZED
    assert claimant.engine.scheduler.reset_prefix_cache(reset_running_requests=running)
    for each in ("hard", "soft", "demoted"):
        status = claimant.status(each)
        assert (status.state, status.cause) == (ClaimState.HARMED, "flushed")
    claimant.check()
    if running:
        (answer,) = claimant.engine.run([name])
        assert len(answer.output) == 20
