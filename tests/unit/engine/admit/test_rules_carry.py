"""Readers that copies bring along, under a lineage that continues or one of its own."""

from __future__ import annotations

from array import array

from leyline_engine.admit.edits import ResolvedEdit
from leyline_engine.admit.plan import Plan, Prefill
from leyline_engine.admit.rules import CheckedRequest, Rules
from leyline_engine.contract import (
    CopySegment,
    EditPayload,
    LineageRun,
    SpanLabel,
    token_digest,
)
from leyline_engine.records.ledger import Carried, SpanKey, SpanLedger
from leyline_engine.records.sources import SourceRegistry, SourceTurn

SCOPE = "t"
SECRET = SpanKey("t", "s", "secret")
RUNS = (LineageRun(30, "parent"),)
READ_AT, GAP, COPIED_TO = 50, 40, 55
"""The parent lineage reads the secret between the cached prefix's end and the first copy."""


def drawing(share: str = "") -> tuple[Rules, CheckedRequest, Plan]:
    """A request whose copies bring the parent's secret along, and its plan."""
    ledger = SpanLedger()
    ledger.enter(SCOPE, Carried("parent", 30, {SECRET: READ_AT}))
    rules = Rules(SourceRegistry(), ledger, splices=True, salt=b"salt of the test")
    tokens = array("q", range(100, 190))
    labels = (SpanLabel("all", 0, len(tokens)),)
    source = SourceTurn("t1", tokens, token_digest(tokens), RUNS, SCOPE, "s", labels)
    copy = CopySegment(0, 60, 80, COPIED_TO)
    prompt = tokens[:GAP] + array("q", range(500, 515)) + tokens[60:80] + array("q", [7])
    payload = EditPayload(session="s", scope=SCOPE, turn="t2", lineage=RUNS, share=share)
    edit = ResolvedEdit(payload, (source,), (copy,), None)
    gap, rest = Prefill(GAP, COPIED_TO), Prefill(COPIED_TO + 20, len(prompt))
    plan = Plan(len(prompt), GAP, (copy,), (gap, rest))
    return rules, CheckedRequest(prompt, payload, edit, None, (), None), plan


def test_copies_under_a_lineage_of_their_own_bring_all_that_they_have_read() -> None:
    """The parent's word holds for keys under the parent alone. Where the new lineage begins before
    the first copy, the parent says nothing of what the copies read in between."""
    rules, request, plan = drawing()

    continued = rules.carry(request, RUNS, plan)
    alone = rules.carry_alone(request, RUNS, plan, "m", GAP)
    assert continued is not None and alone is not None
    assert SECRET not in continued.readers, "its parent remembers it from there on"
    assert (alone.start, alone.share) == (GAP, "")
    assert alone.readers == {SECRET: COPIED_TO, SpanKey("t", "s", "all"): COPIED_TO}
    assert alone.lineage != continued.lineage
    known_before = rules.carry_alone(request, RUNS, plan, "m", READ_AT + 1)
    assert known_before is not None and SECRET not in known_before.readers


def test_copies_under_a_shared_lineage_bring_all_that_they_have_read() -> None:
    """Others reach a shared lineage from parents that remember nothing of this one's."""
    rules, request, plan = drawing(share="team")
    shared = rules.carry(request, RUNS, plan)
    assert shared is not None and shared.share == "team"
    assert shared.readers == {SECRET: COPIED_TO, SpanKey("t", "s", "all"): COPIED_TO}
