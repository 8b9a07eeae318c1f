"""Reuse in SGLang's queue: copies of content that other sessions hold, in one plan with edits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scheduler_kit import Scheduler, sealed, source_of, text
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    Receipt,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SourceRef,
    SpanLabel,
    apply_directives,
)

pytestmark = pytest.mark.usefixtures("server_args")

LIVE = ReusePayload(mode=ReuseMode.LIVE)
OBSERVE = ReusePayload(mode=ReuseMode.OBSERVE)
DOC = text(150, 9)
FIRST = [*text(70, 1), 1, *DOC, 2, *text(20, 2)]
SECOND = [*text(60, 3), 3, *DOC, 4, *text(30, 4)]
SECRET = 1001


def turn(session: str, name: str = "t1", scope: str = "t", **fields: Any) -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope=scope, turn=name, **fields)


def ask(
    scheduler: Scheduler,
    prompt: list[int],
    payload: EditPayload,
    reuse: ReusePayload | None = LIVE,
) -> Receipt:
    """The receipt of one request, served alone; its counts add up."""
    _, record = scheduler.serve(prompt, payload, reuse=reuse)
    assert record is not None
    counts = record.receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(prompt)
    scheduler.check_idle()
    return record.receipt


def prepared(capacity: int = 2000, **options: Any) -> Scheduler:
    """A scheduler in which session ``a`` has the document."""
    scheduler = Scheduler(capacity, **options)
    ask(scheduler, FIRST, turn("a"))
    return scheduler


def entries(scheduler: Scheduler) -> int:
    """The size of the index of content."""
    return len(scheduler.engine._reuse.index)


@pytest.mark.parametrize("core", ["rust", "python"])
def test_content_of_another_session_is_copied(core: str) -> None:
    """The document is found at another position, twice; its rows are turned to where they are."""
    scheduler = prepared(core=core)
    prompt = [*SECOND, 5, *DOC, 6]
    receipt = ask(scheduler, prompt, turn("b"))
    assert receipt.outcome is Outcome.UNEDITED
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=300, extents=((61, 211), (243, 393))
    )
    assert [run.start for run in receipt.lineage] == [61]


def test_observing_counts_and_copies_nothing() -> None:
    """Would-be tokens are reported; the KV is the request's own."""
    scheduler = prepared()
    receipt = ask(scheduler, SECOND, turn("b"), OBSERVE)
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.OBSERVE, tenant=150)
    assert (receipt.tokens.reused, receipt.lineage) == (0, ())


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("min_copy", [1, 130])
def test_observing_foresees_what_live_copies(page: int, min_copy: int) -> None:
    """A hit counts as far as it fills whole pages, if that is worth a copy."""
    counts = {}
    for asked in (OBSERVE, LIVE):
        scheduler = prepared(2048, page=page, min_copy=min_copy)
        receipt = ask(scheduler, SECOND, turn("b"), asked)
        assert receipt.reuse is not None
        counts[asked.mode] = receipt.reuse.total
    # The document is the prompt's tokens 61 to 211. With pages of 64, its end isn't cached.
    assert counts[ReuseMode.LIVE] == {1: 150, 16: 144, 64: 64 if min_copy == 1 else 0}[page]
    assert counts[ReuseMode.OBSERVE] == counts[ReuseMode.LIVE]


def test_other_tenants_see_nothing() -> None:
    """Equal content of another tenant is neither copied nor counted."""
    scheduler = prepared()
    for asked in (OBSERVE, LIVE):
        receipt = ask(scheduler, SECOND, turn(f"b{asked.mode}", scope="else"), asked)
        assert receipt.reuse == ReuseCounts(mode=asked.mode)
        assert receipt.lineage == ()


def test_a_clean_session_never_reads_what_was_reused() -> None:
    """Equal tokens of a session that doesn't ask are computed where foreign KV begins."""
    scheduler = prepared()
    ask(scheduler, SECOND, turn("b"))
    receipt = ask(scheduler, [*SECOND, 7], turn("c"), None)
    assert (receipt.tokens.prefix, receipt.lineage) == (61, ())


def test_edits_and_reuse_are_one_transaction() -> None:
    """Copies of an edit come first; what they leave is looked for elsewhere."""
    scheduler = prepared()
    told, _ = scheduler.serve(text(200, 5), turn("b"))
    cut = Directive(50, 60, (3,))
    payload = turn(
        "b",
        "t2",
        sources=(SourceRef("t1", len(source_of(told)), sealed(told)),),
        directives=(cut,),
    )
    receipt = ask(scheduler, [*apply_directives(source_of(told), [cut]), 9, *DOC, 5, 6], payload)
    assert (receipt.outcome, receipt.tokens.spliced) == (Outcome.SPLICED, 141)
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, tenant=150, extents=((194, 344),))


def test_evicted_content_leaves_the_index() -> None:
    """Entries go with their slots, when they are freed."""
    scheduler = prepared()
    assert entries(scheduler) >= 10
    scheduler.cache.evict(EvictParams(num_tokens=2000))
    assert entries(scheduler) == 0
    assert ask(scheduler, SECOND, turn("b"), OBSERVE).reuse == ReuseCounts(mode=ReuseMode.OBSERVE)


def test_a_flush_empties_the_index() -> None:
    """Nothing is found after SGLang's cache was flushed."""
    scheduler = prepared()
    scheduler.flush()
    assert entries(scheduler) == 0
    assert ask(scheduler, SECOND, turn("b")).tokens.reused == 0


@pytest.mark.parametrize("named", ["doc", "unknown"])
def test_a_forget_reaches_those_who_reused_it(named: str) -> None:
    """No cached row remembers the secret once its session forgot it, also not by another name."""
    scheduler = Scheduler()
    doc = [*DOC[:70], SECRET, *DOC[70:]]
    labels = (SpanLabel("head", 0, 71), SpanLabel("doc", 71, 223), SpanLabel("tail", 223, 243))
    first = [*FIRST[:71], *doc, *FIRST[221:]]
    ask(scheduler, first, turn("a", spans=labels))
    reader = ask(scheduler, [*SECOND[:61], *DOC[71:], *SECOND[211:]], turn("b"))
    assert reader.tokens.reused == 79
    assert scheduler.remembered() == {SECRET}, "control: the copy has read the secret"
    forget = turn("a", "t2", forget=(named,))
    receipt = ask(scheduler, text(40, 7), forget)
    assert receipt.forgot is not None
    assert receipt.forgot.overwritten > 0
    assert scheduler.remembered() == frozenset()
    again = ask(scheduler, [*text(50, 8), *DOC[71:], 5], turn("c"), OBSERVE)
    assert again.reuse == ReuseCounts(mode=ReuseMode.OBSERVE)


def test_reuse_gives_way_when_memory_is_short() -> None:
    """If copies don't fit beside their locked sources, the request runs without them."""
    scheduler = prepared(len(FIRST) + 2 + 90)
    prompt = [*text(40, 3), 3, *DOC, 4, *text(20, 4)]
    receipt = ask(scheduler, prompt, turn("b"))
    assert receipt.outcome is Outcome.UNEDITED
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)


def test_a_request_for_several_answers_reuses_nothing() -> None:
    """SGLang runs it as several requests of one name, which are no turns."""
    scheduler = prepared()
    req = scheduler.submit(SECOND, turn("b"), answers=2, message_id="m", reuse=LIVE)
    scheduler.drain()
    assert req.finished()
    assert scheduler.sender.records["m"].receipt.reuse is None


def test_an_engine_that_splices_nothing_reuses_nothing() -> None:
    """Rows that can't be touched can't be copied either; the action is no error."""
    scheduler = Scheduler(splices=False)
    ask(scheduler, FIRST, turn("a"))
    assert ask(scheduler, SECOND, turn("b")).reuse is None


def fails_at(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Make one call that copies rows raise."""
    pool: Any = scheduler.engine.admission._splicer._pool  # type: ignore[union-attr]
    splice, calls = pool.splice, iter(range(1, 100))

    def broken(*args: Any) -> None:
        if next(calls) == call:
            raise RuntimeError("injected")
        splice(*args)

    monkeypatch.setattr(pool, "splice", broken)


def test_a_failed_copy_for_reuse_leaves_the_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit is made again without what was reused."""
    scheduler = prepared()
    told, _ = scheduler.serve(text(200, 5), turn("b"))
    cut = Directive(50, 60, (3,))
    sources = (SourceRef("t1", len(source_of(told)), sealed(told)),)
    payload = turn("b", "t2", sources=sources, directives=(cut,))
    fails_at(scheduler, monkeypatch, 2)
    receipt = ask(scheduler, [*apply_directives(source_of(told), [cut]), 9, *DOC, 5, 6], payload)
    assert (receipt.outcome, receipt.tokens.spliced) == (Outcome.SPLICED, 141)
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)


def test_a_failed_copy_costs_the_reuse_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is served as a prefill, and nothing stays locked."""
    scheduler = prepared()
    before = ask(scheduler, SECOND, turn("b"))
    fails_at(scheduler, monkeypatch, 1)
    payload = turn("b", "t2", lineage=before.lineage)
    receipt = ask(scheduler, [*SECOND, 7, *DOC, 8], payload)
    assert receipt.outcome is Outcome.UNEDITED
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)
    assert receipt.tokens.prefix >= len(SECOND), "it continues from its own path"
    monkeypatch.undo()
    payload = msgspec.structs.replace(turn("c"), lineage=())
    assert ask(scheduler, [*text(33, 6), 3, *DOC, 4], payload).tokens.reused == 151


@pytest.mark.parametrize(
    ("ends", "left"), [("finished", "abc"), ("aborted", "ab"), ("forgotten", "a")]
)
def test_a_prompt_is_found_while_its_answer_is_generated(ends: str, left: str) -> None:
    """Agents that start together find one another's content, as long as its turn is there."""
    scheduler = prepared()
    doc = text(120, 11)
    first = scheduler.submit([*text(50, 5), 6, *doc, 7], turn("c"), reuse=LIVE, decode=90)
    for _ in range(6):
        scheduler.step()
    assert not first.finished()
    scheduler.submit([*text(45, 6), 3, *doc, 4], turn("b"), message_id="b", reuse=LIVE)
    while "b" not in scheduler.sender.records:
        scheduler.step()
    assert scheduler.sender.records["b"].receipt.tokens.reused == 120
    found = entries(scheduler)
    if ends == "aborted":
        scheduler.abort(first)
    elif ends == "forgotten":
        scheduler.submit(text(40, 7), turn("c", "t2", forget=("x",)))
    while scheduler.engine.registry.count() < 2 or scheduler.waiting or scheduler.running:
        scheduler.step()
    scheduler.check_idle()
    assert sessions_in_index(scheduler) == set(left)
    assert (entries(scheduler) >= found) == (ends == "finished")


def sessions_in_index(scheduler: Scheduler) -> set[str]:
    """Sessions to whose turns entries of the index lead."""
    tenants: Any = scheduler.engine._reuse.index._tenants.values()
    return {entry.path.source.session for tenant in tenants for entry in tenant.entries.values()}
