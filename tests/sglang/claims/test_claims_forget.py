"""The events that end or move a claim in SGLang's tree: forgets, edits, flushes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from claim_scheduler import ClaimScheduler, opens, text
from scheduler_kit import SECRETS, source_of

from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    DemoteClaim,
    Directive,
    GetClaimEvents,
    Reason,
    SpanLabel,
)
from leyline_engine.sglang.forgetting import Forgetter

pytestmark = pytest.mark.usefixtures("server_args")

SECRET = SECRETS + 7
LABELS = (SpanLabel("a", 0, 40), SpanLabel("b", 40, 60), SpanLabel("c", 60, 90))


@pytest.fixture(autouse=True)
def nothing_contained(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failure inside SGLang's loop is logged and not raised: it must fail the test."""
    yield
    errors = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not [error for error in errors if "a forget failed" not in error]


def told(scheduler: ClaimScheduler, seed: str = "s") -> list[int]:
    """A session whose span ``b`` holds the secret; it is served once."""
    tokens = text(seed, 90)
    tokens[45] = SECRET
    scheduler.serve(tokens, opens("s", spans=LABELS))
    assert SECRET in scheduler.remembered()
    return tokens


def forgetting(turn: str = "t2") -> tuple[list[int], object]:
    """The next turn's prompt and payload, which forget the span."""
    tokens = text("s", 90)
    labels = (SpanLabel("a", 0, 40), SpanLabel("c", 40, 70))
    payload = opens("s", turn, spans=labels, forget=("b",))
    return [*tokens[:40], *tokens[60:]], payload


@pytest.mark.parametrize(
    "terms",
    [
        pytest.param({}, id="hard"),
        pytest.param({"start": 70}, id="hard, behind the secret"),
        pytest.param({"kind": ClaimKind.SOFT, "priority": 9}, id="soft"),
        pytest.param({"kind": ClaimKind.SOFT, "start": 70}, id="soft, behind the secret"),
        pytest.param({"share": 0.6}, id="hard, in part"),
    ],
)
def test_a_forget_beats_a_claim(terms: dict[str, object]) -> None:
    """Claimed or not, what read the secret is gone at once; the claim says that it was harmed."""
    scheduler = ClaimScheduler(400)
    told(scheduler)
    scheduler.claim("s", 90, **terms)
    prompt, payload = forgetting()
    _, record = scheduler.serve(prompt, payload)
    assert record is not None and record.receipt.forgot is not None
    assert record.receipt.forgot.overwritten > 0
    assert record.receipt.forgot.pending == 0
    assert SECRET not in scheduler.remembered()
    status = scheduler.status()
    assert (status.state, status.cause) == (ClaimState.HARMED, "forgotten")
    scheduler.check_idle()


def test_a_demoted_claim_is_harmed_as_well() -> None:
    """It has its rank and no lock, and loses its KV all the same."""
    scheduler = ClaimScheduler(400)
    told(scheduler)
    scheduler.claim("s", 90, priority=3)
    scheduler.send(DemoteClaim("a", "c"))
    scheduler.serve(*forgetting())
    assert SECRET not in scheduler.remembered()
    assert scheduler.status().state is ClaimState.HARMED
    scheduler.check_idle()


def test_what_lies_before_the_secret_stays_claimed() -> None:
    """A forget harms claims over what it takes, and no others."""
    scheduler = ClaimScheduler(400)
    tokens = told(scheduler)
    scheduler.claim("s", 40, id="before")
    scheduler.claim("s", 60, id="over")
    other = text("other", 30)
    scheduler.serve(other, opens("other", tenant="b"))
    scheduler.claim("other", 30, tenant="b")
    scheduler.serve(*forgetting())
    assert scheduler.status("before").state is ClaimState.MATERIALIZED
    assert scheduler.status("over").state is ClaimState.HARMED
    assert scheduler.status(tenant="b").state is ClaimState.MATERIALIZED
    assert scheduler.keeper.book.protected_pages == 70
    scheduler.serve(text("pressure", 320))
    assert scheduler.cached(tokens) == 40
    assert scheduler.cached(other) == 30


def test_a_forget_waits_for_requests_and_not_for_claims() -> None:
    """Slots that a running request holds are pending until it ends; its claim is harmed at once."""
    scheduler = ClaimScheduler(400)
    tokens = told(scheduler)
    scheduler.claim("s", 90)
    scheduler.submit([*tokens, 3], opens("s", "b1"), decode=30)
    scheduler.step()
    scheduler.submit(*forgetting(), message_id="forgets")
    scheduler.step()
    assert scheduler.status().state is ClaimState.HARMED
    assert scheduler.keeper.book.protected_pages == 0
    forgot = scheduler.sender.records["forgets"].receipt.forgot
    assert forgot is not None and forgot.pending > 0
    assert scheduler.try_claim("s", 40, id="late", source="t1").problem is not None
    scheduler.drain()
    assert scheduler.sender.forgotten["forgets"].pending == 0
    assert SECRET not in scheduler.remembered()
    scheduler.check_idle()


def test_a_forget_that_failed_midway_waits_for_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the session published is condemned then, and removed though it was locked."""
    scheduler = ClaimScheduler(400)
    told(scheduler)
    scheduler.claim("s", 90)

    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("the test's doing")

    with monkeypatch.context() as broken:
        broken.setattr(Forgetter, "forget", fails)
        _, record = scheduler.serve(*forgetting())
    assert record is not None
    assert record.receipt.reason is Reason.TRANSFORM_FAILED
    assert scheduler.status().state is ClaimState.HARMED
    assert SECRET not in scheduler.remembered()
    scheduler.serve([1, 2, 3])
    scheduler.check_idle()


def test_write_no_admit_hinders_no_forget() -> None:
    """A session whose requests leave nothing cached can still demand that something goes."""
    scheduler = ClaimScheduler(400)
    told(scheduler)
    scheduler.claim("s", 30, kind=ClaimKind.SOFT, write_no_admit=True)
    _, record = scheduler.serve(*forgetting())
    assert record is not None and record.receipt.forgot is not None
    assert SECRET not in scheduler.remembered()
    scheduler.check()


def test_a_forget_with_an_edit_is_obeyed_where_nothing_is_admitted() -> None:
    """The edit is refused for the claim's sake, the forget in it is not."""
    scheduler = ClaimScheduler(400)
    tokens = text("s", 90)
    tokens[45] = SECRET
    first, _ = scheduler.serve(tokens, opens("s", spans=LABELS))
    scheduler.claim("s", 30, kind=ClaimKind.SOFT, write_no_admit=True)
    _, record = scheduler.edit(first, "s", "t2", (Directive(40, 60, (), "forget"),))
    assert record.receipt.forgot is not None
    assert SECRET not in scheduler.remembered()
    scheduler.check()


def test_a_claim_over_the_secret_refuses_no_request_that_forgets_it() -> None:
    """The obstacle itself is forgotten: the request runs in the room that its forget makes."""
    scheduler = ClaimScheduler(140)
    told(scheduler)
    scheduler.claim("s", 90)
    prompt, payload = forgetting()
    req, record = scheduler.serve(prompt, payload, decode=20)
    assert len(req.output_ids) == 20
    assert record is not None and record.receipt.forgot is not None
    assert record.receipt.forgot.overwritten > 0
    assert SECRET not in scheduler.remembered()
    assert scheduler.status().state is ClaimState.HARMED
    scheduler.check_idle()


def test_a_refused_request_forgets_all_the_same() -> None:
    """Another's claim is in its way: it doesn't run, but what it forgets is gone."""
    scheduler = ClaimScheduler(240)
    told(scheduler)
    scheduler.serve(text("other", 100), opens("other", tenant="b"))
    scheduler.claim("other", 100, tenant="b")
    prompt, payload = forgetting()
    refused = scheduler.submit(prompt, payload, decode=80)
    refusal = scheduler.refusal(refused)
    assert (refusal.own, refusal.others) == ((), 1)
    turn = scheduler.engine.turn_of(refused)
    assert turn is not None
    receipt = scheduler.sender.records[turn.message_id].receipt
    assert receipt.forgot is not None
    assert receipt.forgot.overwritten > 0
    assert SECRET not in scheduler.remembered()
    assert scheduler.status(tenant="b").state is ClaimState.MATERIALIZED
    scheduler.release(tenant="b")
    scheduler.check_idle()


def test_a_forget_in_another_namespace_harms_no_claim() -> None:
    """KV under a cache salt has the same tokens, and is not what is claimed."""
    scheduler = ClaimScheduler(400)
    tokens = told(scheduler)
    scheduler.claim("s", 90)
    salted = scheduler.submit(tokens, opens("salted", tenant="b", spans=LABELS))
    scheduler.waiting.remove(salted)
    salted.cache_salt = "salt"
    scheduler.waiting.append(salted)
    scheduler.drain()
    forget = opens("salted", "t2", tenant="b", forget=("b",))
    scheduler.serve([*tokens[:40], *tokens[60:]], forget)
    assert scheduler.status().state is ClaimState.MATERIALIZED
    scheduler.check()


def test_kv_of_an_adapter_is_not_claimed() -> None:
    """A claim on it is refused, as on an unknown turn: it would protect the base model's KV."""
    scheduler = ClaimScheduler(400)
    tokens = told(scheduler)
    adapted = scheduler.submit(tokens, opens("adapted", spans=LABELS))
    adapted.extra_key = "adapter"
    scheduler.drain()
    problem = scheduler.try_claim("adapted", 90).problem
    assert problem is not None
    assert "source" in problem.message
    assert list(scheduler.engine.claims.keeper.holds()) == []


def test_a_flush_harms_what_it_takes() -> None:
    """Locked, ranked or demoted: nothing is left, the pool is whole, and each claim says why."""
    scheduler = ClaimScheduler(200)
    for name in ("hard", "soft", "demoted"):
        scheduler.serve(text(name, 30), opens(name))
        kind = ClaimKind.SOFT if name == "soft" else ClaimKind.HARD
        scheduler.claim(name, 30, id=name, kind=kind, priority=2, ttl_s=5)
    scheduler.send(DemoteClaim("a", "demoted"))
    scheduler.flush()
    assert scheduler.allocator.available_size() == 200
    for name in ("hard", "soft", "demoted"):
        status = scheduler.status(name)
        assert (status.state, status.cause) == (ClaimState.HARMED, "flushed")
    scheduler.tick(6000)
    scheduler.serve(text("hard", 30), opens("hard"))
    scheduler.claim("hard", 30, id="hard", revision=2)
    scheduler.check()


def test_a_claim_follows_its_tokens() -> None:
    """An edit before it moves a claim; within it, shrinks it; over it, ends it as harmed."""
    scheduler = ClaimScheduler(900)
    first, _ = scheduler.serve(text("s", 200), opens("s"))
    scheduler.claim("s", 180, start=100)
    second, _ = scheduler.edit(first, "s", "t2", (Directive(50, 60),))
    status = scheduler.status()
    span = status.claim.predicate
    assert (span.source, span.start, span.end) == ("t2", 90, 170)
    assert (status.state, status.resident_tokens) == (ClaimState.MATERIALIZED, 80)
    third, _ = scheduler.edit(second, "s", "t3", (Directive(120, 130),), "t2")
    status = scheduler.status()
    assert (status.claim.predicate.source, status.required_tokens) == ("t3", 70)
    turn = scheduler.engine.turn_of(third)
    assert turn is not None
    keys = turn.keys(source_of(third))
    scheduler.serve(text("pressure", 735))
    assert scheduler.cached(keys) == 160
    assert scheduler.cached(source_of(first)) < 100
    scheduler.edit(third, "s", "t4", (Directive(80, 160),), "t3")
    status = scheduler.status()
    assert (status.state, status.cause) == (ClaimState.HARMED, "edited away")
    scheduler.check_idle()
    reply = scheduler.send(GetClaimEvents("a", "c"))
    moved = [event for event in reply.events if event["event"] == "moved"]
    assert [event["source"] for event in moved] == ["t2", "t3", "t4"]


def test_another_sessions_edit_moves_no_claim() -> None:
    """Claims over what two sessions share stay with the one that didn't edit."""
    scheduler = ClaimScheduler(600)
    tokens = text("shared", 100)
    scheduler.serve(tokens, opens("stays"))
    first, _ = scheduler.serve(tokens, opens("edits", tenant="a"))
    scheduler.claim("stays", 100)
    scheduler.edit(first, "edits", "t2", (Directive(40, 50),))
    assert scheduler.status().claim.predicate.source == "t1"
    assert scheduler.keeper.book.protected_pages == 100


def test_a_claim_on_a_span_that_was_never_cached_fails() -> None:
    """KV that was evicted before it was claimed is not promised."""
    scheduler = ClaimScheduler(100)
    scheduler.serve(text("s", 50), opens("s"))
    scheduler.serve(text("pressure", 90))
    status = scheduler.claim("s", 50)
    assert status.state is ClaimState.MATERIALIZATION_FAILED
    assert status.cause == "0 of 50 pages resident"
    scheduler.check_idle()


@pytest.mark.parametrize("kind", [ClaimKind.HARD, ClaimKind.SOFT])
def test_a_retirement_spares_what_a_claim_holds(kind: ClaimKind) -> None:
    """KV of a retired turn is free at once, but for a claim's; nothing is harmed."""
    scheduler = ClaimScheduler(400)
    for session in ("s", "other"):
        scheduler.serve(text(session, 90), opens(session))
    scheduler.claim("s", 40, kind=kind)
    for session in ("s", "other"):
        scheduler.serve(text(f"{session} again", 20), opens(session, "t2", retire=("t1",)))
    assert scheduler.cached(text("s", 90)) == 40
    assert scheduler.cached(text("other", 90)) == 0
    assert scheduler.status().state is ClaimState.MATERIALIZED
    scheduler.check_claims()
    scheduler.release()
    scheduler.check_idle()
