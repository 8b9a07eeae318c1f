"""The effect of an edit, read from the records alone."""

from __future__ import annotations

from typing import Any

import pytest
from audit_kit import AT

from leyline_engine.contract import ForgetCounts, Outcome, Receipt
from leyline_proxy.audit.effects import MEANINGS, edits_of
from leyline_proxy.audit.facts import EditFacts, TurnEdits
from leyline_proxy.audit.records import TurnFacts, erasure_record, turn_record
from leyline_proxy.model.session import EditRecord

CLOSED = ForgetCounts(overwritten=4)


def turn(
    mode: str,
    outcome: Outcome | None = Outcome.REPREFILLED,
    *,
    index: int = 1,
    forgot: ForgetCounts | None = None,
    vouched: bool = True,
    names: tuple[str, ...] = ("n1",),
    **members: Any,
) -> Any:
    """The record of a turn with one edit."""
    record = EditRecord(2, "tool", "policy:p", mode, (10, 30), 5)  # type: ignore[arg-type]
    receipt = None
    if outcome is not None:
        receipt = Receipt(message_id="m", outcome=outcome, forgot=forgot)
    facts = TurnFacts(
        at=AT,
        status="settled" if outcome is not None else "abandoned",
        tenant="red",
        session=members.pop("session", "s"),
        turn=f"t{index}",
        index=index,
        message_id=f"m-{index}",
        model="x",
        engine="f@run",
        planned=Outcome.SPLICED if mode == "amortize" else Outcome.REPREFILLED,
        receipt=receipt if vouched else None,
        told=receipt,
        edits=TurnEdits((EditFacts(record, names=names),)),
        forget=members.pop("forget", names if mode == "forget" else ()),
        **members,
    )
    return turn_record(facts, None)


@pytest.mark.parametrize(
    ("record", "effect"),
    [
        (turn("amortize", Outcome.SPLICED), "amortized"),
        (turn("amortize", Outcome.REPREFILLED), "recomputed"),
        (turn("amortize", Outcome.REPREFILLED, vouched=False), "unknown"),
        (turn("amortize", None), "unknown"),
        (turn("exact", Outcome.SPLICED), "recomputed"),
        (turn("forget", forgot=CLOSED), "erased"),
        (turn("forget", Outcome.SPLICED, forgot=CLOSED), "erased"),
        (turn("forget", forgot=ForgetCounts(pending=1)), "pending"),
        (turn("forget", forgot=ForgetCounts(shared_retained=1)), "shared"),
        (turn("forget", forgot=CLOSED, owed=("f@other",)), "pending"),
        (turn("forget"), "unconfirmed"),
        (turn("forget", None), "unconfirmed"),
    ],
)
def test_each_edit_has_an_effect(record: Any, effect: str) -> None:
    """Only what an engine vouches for is called erased; what was spliced may influence."""
    assert [view.effect for view in edits_of([record])] == [effect]
    assert effect in MEANINGS


def test_other_engines_have_to_forget_too() -> None:
    """A forget is pending until each engine that held the session has confirmed it, or ended."""
    forget = turn("forget", forgot=CLOSED, owed=("f@a", "f@b"))
    done = [
        erasure_record("red", "s", engine, result, AT)
        for engine, result in (("f@a", "erased"), ("f@b", "pending"), ("f@b", "gone"))
    ]
    seen = [edits_of([forget, *done[:count]])[0].effect for count in range(4)]
    assert seen == ["pending", "pending", "pending", "erased"]
    before = edits_of([*done, forget])[0].effect
    assert before == "pending", "what was erased before the demand doesn't count"
    other = [{**record, "session": "other"} for record in done]
    assert edits_of([forget, *other])[0].effect == "pending"


def test_a_later_forget_ends_the_influence() -> None:
    """It is a confirmed forget of the same message or of everything, in the same session."""
    spliced = turn("amortize", Outcome.SPLICED)
    cases = {
        "same": (turn("forget", forgot=CLOSED, index=2), 2),
        "all": (turn("forget", forgot=CLOSED, index=2, names=("n9",), forget=("*",)), 2),
        "another": (turn("forget", forgot=CLOSED, index=2, names=("n9",)), None),
        "unconfirmed": (turn("forget", index=2), None),
        "elsewhere": (turn("forget", forgot=CLOSED, index=2, session="x"), None),
    }
    for name, (later, expected) in cases.items():
        view = edits_of([spliced, later])[0]
        assert (view.effect, view.erased_by) == ("amortized", expected), name
        assert view.may_influence == (expected is None), name
        assert edits_of([later, spliced])[1].erased_by is None, name
