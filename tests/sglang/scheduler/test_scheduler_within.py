"""Reuse in given extents, and of a session's own turns alone, in SGLang's queue."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from scheduler_kit import Scheduler, sealed, source_of, text

from leyline_engine.admit.content_reuse import reuse_counts
from leyline_engine.admit.plan import Plan
from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.contract import (
    CopySegment,
    EditPayload,
    Receipt,
    ReuseCounts,
    ReuseKind,
    ReuseMode,
    ReusePayload,
    SourceRef,
    SpanLabel,
    TokenCounts,
)
from leyline_engine.reuse.matching import Hits
from leyline_engine.sglang import accounts
from leyline_engine.sglang.splicer import as_admitted

pytestmark = pytest.mark.usefixtures("server_args")

Extents = tuple[tuple[int, int], ...]

SECRET = 1001
DOC = [*text(70, 9), SECRET, *text(79, 11)]
NOTE = text(100, 10)
FIRST = [*text(70, 1), 1, *DOC, 2, *NOTE, 5]
AGAIN = [*text(60, 3), 3, *DOC, 4, *NOTE, 6, *text(30, 4)]
LATER = [*text(60, 13), *AGAIN[60:]]
"""The same after another beginning."""
DOC_AT, NOTE_AT = (61, 211), (212, 312)
LABELS = (SpanLabel("m0", 0, 71), SpanLabel("doc", 71, 222), SpanLabel("rest", 222, len(FIRST)))
INDEX = ReusePayload(mode=ReuseMode.LIVE, within=())


def recall(within: Extents | None = (DOC_AT,), *, own: bool = True, **fields: Any) -> ReusePayload:
    """The request for own KV in extents."""
    return ReusePayload(mode=ReuseMode.LIVE, within=within, own=own, **fields)


def turn(session: str, name: str = "t2", scope: str = "t", **fields: Any) -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope=scope, turn=name, **fields)


def ask(
    scheduler: Scheduler, prompt: list[int], payload: EditPayload, reuse: ReusePayload | None
) -> Receipt:
    """The receipt of one request, served alone; its counts add up."""
    _, record = scheduler.serve(prompt, payload, reuse=reuse)
    assert record is not None
    counts, found = record.receipt.tokens, record.receipt.reuse
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(prompt)
    if found is not None:
        assert found.total == counts.reused == sum(end - start for start, end in found.extents)
    scheduler.check_idle()
    return record.receipt


def prepared(session: str = "a", **options: Any) -> Scheduler:
    """A scheduler in which a session of a tenant without general reuse has both texts."""
    scheduler = Scheduler(4000, **options)
    ask(scheduler, FIRST, turn(session, "t1", spans=LABELS), INDEX)
    return scheduler


def test_no_extent_makes_turns_known_and_looks_for_nothing() -> None:
    """The receipt has no account of reuse, and the content can be recalled; a control can't."""
    scheduler, plain = Scheduler(4000), Scheduler(4000)
    assert ask(scheduler, FIRST, turn("a", "t1"), INDEX).reuse is None
    assert ask(plain, FIRST, turn("a", "t1"), None).reuse is None
    assert len(scheduler.engine._reuse.index) > 10
    assert len(plain.engine._reuse.index) == 0
    assert ask(scheduler, AGAIN, turn("a"), recall()).tokens.reused == 150
    assert ask(plain, AGAIN, turn("a"), recall()).tokens.reused == 0


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("within", "copied"),
    [
        (((100, 180),), ((100, 180),)),
        (((0, 90), (90, 100), (205, 240)), ((61, 100), (212, 240))),
        (((196, 227), (330, 9000)), ()),
        (None, (DOC_AT, NOTE_AT)),
    ],
)
def test_nothing_outside_the_extents_is_copied(
    by_name: bool, within: Extents | None, copied: Extents
) -> None:
    """Found and named content is cut at the edges."""
    scheduler = Scheduler(4000)
    told, _ = scheduler.serve(FIRST, turn("a", "t1"), reuse=None if by_name else INDEX)
    source = SourceRef("t1", len(source_of(told)), sealed(told))
    copies = (CopySegment(0, 71, 221, DOC_AT[0]), CopySegment(0, 222, 322, NOTE_AT[0]))
    names: dict[str, Any] = {"sources": (source,), "copies": copies} if by_name else {}
    total = sum(end - start for start, end in copied)
    receipt = ask(scheduler, AGAIN, turn("a"), recall(within, **names))
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, session=total, extents=copied)


def test_another_sessions_text_is_never_copied_as_own() -> None:
    """Without ``own``, the same request takes it; shared KV is the own one of both sessions."""
    scheduler = prepared("first")
    whole = recall(((0, len(AGAIN)),))
    assert ask(scheduler, AGAIN, turn("b"), whole).tokens.reused == 0
    control = ask(prepared("first"), AGAIN, turn("b"), msgspec.structs.replace(whole, own=False))
    assert control.reuse == ReuseCounts(mode=ReuseMode.LIVE, tenant=250, extents=(DOC_AT, NOTE_AT))
    scheduler = prepared("first")
    assert ask(scheduler, [*FIRST, 8], turn("a", "t1"), INDEX).tokens.prefix == len(FIRST)
    assert ask(scheduler, AGAIN, turn("a"), recall()).tokens.reused == 150


@pytest.mark.parametrize("span", ["doc", "unknown"])
def test_forgotten_text_is_never_recalled(span: str) -> None:
    """A forget takes recalled copies with it, and nothing of the text is recalled after it."""
    scheduler = prepared()
    receipt = ask(scheduler, AGAIN, turn("a", spans=(SpanLabel("new", 0, 61),)), recall())
    assert receipt.tokens.reused == 150
    assert SECRET in scheduler.remembered()
    ask(scheduler, text(40, 7), turn("a", "t8", forget=(span,)), None)
    assert SECRET not in scheduler.remembered()
    again = ask(scheduler, LATER, turn("a", "t9"), recall())
    assert again.reuse == ReuseCounts(mode=ReuseMode.LIVE)


@pytest.mark.parametrize("seed", range(6))
def test_receipts_equal_what_the_rows_were_computed_for(seed: int) -> None:
    """The extents are the positions after the prefix whose KV an earlier request computed."""
    rng = Random(seed)
    scheduler = prepared(chunk=rng.choice([None, 64]), min_copy=rng.choice([1, 32]))
    pieces = [DOC[rng.randrange(40) :], NOTE[: rng.randint(64, 100)], DOC[:90]]
    rng.shuffle(pieces)
    tokens = text(rng.randint(1, 60), 100 + seed)
    for number, piece in enumerate(pieces):
        tokens += [*piece, *text(rng.randint(1, 60), 200 + 10 * seed + number)]
    cuts = sorted(rng.sample(range(len(tokens)), 6))
    within = tuple(zip(cuts[::2], cuts[1::2], strict=True))
    before = max(scheduler.has_read)
    req = scheduler.submit(tokens, turn("a"), reuse=recall(within))
    while not scheduler.running:
        scheduler.step()
    current = scheduler.engine.turn_of(req)
    assert current is not None
    assert current.receipt is not None
    found = current.receipt.reuse
    assert found is not None
    nonces = [nonce for _, _, nonce in scheduler.rows_of(req)][: len(tokens)]
    copied = {at for at, nonce in enumerate(nonces) if nonce <= before}
    copied -= set(range(current.receipt.tokens.prefix))
    assert {at for start, end in found.extents for at in range(start, end)} == copied
    assert copied <= {at for start, end in within for at in range(start, end)}
    scheduler.drain()
    scheduler.check_idle()


def test_receipts_name_the_copies_of_the_plan_as_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that was planned, and is gone when the request is admitted, is in no extent."""

    def lost(plan: Plan, *reused: int) -> tuple[Plan, TokenCounts]:
        executed, counts = as_admitted(plan, *reused)
        return replace(executed, copies=executed.copies[:1]), counts

    monkeypatch.setattr(accounts, "as_admitted", lost)
    _, record = prepared().serve(AGAIN, turn("a"), reuse=recall(None))
    assert record is not None
    assert record.receipt.reuse is not None
    assert record.receipt.reuse.extents == (DOC_AT,)


def test_copies_that_were_evicted_before_admission_are_no_extent() -> None:
    """Only what a request doesn't compute itself is reported: a copy may end early, or be gone."""
    copies = (CopySegment(0, 40, 80, 50), CopySegment(0, 90, 120, 100))
    plan = Plan(200, 32, copies, (), kinds=(ReuseKind.SESSION,))
    asked = recall()
    request = CheckedRequest(array("q"), None, None, None, (), None, asked, Hits())
    for reused, extents in ((130, ((50, 90), (100, 130))), (110, ((50, 90), (100, 110)))):
        counts = reuse_counts(request, as_admitted(plan, reused)[0])
        assert counts is not None
        assert counts.extents == extents
    counts = reuse_counts(request, as_admitted(plan, 60)[0])
    assert counts is not None
    assert counts.extents == ((50, 60),)
