"""Claims on a replay engine whose tree has whole pages only."""

from __future__ import annotations

import pytest
from claims_kit import (
    ask,
    cached,
    claim,
    cut,
    keep,
    make_engine,
    release,
    run,
    start,
    status,
    tokens,
)

from leyline_engine.contract import ClaimState, ProblemCode
from leyline_replay.engine import PromptTooLongError, RefusedByClaimError

PAGES = [16, 64]


@pytest.mark.parametrize("page", PAGES)
def test_a_claim_locks_whole_pages(page: int) -> None:
    """It holds those with its tokens; a partial last page isn't cached, and can't be claimed."""
    engine = make_engine(12 * page, page)
    prompt = keep(engine, "t1", 4 * page + 5, 1)
    (found,) = claim(engine, "t1", 3 * page - 2, page + 3).claims
    assert found.state is ClaimState.MATERIALIZED
    assert found.resident_tokens == found.required_tokens == 2 * page
    assert engine.claims.keeper.book.protected_pages == 3
    (found,) = claim(engine, "t1", 4 * page + 5, 3 * page + 3, revision=2).claims
    assert found.resident_tokens == found.required_tokens == page
    assert engine.claims.keeper.book.protected_pages == 4
    claim(engine, "t1", 3 * page - 2, page + 3, revision=3)
    engine.cache.release(engine.cache.allocate(engine.cache.free_count + 1))
    assert cached(engine, prompt) == 3 * page
    engine.check_integrity()
    problem = claim(engine, "t1", 4 * page + 5, 4 * page, id="d").problem
    assert problem is not None
    assert (problem.code, problem.field) == (ProblemCode.INVALID_CLAIM, "predicate.start")


@pytest.mark.parametrize("page", [1, *PAGES])
@pytest.mark.parametrize("more", [0, 7])
def test_the_limit_is_the_engines_own_to_the_slot(page: int, more: int) -> None:
    """Slots are taken one by one: what a claim leaves can be used to the last, also those of the
    pool that fill no page."""
    engine = make_engine(8 * page + 40 + more, page)
    keep(engine, "t1", 4 * page, 1)
    claim(engine, "t1", 3 * page)
    room = engine.cache.capacity - 3 * page
    with pytest.raises(RefusedByClaimError) as refused:
        engine.admit(ask(tokens(room - 4, 2), room=4))
    assert refused.value.refusal.needed == room + 1
    assert refused.value.refusal.protected == 3 * page
    run(engine, tokens(room - 5, 2), output=4)
    release(engine)
    start(engine, ask(tokens(room - 4, 3), room=4))


def test_a_pool_that_could_not_hold_it_is_no_claims_fault() -> None:
    """The engine's own limit is the answer."""
    engine = make_engine(8 * 16 + 5, 16)
    keep(engine, "t1", 64, 1)
    claim(engine, "t1", 48)
    with pytest.raises(PromptTooLongError):
        engine.admit(ask(tokens(8 * 16 + 3, 2), room=4))


@pytest.mark.parametrize("page", [1, *PAGES])
@pytest.mark.parametrize("gap", [(70, 75), (70, 102)])
def test_a_claim_follows_its_tokens_across_page_edges(page: int, gap: tuple[int, int]) -> None:
    """No token is lost at the edges of copied pages, which are computed again."""
    engine = make_engine(1400, page)
    keep(engine, "t1", 400, 1)
    claim(engine, "t1", 330, 250)
    prompt, payload = cut(engine, "t1", "t2", gap)
    record = run(engine, prompt, payload)
    assert record.receipt.tokens.spliced > 0
    moved = gap[1] - gap[0]
    span = status(engine).claim.predicate
    assert (span.source, span.start, span.end) == ("t2", 250 - moved, 330 - moved)
    assert status(engine).state is ClaimState.MATERIALIZED
    assert engine.claims.keeper.book.protected_pages == -(-span.end // page)
