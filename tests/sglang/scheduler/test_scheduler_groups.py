"""Reuse between tenants in SGLang's queue: groups, namespaces of the cache, and forgets."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_kit import Scheduler, text

from leyline_engine.contract import (
    EditPayload,
    Receipt,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SpanLabel,
)
from leyline_engine.records.publications import Space

pytestmark = pytest.mark.usefixtures("server_args")

DOCS = ReusePayload(mode=ReuseMode.LIVE, groups=("docs",))
LIVE = ReusePayload(mode=ReuseMode.LIVE)
DOC, NEXT = text(150, 9), text(100, 10)
FIRST = [*text(70, 1), 1, *DOC, 2, *text(20, 2)]
SECOND = [*text(60, 3), 3, *DOC, 4, *text(30, 4)]
SECRET = 1001
RED, BLUE = Space(None, "red"), Space(None, "blue")


def turn(scope: str, session: str = "s", name: str = "t1", **fields: Any) -> EditPayload:
    """The payload of a tenant's turn."""
    return EditPayload(session=session, scope=scope, turn=name, **fields)


def ask(
    scheduler: Scheduler,
    prompt: list[int],
    payload: EditPayload,
    reuse: ReusePayload | None = DOCS,
    space: Space = BLUE,
) -> Receipt:
    """The receipt of one request, served alone; its counts add up."""
    _, record = scheduler.serve(prompt, payload, reuse=reuse, space=space)
    assert record is not None
    counts = record.receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(prompt)
    scheduler.check_idle()
    return record.receipt


def prepared(reuse: ReusePayload = DOCS, space: Space = RED) -> Scheduler:
    """A scheduler in which the first tenant has the document."""
    scheduler = Scheduler(3000)
    ask(scheduler, FIRST, turn("red"), reuse, space)
    return scheduler


@pytest.mark.parametrize(
    ("theirs", "ours", "found"), [(DOCS, DOCS, 150), (DOCS, LIVE, 0), (LIVE, DOCS, 0)]
)
def test_content_is_taken_only_in_a_group_of_both(
    theirs: ReusePayload, ours: ReusePayload, found: int
) -> None:
    """Tenants whose namespaces share nothing take content in a group that both declare."""
    receipt = ask(prepared(theirs), SECOND, turn("blue"), ours)
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, group=found, extents=((61, 211),) if found else ()
    )
    assert receipt.tokens.reused == found


def test_kv_of_another_adapter_is_no_use() -> None:
    """An ``extra_key`` stands for what computed the KV; a salt only for whose it is."""
    receipt = ask(prepared(), SECOND, turn("blue"), DOCS, Space("adapter", "blue"))
    assert receipt.tokens.reused == 0
    same = ask(prepared(space=Space("adapter", "red")), SECOND, turn("blue"), DOCS, RED)
    assert same.tokens.reused == 0


def test_what_was_taken_is_private_to_the_taker() -> None:
    """A clean session of the taker computes the document, and so does the giver's."""
    scheduler = prepared()
    ask(scheduler, SECOND, turn("blue"))
    assert ask(scheduler, [*SECOND, 7], turn("blue", "c"), None).tokens.prefix == 61
    assert ask(scheduler, [*SECOND, 7], turn("red", "c"), None, RED).tokens.prefix == 0


@pytest.mark.parametrize("named", ["doc", "unknown"])
def test_a_forget_reaches_the_other_tenants_copies(named: str) -> None:
    """No cached row remembers the giver's secret, not even a third tenant's."""
    scheduler = Scheduler(3000)
    doc = [*DOC[:70], SECRET, *DOC[70:]]
    labels = (SpanLabel("head", 0, 71), SpanLabel("doc", 71, 223), SpanLabel("tail", 223, 243))
    ask(scheduler, [*FIRST[:71], *doc, *FIRST[221:]], turn("red", spans=labels), DOCS, RED)
    reader = ask(scheduler, [*SECOND[:61], *DOC[71:], *SECOND[211:], *NEXT, 6], turn("blue"))
    assert reader.tokens.reused == 79
    third = ask(scheduler, [*text(50, 7), 3, *NEXT, 8], turn("green"), DOCS, Space())
    assert third.tokens.reused == 100
    assert scheduler.remembered() == {SECRET}, "control: the copies have read the secret"
    receipt = ask(scheduler, text(40, 7), turn("red", name="t2", forget=(named,)), None, RED)
    assert receipt.forgot is not None
    assert receipt.forgot.overwritten > 0
    assert scheduler.remembered() == frozenset()


def test_a_failed_forget_hides_the_other_tenants_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """If readers can't be distinguished, nobody finds what takers spliced either."""
    scheduler = prepared()
    taken = ask(scheduler, SECOND, turn("blue"))
    assert taken.tokens.reused == 150

    def fails(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(scheduler.engine.ledger, "lineages_reading", fails)
    ask(scheduler, text(40, 7), turn("red", name="t2", forget=("x",)), None, RED)
    again = turn("blue", name="t2", lineage=taken.lineage)
    assert ask(scheduler, [*SECOND, 7], again, None).tokens.prefix <= 61


def test_a_waiting_taker_is_withheld_by_a_forget() -> None:
    """A request of another tenant that is under way publishes nothing that it has taken."""
    scheduler = Scheduler(3000, chunk=32)
    ask(scheduler, FIRST, turn("red"), DOCS, RED)
    scheduler.submit(SECOND, turn("blue"), message_id="taker", reuse=DOCS, space=BLUE, decode=60)
    for _ in range(12):
        scheduler.step()
    forget = turn("red", name="t2", forget=("unknown",))
    scheduler.submit(text(40, 7), forget, message_id="forget", space=RED)
    scheduler.drain()
    record = scheduler.sender.records["taker"]
    assert record.receipt.tokens.reused == 150
    assert record.receipt.turn == ""
    again = turn("blue", name="t2", lineage=record.receipt.lineage)
    assert ask(scheduler, [*SECOND, 7], again, None).tokens.prefix <= 61


def test_a_forgotten_prompt_offers_no_kv_that_others_keep() -> None:
    """A stranger's equal prompt stays cached; nobody finds it by the one that was forgotten."""
    scheduler = Scheduler(3000)
    prompt = [*text(40, 6), *DOC, 3]
    ask(scheduler, prompt, turn("stranger"), LIVE, Space())
    scheduler.submit(prompt, turn("red"), message_id="reader", reuse=DOCS, decode=80)
    for _ in range(6):
        scheduler.step()
    scheduler.submit(text(40, 8), turn("red", name="t2", forget=("x",)), message_id="forget")
    for _ in range(8):
        scheduler.step()
    assert scheduler.sender.records["forget"].finished
    assert not scheduler.sender.records["reader"].finished
    asked = [*text(50, 9), *DOC, 4]
    scheduler.submit(asked, turn("blue"), message_id="taker", reuse=DOCS)
    scheduler.drain()
    assert scheduler.sender.records["taker"].receipt.tokens.reused == 0
