"""The events that end or move a claim on vLLM, and sessions whose KV may not be kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from claimant import TENANT, Claimant, claiming_engine, refusal
from contract_kit import BLOCK, load_reference
from forget_story import HEAD, SECRET, Story, asked, counts_of, started
from secret_rows import SecretRows

from leyline_engine.claims.events import Lost
from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    Directive,
    EditPayload,
    GetClaimEvents,
    Reason,
)

BLOCKS = 64
SOFT = ClaimKind.SOFT
TOLD = 224
"""Tokens of a told story in whole blocks; the secret lies from the fourth of them on."""
BEFORE = HEAD // BLOCK * BLOCK


@pytest.fixture(scope="module")
def opened(vllm_model: Path) -> Iterator[Claimant]:
    """An engine of few blocks."""
    with claiming_engine(vllm_model, BLOCKS) as engine:
        yield engine


@pytest.fixture(scope="module")
def rows(opened: Claimant, vllm_model: Path) -> SecretRows:
    """Finds tokens in the pool."""
    return SecretRows(opened.engine, load_reference(vllm_model))


@pytest.fixture
def claimant(opened: Claimant, caplog: pytest.LogCaptureFixture) -> Iterator[Claimant]:
    """Claims on it; in the end all is free, and nothing has failed inside vLLM's loop."""
    yield opened
    opened.check()
    opened.rest()
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.fixture
def story(claimant: Claimant, rows: SecretRows) -> Story:
    """A session that was told a secret."""
    story = Story(claimant.engine)
    story.tell()
    assert rows.held(story.secret) == set(story.secret)
    return story


@pytest.mark.parametrize(
    ("demoted", "terms"),
    [
        pytest.param(False, {}, id="hard"),
        pytest.param(False, {"start": 160}, id="hard, after the secret"),
        pytest.param(False, {"kind": SOFT, "priority": 9}, id="soft"),
        pytest.param(True, {"priority": 3}, id="demoted"),
    ],
)
def test_a_forget_beats_a_claim(
    claimant: Claimant, story: Story, rows: SecretRows, demoted: bool, terms: dict[str, object]
) -> None:
    """Claimed or not, what read the secret is overwritten at once; the claim says that it was
    harmed, and what lies in front of the secret is cached as before."""
    claimant.claim(story.session, TOLD, source="t1", **terms)
    if demoted:
        claimant.demote(story.session)
    before = claimant.leyline.claims.keeper.ledger.last
    counts = story.forget()
    assert counts.overwritten > 0 and counts.pending == 0
    assert not rows.held(story.secret)
    status = claimant.status(story.session)
    assert (status.state, status.cause) == (ClaimState.HARMED, "forgotten")
    events = claimant.leyline.claims.keeper.ledger.behind(before, 100)
    (lost,) = (event for event in events if isinstance(event, Lost))
    assert sum(run.end - run.start for run in lost.runs) > 1
    assert claimant.cached(story.told) == BEFORE
    assert not claimant.leyline.claims.shelf.held


def test_what_lies_before_the_secret_stays_claimed(
    claimant: Claimant, story: Story, rows: SecretRows
) -> None:
    """A forget harms claims over what it takes, and no others."""
    other = claimant.opened("other", tenant="u")
    claimant.claim(story.session, BEFORE, source="t1", id="before")
    claimant.claim(story.session, TOLD, source="t1", id="over")
    claimant.claim("other", 288, tenant="u")
    story.forget()
    assert not rows.held(story.secret)
    assert claimant.state("before") is ClaimState.MATERIALIZED
    assert claimant.state("over") is ClaimState.HARMED
    assert claimant.state("other", "u") is ClaimState.MATERIALIZED
    claimant.check()
    claimant.press()
    assert claimant.cached(story.told) == BEFORE
    assert claimant.cached(other.tokens) == 288


def test_a_forget_waits_for_requests_and_not_for_claims(
    claimant: Claimant, story: Story, rows: SecretRows
) -> None:
    """Blocks that a running request holds are pending until it ends; the claim is harmed at
    once."""
    claimant.claim(story.session, TOLD, source="t1")
    reader = started(claimant.engine, (*story.told, 70), story.telling("b1"), decode=60)
    claimant.step(3)
    forgets = started(claimant.engine, story.redacted, story.forgetting(), decode=2)
    claimant.step(3)
    assert claimant.state(story.session) is ClaimState.HARMED
    claimant.check()
    forgot = claimant.engine.sent.records[forgets].receipt.forgot
    assert forgot is not None and forgot.pending > 0
    late = claimant.try_claim(story.session, BEFORE, source="t1", id="late").problem
    assert late is not None and late.field == "predicate.source"
    claimant.engine.run([reader])
    assert claimant.engine.sent.forgot[forgets].pending == 0
    assert not rows.held(story.secret)


def test_a_claim_over_the_secret_refuses_no_request_that_forgets_it(
    claimant: Claimant, story: Story, rows: SecretRows
) -> None:
    """The obstacle itself is forgotten: the request runs in the room that its forget makes."""
    claimant.claim(story.session, TOLD, source="t1")
    prompt = (*story.redacted, *[70] * 1650)
    assert refusal(claimant.engine.ask(claimant.text(len(prompt)), members())).own
    answer = asked(claimant.engine, prompt, story.forgetting())
    assert len(answer.output) == 8
    assert counts_of(claimant.engine, answer).overwritten > 0
    assert not rows.held(story.secret)
    assert claimant.state(story.session) is ClaimState.HARMED


def test_a_refused_request_forgets_all_the_same(
    claimant: Claimant, story: Story, rows: SecretRows
) -> None:
    """Another's claim is in its way: it doesn't run, but what it forgets is gone."""
    claimant.opened("other", claimant.text(700), tenant="u")
    claimant.claim("other", 672, tenant="u")
    prompt = (*story.redacted, *[70] * 1300)
    answer = asked(claimant.engine, prompt, story.forgetting())
    told = refusal(answer)
    assert (told.own, told.others) == ((), 1)
    assert counts_of(claimant.engine, answer).overwritten > 0
    assert not rows.held(story.secret)
    assert claimant.state("other", "u") is ClaimState.MATERIALIZED


def test_a_forget_that_failed_midway_waits_for_no_claim(
    claimant: Claimant,
    story: Story,
    rows: SecretRows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All that the session published is condemned then, and removed though it was locked."""
    claimant.claim(story.session, TOLD, source="t1")

    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("the test's doing")

    with monkeypatch.context() as broken:
        broken.setattr(claimant.leyline._forgetter, "forget", fails)
        story.forget()
    assert claimant.state(story.session) is ClaimState.HARMED
    assert not rows.held(story.secret)
    assert [record.message for record in caplog.records if record.exc_info]
    caplog.clear()


def test_a_claim_follows_its_tokens(claimant: Claimant) -> None:
    """An edit before it moves a claim; within it, shrinks it; over it, ends it as harmed. Its
    blocks stay under pressure meanwhile."""
    first = claimant.opened("s", claimant.text(600))
    claimant.claim("s", 576, start=256)
    second = claimant.edit(first, "s", "a", "b", Directive(50, 82))
    status, span = claimant.status("s"), claimant.status("s").claim.predicate
    assert (status.state, status.resident_tokens) == (ClaimState.MATERIALIZED, 320)
    assert (span.source, span.start, span.end) == ("b", 224, 544)
    claimant.check()
    claimant.press()
    assert claimant.kept(("t", "s")) == 544
    assert claimant.cached(first.tokens) <= BLOCK, "the old place is nobody's"
    assert second.record is not None
    lineage = second.record.receipt.lineage
    goes_on = claimant.engine.ask(
        (*second.tokens, 70), EditPayload(session="s", scope="t", turn="c", lineage=lineage)
    )
    assert goes_on.cached >= 544
    third = claimant.edit(goes_on, "s", "c", "d", Directive(256, 288))
    status, span = claimant.status("s"), claimant.status("s").claim.predicate
    assert (span.source, span.end - span.start) == ("d", 288)
    assert status.state is ClaimState.MATERIALIZED
    claimant.check()
    claimant.press()
    assert claimant.kept(("t", "s")) >= span.end // BLOCK * BLOCK
    claimant.edit(third, "s", "d", "e", Directive(210, 530))
    status = claimant.status("s")
    assert (status.state, status.cause) == (ClaimState.HARMED, "edited away")
    assert not claimant.leyline.claims.shelf.held
    events = claimant.send(GetClaimEvents("t", "s")).events
    moved = [event["source"] for event in events if event["event"] == "moved"]
    assert moved == ["b", "d", "e"]


def test_another_sessions_edit_moves_no_claim(claimant: Claimant) -> None:
    """Claims over what two sessions share stay with the one that didn't edit."""
    tokens = claimant.text(400)
    stays, edits = claimant.opened("stays", tokens), claimant.opened("edits", tokens)
    claimant.claim("stays", 384)
    claimant.edit(edits, "edits", "a", "b", Directive(100, 132))
    assert claimant.status("stays").claim.predicate.source == "a"
    claimant.press()
    assert claimant.cached(stays.tokens) == 384


def members(session: str = "x", turn: str = "a") -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope="t", turn=turn)


def test_write_no_admit_leaves_nothing_behind(claimant: Claimant) -> None:
    """KV that the session computes is neither found later nor retained, and its rows are
    overwritten; others' own is kept as ever, and so is the session's after the release."""
    first = claimant.opened("s")
    claimant.claim("s", 288, kind=SOFT, write_no_admit=True)
    longer = (*first.tokens, *claimant.text(300))
    answer, (keys, values) = claimant.engine.ask_for_rows(longer, members("s", "b"))
    assert answer.record is not None
    receipt = answer.record.receipt
    assert (len(answer.output), receipt.turn, receipt.tokens.prefix) == (8, "", 0)
    assert claimant.cached(answer.tokens) == 288
    assert claimant.leyline.registry.get(("t", "s"), "b") is None
    assert not any(layer.abs().sum() for layer in (*keys, *values))
    _, control = claimant.engine.ask_for_rows(claimant.text(300), members("control"))
    assert all(layer.abs().sum() > 0 for layer in (*control[0], *control[1]))
    assert claimant.engine.ask(longer, members("s", "c")).cached == 0
    assert claimant.cached(longer) == 288
    claimant.engine.ask(longer, members("other"))
    assert claimant.cached(longer) == 608
    claimant.release("s")
    kept = claimant.engine.ask((*longer, 70), members("s", "d"))
    assert kept.record is not None and kept.record.receipt.turn == "d"


def test_write_no_admit_splices_nothing_and_says_why(claimant: Claimant) -> None:
    """An edit would leave its copies behind; the request runs as an ordinary prefill."""
    first = claimant.opened("s")
    claimant.claim("s", 96, kind=SOFT, write_no_admit=True)
    edited = claimant.edit(first, "s", "a", "b", Directive(100, 132))
    assert edited.record is not None
    receipt = edited.record.receipt
    assert (receipt.reason, receipt.tokens.spliced) == (Reason.REFUSED_BY_CLAIM, 0)
    assert len(edited.output) == 8


def test_write_no_admit_hinders_no_forget(
    claimant: Claimant, story: Story, rows: SecretRows
) -> None:
    """A session whose requests leave nothing cached can still demand that something goes."""
    claimant.claim(story.session, BEFORE, source="t1", kind=SOFT, write_no_admit=True)
    assert story.forget().pending == 0
    assert not rows.held(story.secret)
    assert claimant.cached(story.told) == BEFORE
    assert SECRET and claimant.state(story.session) is ClaimState.MATERIALIZED


def test_a_retirement_spares_what_a_claim_holds(claimant: Claimant) -> None:
    """KV of a retired turn is free at once, but for a claim's blocks; nothing is harmed."""
    claimed, control = claimant.opened("s"), claimant.opened("other")
    claimant.claim("s", 160)
    for session in ("s", "other"):
        claimant.engine.ask(claimant.text(70), of(session, "b", retire=("a",)))
    claimant.check()
    assert claimant.cached(claimed.tokens) == 160
    assert claimant.cached(control.tokens) == 0
    assert claimant.state("s") is ClaimState.MATERIALIZED


def test_failed_rows_harm_a_claim_by_their_own_cause(claimant: Claimant) -> None:
    """Blocks that are hidden because their rows aren't there are unpublished, not forgotten."""
    claimant.opened("s")
    claimant.claim("s", 288)
    leyline = claimant.leyline
    leyline.cache._filed |= leyline.claims.shelf.held.keys()
    leyline.failed()
    status = claimant.status("s")
    assert (status.state, status.cause) == (ClaimState.HARMED, "unpublished")


def of(session: str, turn: str, **members: Any) -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope=TENANT, turn=turn, **members)
