"""Reuse by name in SGLang's queue: places that the proxy names need no index."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scheduler_kit import Scheduler, sealed, source_of, text

from leyline_engine.contract import (
    CopySegment,
    EditPayload,
    Outcome,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SourceRef,
    SpanLabel,
    TurnRecord,
)

pytestmark = pytest.mark.usefixtures("server_args")

SHORT = text(48, 8)
DOC = text(150, 9)
FIRST = [*text(70, 1), 1, *SHORT, 2, *DOC, 3, *text(20, 2)]
SECOND = [*text(60, 3), 4, *SHORT, 5, *DOC, 6, *text(30, 4)]
LABELS = (SpanLabel("m0", 0, 71), SpanLabel("texts", 71, 270), SpanLabel("m2", 270, len(FIRST)))


def turn(session: str, name: str = "t1", scope: str = "t", **fields: Any) -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope=scope, turn=name, **fields)


def ask(
    scheduler: Scheduler, prompt: list[int], payload: EditPayload, reuse: ReusePayload | None
) -> TurnRecord:
    """The record of one request, served alone; its counts add up."""
    _, record = scheduler.serve(prompt, payload, reuse=reuse)
    assert record is not None
    counts = record.receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(prompt)
    scheduler.check_idle()
    return record


def prepared() -> tuple[Scheduler, ReusePayload]:
    """A scheduler whose session ``a`` has both texts, with its index empty, and their places."""
    scheduler = Scheduler(2000)
    told, _ = scheduler.serve(FIRST, turn("a", spans=LABELS))
    assert len(scheduler.engine._reuse.index) == 0
    source = SourceRef("t1", len(source_of(told)), sealed(told), "a")
    copies = (CopySegment(0, 71, 119, 61), CopySegment(0, 120, 270, 110))
    return scheduler, ReusePayload(mode=ReuseMode.LIVE, sources=(source,), copies=copies)


def test_named_content_is_copied_without_an_index() -> None:
    """Both texts of another session are found by their places, the short one too."""
    scheduler, asked = prepared()
    receipt = ask(scheduler, SECOND, turn("b"), asked).receipt
    assert receipt.outcome is Outcome.UNEDITED
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=198, extents=((61, 109), (110, 260))
    )
    assert [run.start for run in receipt.lineage] == [61]


def test_wrong_names_cost_nothing() -> None:
    """Another tenant's turn, a wrong digest and misplaced ids are left out, without an error."""
    scheduler, asked = prepared()
    plain = ReuseCounts(mode=ReuseMode.LIVE)
    foreign = ask(scheduler, SECOND, turn("b", scope="else"), asked).receipt
    assert (foreign.outcome, foreign.reuse) == (Outcome.UNEDITED, plain)
    forged = msgspec.structs.replace(asked.sources[0], digest="0" * 16)
    wrong = msgspec.structs.replace(asked, sources=(forged,))
    assert ask(scheduler, SECOND, turn("c"), wrong).receipt.reuse == plain
    scheduler, asked = prepared()
    shifted = ask(scheduler, [7, *text(61, 5), *SECOND[61:]], turn("d"), asked)
    assert shifted.receipt.reuse == plain


def test_a_forget_reaches_those_who_named_it() -> None:
    """The copies are gone with the text that they have read, and the name leads nowhere."""
    scheduler, asked = prepared()
    reader = ask(scheduler, SECOND, turn("b"), asked).receipt
    assert reader.tokens.reused == 198
    ask(scheduler, text(40, 7), turn("a", "t2", forget=("texts",)), None)
    payload = turn("b", "t2", lineage=reader.lineage)
    again = ask(scheduler, [*SECOND, 7], payload, asked).receipt
    assert again.tokens.prefix <= 61
    assert again.reuse == ReuseCounts(mode=ReuseMode.LIVE)
