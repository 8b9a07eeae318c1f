"""Consent to kept states: which edits need it, and what is refused without."""

from __future__ import annotations

from array import array

import pytest

from leyline_engine.admit.rules import Rules
from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    LiteralSegment,
    Mode,
    Reason,
    RecurrentEdits,
    ReuseMode,
    ReusePayload,
    Segment,
    SourceRef,
    token_digest,
)
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.sources import SourceRegistry, SourceTurn

TOKENS = array("q", range(100, 190))
CUT = TOKENS[:40] + TOKENS[50:]


def reason_of(mode: Mode, consent: RecurrentEdits, *, recurrent: bool = True) -> Reason | None:
    """The reason for which an edit that cuts ten tokens is refused; None if it isn't."""
    registry = SourceRegistry()
    registry.retain(("t", "s"), SourceTurn("t1", TOKENS, token_digest(TOKENS), (), "t", "s"))
    rules = Rules(registry, SpanLedger(), splices=True, salt=b"salt", recurrent=recurrent)
    moved = CopySegment(0, 50, 90, 40) if mode is Mode.AMORTIZE else LiteralSegment(40, 40)
    segments: tuple[Segment, ...] = (CopySegment(0, 0, 40, 0), moved)
    payload = EditPayload(
        session="s",
        scope="t",
        turn="t2",
        sources=(SourceRef("t1", 90, token_digest(TOKENS)),),
        directives=(Directive(40, 50, (), mode),),
        segments=segments,
        recurrent=consent,
    )
    checked = rules.check(CUT, payload, reuse=ReusePayload(mode=ReuseMode.LIVE))
    assert (checked.reuse is None) is recurrent, "a state brings all that it has read"
    assert checked.forgets is (mode is Mode.FORGET)
    return checked.refusal.reason if checked.refusal is not None else None


@pytest.mark.parametrize(
    ("mode", "consent", "recurrent", "expected"),
    [
        (Mode.AMORTIZE, RecurrentEdits.EXACT, True, Reason.RECURRENT_STATE),
        (Mode.AMORTIZE, RecurrentEdits.KEPT, True, None),
        (Mode.AMORTIZE, RecurrentEdits.EXACT, False, None),
        (Mode.FORGET, RecurrentEdits.EXACT, True, None),
    ],
)
def test_only_edits_that_move_states_need_consent(
    mode: Mode, consent: RecurrentEdits, recurrent: bool, expected: Reason | None
) -> None:
    """An edit that only forgets keeps no state that it shouldn't, so nobody is asked."""
    assert reason_of(mode, consent, recurrent=recurrent) is expected
