"""Answers about spans: readers by turn and by lineage, and what isn't known."""

from __future__ import annotations

from array import array

from leyline_engine.contract import LedgerQuestion, SpanLabel, SpanReaders
from leyline_engine.records.ledger import (
    ANYTHING,
    Carried,
    SpanKey,
    SpanLedger,
    anything_of,
)
from leyline_engine.records.ledger_reading import read_ledger
from leyline_engine.records.pending import PendingForgets
from leyline_engine.records.sources import SourceRegistry, SourceTurn

SESSION = ("red", "s")


def turn(name: str, *labels: SpanLabel) -> SourceTurn:
    """A retained turn of nine tokens."""
    return SourceTurn(name, array("q", range(9)), "d", (), "red", "s", labels)


def asked(*spans: str) -> LedgerQuestion:
    return LedgerQuestion(scope="red", session="s", spans=spans)


def test_readers_are_counted_by_turn_and_lineage() -> None:
    """A span is read by the turns that show it and by lineages that carry it; the first position
    of all counts. Another session's span of the same name is another span."""
    ledger, registry = SpanLedger(), SourceRegistry()
    ledger.label(SESSION, ["a", "b", "c"])
    registry.retain(SESSION, turn("t0", SpanLabel("a", 2, 5), SpanLabel("a", 7, 9)))
    registry.retain(SESSION, turn("t1", SpanLabel("b", 0, 4)))
    ledger.enter("red", Carried("l1", 6, {SpanKey("red", "s", "b"): 6}))
    ledger.enter("red", Carried("l2", 3, {SpanKey("red", "other", "a"): 3}))
    ledger.enter("blue", Carried("l3", 1, {SpanKey("blue", "s", "a"): 1}))
    found = read_ledger(asked("a", "b", "c", "unknown"), ledger, registry, 4)
    assert found.pending == 4
    assert found.spans == {
        "a": SpanReaders(turns=1, lineages=0, first=2),
        "b": SpanReaders(turns=1, lineages=1, first=0),
        "c": SpanReaders(turns=0, lineages=0, first=None),
    }


def test_a_lineage_that_may_carry_anything_counts_for_each_span() -> None:
    """Each span is read at the one position that the ledger keeps for all."""
    for entry in (anything_of("red"), ANYTHING):
        ledger = SpanLedger()
        ledger.enter("red", Carried("l1", 5, {entry: 5, SpanKey("red", "s", "a"): 3}))
        found = read_ledger(asked("a", "b"), ledger, SourceRegistry(), 0).spans
        assert found["a"] == SpanReaders(turns=0, lineages=1, first=3)
        assert found["b"] == SpanReaders(turns=0, lineages=1, first=5)


def test_slots_that_wait_are_counted_by_session() -> None:
    """Only tickets of the session count, until their last slot is overwritten."""
    pending = PendingForgets()
    pending.wait("m-1", "holder", 3)
    pending.wait("m-2", "other", 2)
    pending.open("m-1", 1, 0, SESSION)
    pending.open("m-2", 1, 0, ("blue", "s"))
    assert (pending.of(SESSION), pending.of(("red", "x"))) == (3, 0)
    pending.let_go(["holder"])
    pending.settle()
    assert pending.of(SESSION) == 0
    pending.take()
    assert pending._owners == {"m-2": ("blue", "s")}
