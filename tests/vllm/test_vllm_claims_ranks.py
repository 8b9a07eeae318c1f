"""Soft claims on vLLM: whose blocks are given away first, and who is notified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from claimant import TENANT, Claimant, claiming_engine
from contract_kit import BLOCK
from splice_kit import Answer

from leyline_engine.contract import ClaimKind, ClaimState, Directive, EditPayload

BLOCKS = 64
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


def fill(claimant: Claimant, *names: str) -> dict[str, Answer]:
    """Sessions of 10 full blocks and one that isn't, the earlier named the less recently used."""
    return {name: claimant.opened(name, claimant.text(330)) for name in names}


def left(claimant: Claimant, sessions: dict[str, Answer]) -> set[str]:
    """The sessions that are cached as a whole."""
    claimant.check()
    return {name for name, each in sessions.items() if claimant.cached(each.tokens) == 320}


def take(claimant: Claimant, blocks: int) -> None:
    """Have somebody take blocks, and no more than those."""
    claimant.take(blocks * BLOCK - 7)
    claimant.check()


def test_ranked_blocks_go_after_all_others_in_order_of_rank(claimant: Claimant) -> None:
    """KV without a claim goes first, however recent; then by priority, however old."""
    sessions = fill(claimant, "nine", "one", "five", "none")
    for name, priority in (("five", 5), ("nine", 9), ("one", 1)):
        claimant.claim(name, 320, kind=SOFT, priority=priority)
    names = {"nine", "one", "five"}
    take(claimant, BLOCKS - 1 - 30)
    assert left(claimant, sessions) == names
    for step, gone in enumerate(("one", "five", "nine")):
        take(claimant, BLOCKS - 1 - 30 + 10 * step + 1)
        names.remove(gone)
        assert left(claimant, sessions) == names
        assert claimant.state(gone) is ClaimState.EVICTED
        assert all(claimant.state(name) is ClaimState.MATERIALIZED for name in names)
    assert claimant.status("nine").pressure > 2


def test_of_equal_ranks_the_least_recently_used_goes_first(claimant: Claimant) -> None:
    """Among claims of one priority, recency counts as it does among unclaimed KV."""
    sessions = fill(claimant, "x", "y", "z")
    for name in ("y", "z", "x"):
        claimant.claim(name, 320, kind=SOFT, priority=5)
    claimant.engine.ask(sessions["x"].prompt)
    take(claimant, BLOCKS - 1 - 29)
    assert left(claimant, sessions) == {"x", "z"}
    take(claimant, BLOCKS - 1 - 19)
    assert left(claimant, sessions) == {"x"}


def test_a_claim_of_priority_0_ranks_as_what_nobody_claims(claimant: Claimant) -> None:
    """It goes by recency, and the claim is notified."""
    sessions = fill(claimant, "zero")
    claimant.claim("zero", 320, kind=SOFT, priority=0)
    sessions |= fill(claimant, "young")
    take(claimant, BLOCKS - 1 - 12)
    assert left(claimant, sessions) == {"young"}
    assert claimant.state("zero") is ClaimState.EVICTED


def test_a_share_holds_until_too_little_is_left(claimant: Claimant) -> None:
    """A claim of two fifths outlives the end of its path, and ends with what it asks for."""
    sessions = fill(claimant, "s")
    claimant.claim("s", 320, kind=SOFT, share=0.4, priority=1)
    take(claimant, BLOCKS - 1 - 6)
    assert claimant.cached(sessions["s"].tokens) == 6 * BLOCK
    status = claimant.status("s")
    assert (status.state, status.resident_tokens) == (ClaimState.MATERIALIZED, 6 * BLOCK)
    take(claimant, BLOCKS - 1 - 3)
    assert claimant.state("s") is ClaimState.EVICTED


def test_a_claim_on_the_end_of_a_path_ranks_all_that_it_depends_on(claimant: Claimant) -> None:
    """KV before the claimed span is given away no earlier than the span."""
    sessions = fill(claimant, "long")
    claimant.claim("long", 320, start=256, kind=SOFT, priority=1)
    sessions |= fill(claimant, "young")
    take(claimant, BLOCKS - 1 - 10)
    assert left(claimant, sessions) == {"long"}
    assert claimant.status("long").resident_tokens == 2 * BLOCK


def test_a_demoted_claim_keeps_its_rank(claimant: Claimant) -> None:
    """It goes after unclaimed KV and before higher ranks."""
    sessions = fill(claimant, "hard", "soft", "none")
    claimant.claim("hard", 320, priority=3)
    claimant.claim("soft", 320, kind=SOFT, priority=5)
    claimant.demote("hard")
    assert not claimant.leyline.claims.shelf.held
    take(claimant, BLOCKS - 1 - 20)
    assert left(claimant, sessions) == {"hard", "soft"}
    take(claimant, BLOCKS - 1 - 19)
    assert left(claimant, sessions) == {"soft"}
    assert claimant.state("hard") is ClaimState.EVICTED


def test_ranks_over_one_another(claimant: Claimant) -> None:
    """Of overlapping claims the higher one holds; what is shared with a lock stays put."""
    sessions = fill(claimant, "s")
    tokens = sessions["s"].tokens
    claimant.claim("s", 320, id="low", kind=SOFT, priority=1, share=0.2)
    claimant.claim("s", 224, id="high", kind=SOFT, priority=9)
    claimant.claim("s", 64, id="hard")
    take(claimant, BLOCKS - 1 - 7)
    assert claimant.cached(tokens) == 224
    assert claimant.status("low").resident_tokens == 224
    take(claimant, BLOCKS - 1 - 3)
    assert claimant.cached(tokens) == 96
    assert claimant.state("high") is ClaimState.EVICTED
    assert claimant.status("low").resident_tokens == 96
    assert claimant.status("hard").resident_tokens == 64


def test_a_claim_over_a_spliced_path_ranks_its_copies(claimant: Claimant) -> None:
    """The keys of what a splice moved are its lineage's; ranks find them like any others."""
    first = claimant.opened("s", claimant.text(330))
    edited = claimant.edit(first, "s", "a", "b", Directive(100, 132))
    assert edited.record is not None and edited.record.receipt.tokens.spliced > 0
    claimant.claim("s", 288, source="b", kind=SOFT, priority=1)
    sessions = fill(claimant, "young")
    take(claimant, BLOCKS - 1 - 9)
    assert left(claimant, sessions) == set()
    assert claimant.kept(("t", "s")) == 288
    take(claimant, BLOCKS - 1 - 8)
    assert claimant.state("s") is ClaimState.EVICTED


def test_a_double_under_the_same_key_replaces_no_ranked_block(claimant: Claimant) -> None:
    """A prompt of whole blocks that is sent again has its last block twice: the claim loses the one
    that it ranks, though its tokens are found."""
    prompt = claimant.text(320)
    claimant.opened("s", prompt)
    claimant.claim("s", 320, kind=SOFT, priority=0, share=0.5)
    claimant.engine.ask(prompt, decode=1)
    take(claimant, BLOCKS - 1 - 10)
    assert claimant.cached(prompt) == 320
    status = claimant.status("s")
    assert (status.state, status.resident_tokens) == (ClaimState.MATERIALIZED, 288)


def test_a_later_turn_of_the_same_name_changes_no_claim(claimant: Claimant) -> None:
    """Claims on a retired turn and on another that took its name hold each its own blocks."""
    first = claimant.opened("s")
    claimant.claim("s", 288, id="first")
    retiring = EditPayload(session="s", scope=TENANT, turn="b", retire=("a",))
    claimant.engine.ask(claimant.text(70), retiring)
    second = claimant.opened("s")
    claimant.claim("s", 288, id="second")
    claimant.check()
    claimant.press()
    claimant.check()
    assert claimant.cached(first.tokens) == claimant.cached(second.tokens) == 288
    assert len(claimant.leyline.claims.shelf.held) == 18
