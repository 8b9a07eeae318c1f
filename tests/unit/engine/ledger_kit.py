"""Turns whose tokens are span names and whose every position knows what its KV has read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.contract import CopySegment, LineageRun, SpanLabel, common_prefix
from leyline_engine.records.ledger import Carried, SpanLedger
from leyline_engine.records.sources import SourceTurn

SCOPE, SESSION = "tenant", "s"


@dataclass(frozen=True)
class Turn:
    """A turn whose tokens are span names, and what each position's KV has read."""

    source: SourceTurn
    read: tuple[frozenset[int], ...]

    @property
    def spans(self) -> list[int]:
        return self.source.tokens.tolist()


def labels(tokens: Sequence[int]) -> tuple[SpanLabel, ...]:
    """One label per run of equal tokens: token 7 belongs to span "7"."""
    found: list[SpanLabel] = []
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or tokens[end] != tokens[start]:
            found.append(SpanLabel(str(tokens[start]), start, end))
            start = end
    return tuple(found)


def turn_of(name: str, tokens: Sequence[int], lineage: tuple[LineageRun, ...] = ()) -> SourceTurn:
    """A retained turn of the session, labelled by its tokens."""
    ids = array("q", tokens)
    return SourceTurn(name, ids, name, lineage, SCOPE, SESSION, labels(tokens))


def computed(tokens: Sequence[int], known: dict[int, frozenset[int]]) -> tuple[frozenset[int], ...]:
    """The reads of each position: itself and all before it, or those of its copied KV."""
    read: list[frozenset[int]] = []
    seen: frozenset[int] = frozenset()
    for position, token in enumerate(tokens):
        here = known.get(position, seen | {token})
        seen |= here | {token}
        read.append(here)
    return tuple(read)


def opened(tokens: Sequence[int], name: str = "t0") -> Turn:
    """A turn that was prefilled as a whole."""
    return Turn(turn_of(name, tokens), computed(tokens, {}))


def spliced(
    ledger: SpanLedger, name: str, sources: Sequence[Turn], cuts: Sequence[CopySegment], fresh: int
) -> Turn:
    """A turn of the first source's common prefix, copies, and other fresh tokens.

    Args:
        cuts: copies to chain; their ``dest`` is set here.
        fresh: span of the fresh tokens between and after them.
    """
    base = sources[0]
    tokens: list[int] = base.spans[: cuts[0].dest]
    known = dict(enumerate(base.read[: cuts[0].dest]))
    copies: list[CopySegment] = []
    for cut in cuts:
        tokens.append(fresh)
        source = sources[cut.source]
        copies.append(replace_dest(cut, len(tokens)))
        known.update(
            {len(tokens) + i: source.read[cut.start + i] for i in range(cut.end - cut.start)}
        )
        tokens.extend(source.spans[cut.start : cut.end])
    tokens.append(fresh)
    runs = tuple(run for run in base.source.lineage if run.start < cuts[0].dest)
    shared = [common_prefix(turn.source.tokens, array("q", tokens)) for turn in sources]
    readers = ledger.carry([turn.source for turn in sources], copies, shared)
    ledger.enter(SCOPE, Carried(name, copies[0].dest, readers))
    lineage = (*runs, LineageRun(copies[0].dest, name))
    return Turn(turn_of(name, tokens, lineage), computed(tokens, known))


def replace_dest(copy: CopySegment, dest: int) -> CopySegment:
    """The same copy for another place."""
    return CopySegment(copy.source, copy.start, copy.end, dest)


def true_reader(turn: Turn, span: int) -> int:
    """The first position that has read a span, by the book-keeping of this file."""
    return next((i for i, read in enumerate(turn.read) if span in read), len(turn.read))
