"""The end of a turn: it becomes a source for later ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from leyline_engine.contract import LineageRun, SpanLabel, output_span, token_digest
from leyline_engine.ledger import SpanLedger
from leyline_engine.sources import SessionKey, SourceRegistry, SourceTurn


def retain_turn(
    registry: SourceRegistry,
    ledger: SpanLedger,
    session: SessionKey,
    turn: str,
    *,
    prompt: array[int],
    output: array[int],
    lineage: tuple[LineageRun, ...],
    spans: Sequence[SpanLabel],
) -> SourceTurn:
    """Retain a turn, and label what the engine wrote in it.

    Args:
        spans: labels of the prompt's parts.
    """
    tokens = prompt + output
    written = SpanLabel(output_span(turn), len(prompt), len(tokens))
    ledger.label(session, [written.span])
    source = SourceTurn(
        turn, tokens, token_digest(tokens), lineage, *session, spans=(*spans, written)
    )
    registry.retain(session, source)
    return source
