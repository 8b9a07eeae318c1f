"""The end of a turn: it becomes a source for later ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from leyline_engine.contract import (
    LineageRun,
    ReusePayload,
    SpanLabel,
    output_span,
    token_digest,
)
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.sources import SessionKey, SourceRegistry, SourceTurn


def source_of(
    session: SessionKey,
    turn: str,
    tokens: array[int],
    *,
    lineage: tuple[LineageRun, ...],
    spans: Sequence[SpanLabel],
    reuse: ReusePayload | None = None,
    cache_salt: str | None = None,
    extra_key: str | None = None,
) -> SourceTurn:
    """Return a turn's tokens, all or its prompt's, as a source; see :func:`retain_turn`."""
    groups = frozenset(reuse.groups) if reuse is not None else frozenset[str]()
    return SourceTurn(
        turn,
        tokens,
        token_digest(tokens),
        lineage,
        *session,
        spans=tuple(spans),
        groups=groups,
        cache_salt=cache_salt,
        extra_key=extra_key,
    )


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
    reuse: ReusePayload | None = None,
    cache_salt: str | None = None,
    extra_key: str | None = None,
) -> SourceTurn:
    """Retain a turn, and label what the engine wrote in it.

    Args:
        spans: labels of the prompt's parts.
        reuse: the turn's request for reuse, which names the groups that may take its content.
        cache_salt: salt of the radix namespace that has its KV.
        extra_key: the rest of that namespace; see :class:`.SourceTurn`.
    """
    tokens = prompt + output
    written = SpanLabel(output_span(turn), len(prompt), len(tokens))
    ledger.label(session, [written.span])
    source = source_of(
        session,
        turn,
        tokens,
        lineage=lineage,
        spans=(*spans, written),
        reuse=reuse,
        cache_salt=cache_salt,
        extra_key=extra_key,
    )
    registry.retain(session, source)
    return source
