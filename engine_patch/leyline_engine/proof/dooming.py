"""Text and rows that a forget has to remove, found by owners and text. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from leyline_engine.proof.doomed import DoomedRow
from leyline_engine.proof.session_proof import SessionProof
from leyline_engine.proof.witness import Slots
from leyline_engine.records.ledger import (
    Carried,
    SpanKey,
    SpanLedger,
    Struck,
)
from leyline_engine.records.lineage import MAX_TOKEN, TOKEN_BITS, lineage_bits
from leyline_engine.records.provenance import Contents
from leyline_engine.records.sources import SourceTurn


@dataclass(slots=True)
class Doomed:
    """Doomed rows, as they are found.

    Args:
        kept: paths that may stay.
        lineages: lineages that have read doomed spans, and the position from which on.
    """

    kept: set[bytes]
    lineages: Mapping[int, int]
    found: dict[int, DoomedRow] = field(default_factory=dict)

    @property
    def slots(self) -> Slots:
        """Slots of the rows."""
        return np.fromiter(self.found, dtype=np.int64, count=len(self.found))

    @property
    def rows(self) -> list[DoomedRow]:
        """The rows as paths and tokens, in the same order."""
        return list(self.found.values())

    def add(
        self,
        slots: Sequence[int],
        keys: Sequence[int],
        paths: Sequence[bytes],
        contents: Contents,
        *,
        start: int,
        own: bool,
    ) -> None:
        """Add those slots of a run of cached keys that have to go.

        Args:
            paths: paths of the keys.
            contents: what the slots have read.
            start: position of the first.
            own: True if the session published them.
        """
        for at, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            first = self.lineages.get(key >> TOKEN_BITS) if key > MAX_TOKEN else None
            read = first is not None and first <= start + at
            if read or (own and paths[at] not in self.kept):
                self.found[slot] = DoomedRow(contents.at(at), key & MAX_TOKEN)


def doomed_text(
    proof: SessionProof,
    turns: Sequence[SourceTurn],
    ledger: SpanLedger,
    spans: frozenset[SpanKey] | None,
    *,
    spared: Sequence[array[int]],
    splices: Sequence[tuple[str, Carried]] = (),
) -> Doomed:
    """Note a session's doomed text and spans in its proof.

    Args:
        turns: the session's retained turns.
        spans: spans to forget; None for everything.
        spared: keys that the request that forgets may use.
        splices: by tenant, what running requests carry that the ledger doesn't know yet.

    Returns:
        What may stay, and what has read the spans; no rows yet.
    """
    session = proof.session
    proof.turns |= {turn.turn for turn in turns}
    proof.spans |= ledger.hidden_spans(session) if spans is None else spans
    kept = {path for keys in spared for path in proof.paths.of(keys)}
    shown = [(proof.paths.of(turn.keys()), _first(turn, ledger, spans)) for turn in turns]
    for paths, first in shown:
        if first >= len(paths):  # it has read none of the spans
            kept.update(paths)
    for paths, _ in shown:
        proof.text.update(path for path in paths if path not in kept)
    lineages = {
        lineage_bits(name, owner): at
        for (owner, name), at in ledger.lineages_reading(session[0], proof.spans).items()
    }
    struck = Struck(session, frozenset(proof.spans), {}, whole=spans is None)
    proof.readers |= lineages
    for owner, carried in splices:
        read = [at for span, at in carried.readers.items() if struck.names(span)]
        bits = lineage_bits(carried.lineage, owner)
        if read:
            proof.readers[bits] = min(*read, proof.readers.get(bits, sys.maxsize))
    return Doomed(kept, lineages)


def _first(turn: SourceTurn, ledger: SpanLedger, spans: frozenset[SpanKey] | None) -> int:
    """Return the first token of a turn that shows, or has read, a doomed span."""
    if spans is None:
        return 0
    shown = [
        label.start
        for label in turn.spans
        if SpanKey(turn.scope, turn.session, label.span) in spans
    ]
    return min([*shown, ledger.first_reader(turn, spans)])
