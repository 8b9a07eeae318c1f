"""The book: limits, revisions, foreign ids, the clock's messages, and what is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_engine.claims import book as book_module
from leyline_engine.claims.answers import Change, TickError, UnknownClaimError
from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import EventLedger, Run
from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.limits import ClaimRefusedError, Limits
from leyline_engine.claims.states import State, TransitionError
from leyline_engine.contract import Claim, ClaimKind, Predicate

PAGE = 16


def make_book(usable: int = 100, **limits: Any) -> ClaimBook:
    """A book over a pool of pages."""
    return ClaimBook(usable, Arithmetic(PAGE), EventLedger(), limits=Limits(**limits))


def make_claim(name: str = "c", pages: int = 10, **terms: Any) -> Claim:
    """A hard claim over the first pages of a source."""
    share = terms.pop("share", 1.0)
    source = terms.pop("source", "x")
    given = {"id": name, "tenant": "a", "session": "s", "kind": ClaimKind.HARD} | terms
    return Claim(predicate=Predicate(source, 0, pages * PAGE, share), **given)


def enter(book: ClaimBook, claim: Claim, there: int | None = None) -> None:
    """Submit a claim and find its pages, all of them unless said otherwise."""
    book.submit(claim, claim.predicate.end)
    pages = claim.predicate.page_span(PAGE)[1] if there is None else there
    runs = (Run(claim.predicate.source, 0, pages),) if pages else ()
    book.seek((claim.tenant, claim.id), runs)


@pytest.mark.parametrize(
    ("limit", "limits", "tenant"),
    [
        ("claims", {"claims": 2}, "a"),
        ("tokens", {"tokens": 25 * PAGE}, "a"),
        ("share", {"share": 0.25}, "a"),
        ("engine_claims", {"engine_claims": 2}, "b"),
        ("engine_share", {"engine_share": 0.25}, "b"),
    ],
)
def test_each_limit_refuses_by_its_name(limit: str, limits: dict[str, Any], tenant: str) -> None:
    """The third claim of ten pages passes it; once one has ended, there is room again."""
    book = make_book(**limits)
    enter(book, make_claim("c1"))
    enter(book, make_claim("c2"))
    third = make_claim("c3", tenant=tenant)
    with pytest.raises(ClaimRefusedError) as refused:
        book.submit(third, 160)
    assert refused.value.field == limit
    assert book.status(tenant, "c3").state is State.REJECTED
    book.release("a", "c1")
    enter(book, third)
    assert book.status(tenant, "c3").state is State.MATERIALIZED


def test_refusals_of_the_engine_dont_tell_what_others_claim() -> None:
    """The tenant's own sum is in the message, the engine's isn't."""
    book = make_book(share=1.0, engine_share=0.25)
    enter(book, make_claim("c1", 17))
    with pytest.raises(ClaimRefusedError) as refused:
        book.submit(make_claim("c2", 13, tenant="b"), 999)
    assert "25" in str(refused.value)
    assert "30" not in str(refused.value) and "17" not in str(refused.value)


def test_a_soft_claim_takes_no_share_of_the_pool() -> None:
    """It locks nothing, so only its tokens count."""
    book = make_book(share=0.05)
    enter(book, make_claim(kind=ClaimKind.SOFT))
    assert book.status("a", "c").state is State.MATERIALIZED
    assert book.protected_pages == 0


def test_spans_past_the_end_and_unknown_sources_are_refused_by_field() -> None:
    """The engine knows the source's length; without one it retains no such turn."""
    book = make_book()
    with pytest.raises(ClaimRefusedError, match="past the end") as refused:
        book.submit(make_claim(), 159)
    assert refused.value.field == "predicate.end"
    with pytest.raises(ClaimRefusedError) as refused:
        book.submit(make_claim(), None)
    assert refused.value.field == "predicate.source"


def test_foreign_ids_are_as_unknown_as_those_that_never_were() -> None:
    """Every question about them has the same answer, and nothing is written down."""
    book = make_book()
    enter(book, make_claim())
    answers = set()
    for tenant, name in (("b", "c"), ("b", "never"), ("a", "never")):
        for ask in (book.status, book.release, book.demote):
            with pytest.raises(UnknownClaimError) as unknown:
                ask(tenant, name)
            answers.add(str(unknown.value))
    assert len(answers) == 1
    assert book.live("b") == ()
    enter(book, make_claim(tenant="b", source="y"))
    assert [status.claim.tenant for status in book.live("b")] == ["b"]


def test_a_later_revision_replaces_and_an_equal_or_older_one_doesnt() -> None:
    """The terms in force are never touched by what is refused."""
    book = make_book()
    enter(book, make_claim(revision=5))
    for revision in (1, 4, 5):
        with pytest.raises(ClaimRefusedError) as refused:
            book.submit(make_claim(pages=3, revision=revision), 160)
        assert refused.value.field == "revision"
        assert book.protected_pages == 10
    effects = book.submit(make_claim(pages=4, revision=6), 160)
    assert [effect.change for effect in effects] == [Change.UNLOCK]
    assert book.protected_pages == 0
    effects = book.seek(("a", "c"), (Run("x", 0, 4),))
    assert effects[0].runs == (Run("x", 0, 4),)
    assert book.protected_pages == 4


def test_a_revision_within_the_limits_isnt_refused_for_what_it_replaces() -> None:
    """The pages of the old terms don't count beside those of the new ones."""
    book = make_book(share=0.1, claims=1)
    enter(book, make_claim())
    enter(book, make_claim(revision=2))
    with pytest.raises(ClaimRefusedError) as refused:
        book.submit(make_claim(pages=11, revision=3), 999)
    assert refused.value.field == "share"
    assert book.status("a", "c").claim.revision == 2


def test_an_id_that_has_ended_needs_a_later_revision_to_live_again() -> None:
    """A late copy of the old request doesn't bring it back; a refused one never counted."""
    book = make_book()
    with pytest.raises(ClaimRefusedError):
        book.submit(make_claim(revision=9), None)
    enter(book, make_claim(revision=2))
    book.release("a", "c")
    with pytest.raises(ClaimRefusedError) as refused:
        book.submit(make_claim(revision=2), 160)
    assert refused.value.field == "revision"
    assert book.status("a", "c").state is State.RELEASED
    enter(book, make_claim(revision=3))
    assert book.status("a", "c").state is State.MATERIALIZED


def test_releasing_twice_changes_nothing() -> None:
    """The second release has no effect and is no event."""
    ledger = EventLedger()
    book = ClaimBook(100, Arithmetic(PAGE), ledger)
    enter(book, make_claim())
    assert [effect.change for effect in book.release("a", "c")] == [Change.UNLOCK]
    last = ledger.last
    assert book.release("a", "c") == ()
    assert ledger.last == last


def test_claims_expire_at_the_tick_that_reaches_their_deadline() -> None:
    """All claims whose time has come expire at once, earliest first, counted from the engine's time
    when they came."""
    book = make_book()
    book.tick(1, 5_000)
    enter(book, make_claim("later", 2, ttl_s=21))
    enter(book, make_claim("late", 2, ttl_s=20))
    enter(book, make_claim("soon", 2, ttl_s=10))
    enter(book, make_claim("ever", 2))
    assert book.tick(2, 14_999) == ()
    assert [effect.claim for effect in book.tick(3, 15_000)] == [("a", "soon")]
    assert [effect.claim for effect in book.tick(4, 10**9)] == [("a", "late"), ("a", "later")]
    assert book.status("a", "later").state is State.EXPIRED
    assert book.status("a", "soon").state is book.status("a", "late").state is State.EXPIRED
    assert book.status("a", "ever").state is State.MATERIALIZED


@pytest.mark.parametrize(("order", "now_ms"), [(1, 9_000), (3, 9_000), (2, 4_999)])
def test_a_tick_out_of_order_changes_nothing(order: int, now_ms: int) -> None:
    """Doubled, missing or back in time: ranks that continued would part."""
    book = make_book()
    book.tick(1, 5_000)
    enter(book, make_claim(ttl_s=1))
    with pytest.raises(TickError):
        book.tick(order, now_ms)
    assert book.now_ms == 5_000
    assert book.status("a", "c").state is State.MATERIALIZED


def test_a_hard_claim_locks_what_it_requires_and_no_neighbour() -> None:
    """Half of a span is its first resident pages, rounded up."""
    book = make_book()
    book.submit(make_claim(pages=9, share=0.5), 999)
    effects = book.seek(("a", "c"), (Run("x", 0, 2), Run("x", 4, 9)))
    assert effects[0].runs == (Run("x", 0, 2), Run("x", 4, 7))
    assert book.protected_pages == 5
    assert book.evicted((Run("x", 7, 9),)) == ()
    assert book.status("a", "c").state is State.MATERIALIZED


def test_evicting_a_locked_page_is_refused_and_changes_nothing() -> None:
    """It is refused even if a soft claim on the same pages would have given way."""
    book = make_book()
    enter(book, make_claim("soft", kind=ClaimKind.SOFT))
    enter(book, make_claim("hard"))
    with pytest.raises(TransitionError):
        book.evicted((Run("x", 9, 10),))
    assert {status.state for status in book.live()} == {State.MATERIALIZED}
    assert {status.resident_tokens for status in book.live()} == {160}


def test_a_soft_claim_holds_as_long_as_its_share_is_there() -> None:
    """It gives way with the page that brings it below."""
    book = make_book()
    enter(book, make_claim(kind=ClaimKind.SOFT, share=0.8, priority=2))
    assert book.evicted((Run("x", 8, 10),)) == ()
    assert book.status("a", "c").resident_tokens == 8 * PAGE
    effects = book.evicted((Run("x", 0, 1),))
    assert [(e.change, e.runs) for e in effects] == [(Change.UNRANK, (Run("x", 1, 8),))]
    assert book.status("a", "c").state is State.EVICTED


def test_lost_pages_harm_a_hard_claim_and_say_why() -> None:
    """The rest of it is unlocked."""
    book = make_book()
    enter(book, make_claim())
    effects = book.lost((Run("x", 3, 4),), "device_fault")
    assert effects[0].runs == (Run("x", 0, 3), Run("x", 4, 10))
    status = book.status("a", "c")
    assert (status.state, status.cause) == (State.HARMED, "device_fault")
    assert book.protected_pages == 0


def test_a_demoted_claim_keeps_its_priority_and_its_deadline() -> None:
    """Its pages can be evicted; without locks it can't be demoted again."""
    book = make_book()
    enter(book, make_claim(priority=7, ttl_s=5))
    unlock, rank = book.demote("a", "c")
    assert (unlock.change, rank.change, rank.priority) == (Change.UNLOCK, Change.RANK, 7)
    with pytest.raises(TransitionError):
        book.demote("a", "c")
    assert book.tick(1, 5_000)[0].change is Change.UNRANK
    assert book.status("a", "c").state is State.EXPIRED


def test_too_few_pages_fail_a_claim_and_free_its_place() -> None:
    """It ends there, with the figures in its cause."""
    book = make_book(claims=1)
    enter(book, make_claim(), there=9)
    status = book.status("a", "c")
    assert (status.state, status.cause) == (
        State.MATERIALIZATION_FAILED,
        "9 of 10 pages resident",
    )
    enter(book, make_claim("next"))


def test_write_no_admit_lasts_as_long_as_its_claim() -> None:
    """It is the session's, not the tenant's, and two claims lift it only together."""
    book = make_book()
    enter(book, make_claim("c1", 2, write_no_admit=True, ttl_s=1))
    enter(book, make_claim("c2", 2, write_no_admit=True))
    assert not book.admits("a", "s")
    assert book.admits("a", "other") and book.admits("b", "s")
    book.tick(1, 1_000)
    assert not book.admits("a", "s")
    enter(book, make_claim("c2", 2, revision=2))
    assert book.admits("a", "s")


def test_many_claims_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that ended, the newest are remembered; nothing else grows."""
    monkeypatch.setattr(book_module, "MAX_ENDED", 10)
    ledger = EventLedger(max_events=50)
    book = ClaimBook(100, Arithmetic(PAGE), ledger, limits=Limits(claims=2))
    for number in range(200):
        enter(book, make_claim(f"c{number}", ttl_s=60, source=f"s{number}"))
        if number % 2:
            book.release("a", f"c{number}")
        else:
            book.tick(number // 2 + 1, 60_000 * (number + 1))
        with pytest.raises(ClaimRefusedError):
            book.submit(make_claim(f"r{number}"), None)
    assert book.live() == () and book.protected_pages == 0
    assert len(ledger) == 50
    assert book.status("a", "c199").state is State.RELEASED
    with pytest.raises(UnknownClaimError):
        book.status("a", "c190")
    internals = {**vars(book), **vars(book._accounts), **vars(book._protection)}
    grown = {name: value for name, value in internals.items() if name != "_ended"}
    sized = [len(v) for v in grown.values() if isinstance(v, dict | list)]
    assert sized and not any(sized)


def test_a_claims_own_events_are_those_of_its_tenant() -> None:
    """The same id of another tenant isn't among them; the numbers are the ledger's."""
    ledger = EventLedger()
    book = ClaimBook(100, Arithmetic(PAGE), ledger)
    enter(book, make_claim())
    enter(book, make_claim(tenant="b", source="y"))
    kinds = [type(event).__name__ for event in ledger.behind(0, 99, tenant="b", claim="c")]
    assert kinds == ["ClaimRequested", "Entered", "Found", "Locked"]
    assert [event.seq for event in ledger.behind(0, 99, tenant="a", claim="c")] == [2, 3, 4, 5]
