"""Places of labels in a prompt that takes pieces of their turn."""

from __future__ import annotations

from leyline_engine.contract import CopySegment, SpanLabel
from leyline_engine.records.ledger import moved_labels

LABELS = [SpanLabel("a", 0, 10), SpanLabel("b", 10, 20), SpanLabel("c", 20, 30)]


def test_only_spans_that_are_gone_have_hidden_readers() -> None:
    """A span copied whole is visible where it lands; one that was cut is read by the next."""
    kept, copy = CopySegment(0, 0, 10, 0), CopySegment(0, 20, 30, 10)
    moved = list(moved_labels(LABELS, [kept, copy], [copy]))
    assert moved == [(LABELS[1], 10)]
    everything = CopySegment(0, 0, 30, 5)
    assert list(moved_labels(LABELS, [everything], [everything])) == []
