"""An engine's answer about the spans of a session. Pure."""

from __future__ import annotations

from leyline_engine.contract import LedgerAnswer, LedgerQuestion, SpanReaders
from leyline_engine.records.ledger import (
    ANYTHING,
    SpanKey,
    SpanLedger,
    anything_of,
)
from leyline_engine.records.sources import SourceRegistry


def read_ledger(
    question: LedgerQuestion, ledger: SpanLedger, registry: SourceRegistry, pending: int
) -> LedgerAnswer:
    """Return who holds or has read each span that the ledger knows.

    Args:
        pending: slots of the session's forgets that aren't overwritten yet.
    """
    scope, session = question.scope, (question.scope, question.session)
    wanted = {SpanKey(*session, name) for name in question.spans}
    counts = dict.fromkeys(wanted, 0)
    first: dict[SpanKey, int] = {}
    anything: list[int] = []
    """First positions of lineages that may have read anything, and so each span."""
    for _, readers in ledger.readers_of(scope):
        vague = [readers[each] for each in (anything_of(scope), ANYTHING) if each in readers]
        if vague:
            anything.append(min(vague))
        for span in readers.keys() & wanted:
            counts[span] += not vague
            first[span] = min(readers[span], first.get(span, readers[span]))
    if anything:
        for span in wanted:
            counts[span] += len(anything)
            first[span] = min(*anything, first.get(span, anything[0]))
    turns = dict.fromkeys(wanted, 0)
    for turn in registry.turns(session):
        for span, start in {
            SpanKey(*session, label.span): label.start for label in reversed(turn.spans)
        }.items():
            if span in wanted:
                turns[span] += 1
                first[span] = min(start, first.get(span, start))
    return LedgerAnswer(
        spans={
            span.span: SpanReaders(turns=turns[span], lineages=counts[span], first=first.get(span))
            for span in sorted(wanted)
            if counts[span] or turns[span] or ledger.knows(session, (span.span,))
        },
        pending=pending,
    )
