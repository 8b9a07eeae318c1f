"""The ledger of spans: each span's first reader, wherever an edit has moved it. Pure.

::

    turn 1   0 ── system ──[ m3 ]── m4 ── m5            m3 is in place: its first reader is itself
    turn 2   0 ── system ──[stub]══ m4 ══ m5 ── m6      copied after the cut: m4's KV has read m3
                                  └ first reader of m3, found under the lineage of the splice

A position has read the content before it and, through KV that a splice moved, the content before
that KV in its source. Readers are stored as the first such position: everything after it counts as
a reader too, so a wrong answer errs to the left, which costs a prefill and never a secret.

Spans that the ledger had to drop because of its bounds count as read by everything.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from leyline_engine.contract import CopySegment, LineageRun, SpanLabel
from leyline_engine.lineage import run_extents, runs_before
from leyline_engine.sources import SessionKey, SourceTurn

ANYTHING = ("", "")
"""Reader entry of lineages that carry a span which the ledger no longer knows."""

NOWHERE = sys.maxsize

SpanKey = tuple[str, str]
"""(session, span); both are named within a tenant scope."""

Readers = Mapping[SpanKey, int]
"""First position that has read a span, by span."""

MAX_READERS = 4096
"""Maximum number of spans noted per lineage; of more, only the first position of all is kept."""

MAX_SHARED_STARTS = 8
"""Maximum number of a scope's starts of shared KV; the least recently spliced are dropped first."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The readers that a splice brings into a lineage, to be entered once its KV can be found."""

    lineage: str
    start: int
    readers: Readers
    share: str = ""
    foreign: bool = False
    """True if its KV may have read what reuse brought from another place or session."""


@dataclass(frozen=True, slots=True)
class Struck:
    """Spans of which no KV is found any more, and their readers until then."""

    session: SessionKey
    spans: frozenset[SpanKey]
    lineages: Mapping[str, int]
    """Lineages whose moved KV had read one of the spans, and the place from which on."""
    whole: bool = False
    """True if all KV of the session went, not just the named spans."""

    def names(self, span: SpanKey) -> bool:
        """Return True if a reader of ``span`` may have read any of it."""
        whole = self.whole and span[0] == self.session[1]
        return whole or span == ANYTHING or span in self.spans


class SpanLedger:
    """Span names by session, readers by lineage. Bounded; it stores positions and names only."""

    def __init__(
        self, *, max_sessions: int = 1024, max_names: int = 65_536, max_lineages: int = 4096
    ) -> None:
        self._max_sessions = max_sessions
        self._max_names = max_names
        self._max_lineages = max_lineages
        self._names: OrderedDict[SessionKey, set[str]] = OrderedDict()
        self._readers: OrderedDict[tuple[str, str], dict[SpanKey, int]] = OrderedDict()
        self._foreign: set[tuple[str, str]] = set()
        """Lineages of :attr:`_readers` whose KV may have read what reuse brought along."""
        self._shared: OrderedDict[tuple[str, str], OrderedDict[int, None]] = OrderedDict()

    def label(self, session: SessionKey, names: Iterable[str]) -> None:
        """Note that a session holds these spans."""
        known = self._names.setdefault(session, set())
        self._names.move_to_end(session)
        known.update(names)
        if len(known) > self._max_names:
            # The spans still held aren't known: none is, and a forget reaches everything.
            known.clear()
        while len(self._names) > self._max_sessions:
            self._names.popitem(last=False)

    def span_count(self) -> int:
        """Return the number of names noted."""
        return sum(len(names) for names in self._names.values())

    def lineage_count(self) -> int:
        """Return the number of lineages whose readers are noted."""
        return len(self._readers)

    def knows(self, session: SessionKey, names: Collection[str]) -> bool:
        """Return True if the readers of all these spans are known."""
        return self._names.get(session, set()).issuperset(names)

    def first_reader(self, turn: SourceTurn, spans: Collection[SpanKey]) -> int:
        """Return the first position of a turn that read one of ``spans``; its length if none."""
        length = len(turn.tokens)
        standing = min(
            (label.start for label in turn.spans if (turn.session, label.span) in spans),
            default=length,
        )
        return min(
            standing,
            first_unlabelled(turn.spans, length),
            self.hidden_reader(turn.lineage, turn.scope, spans, length),
        )

    def hidden_reader(
        self, runs: Sequence[LineageRun], scope: str, spans: Collection[SpanKey], length: int
    ) -> int:
        """Return the first position under a lineage map whose moved KV has read one of ``spans``.

        Returns:
            A position; ``length`` if there is none.
        """
        for start, end, readers in self._by_run(runs, scope, length):
            first = min(
                (readers[span] for span in (*spans, ANYTHING) if span in readers), default=end
            )
            if first < end:
                return max(first, start)
        return length

    def carry(
        self, sources: Sequence[SourceTurn], copies: Sequence[CopySegment], shared: Sequence[int]
    ) -> dict[SpanKey, int]:
        """Return the spans that copied KV has read though they aren't whole in the new prompt.

        Args:
            sources: sources by the index that copies name.
            copies: spans that the prompt takes from each source.
            shared: per source, the number of leading tokens that it shares with the prompt.

        Returns:
            First reader of each, in prompt positions.
        """
        readers: dict[SpanKey, int] = {}
        for index, source in enumerate(sources):
            taken = [copy for copy in copies if copy.source == index]
            kept = [CopySegment(index, 0, shared[index], 0), *taken]
            for span, position, place in self._read(source, kept):
                reader = min((_landing(copy, position) for copy in taken), default=place)
                if reader < place:
                    readers[span] = min(reader, readers.get(span, reader))
        return readers

    def _read(
        self, source: SourceTurn, kept: Sequence[CopySegment]
    ) -> Iterable[tuple[SpanKey, int, int]]:
        """Yield the spans that a source has read, their first readers and places in the prompt.

        A span that isn't whole in one of the ``kept`` pieces has no place, and nor has text without
        a label.
        """
        unlabelled = first_unlabelled(source.spans, len(source.tokens))
        if unlabelled < len(source.tokens):
            yield ANYTHING, unlabelled, NOWHERE
        for label in source.spans:
            places = [
                copy.dest + label.start - copy.start
                for copy in kept
                if copy.start <= label.start and label.end <= copy.end
            ]
            yield (source.session, label.span), label.start, min(places, default=NOWHERE)
        for span, position in self._hidden(source.lineage, source.scope, len(source.tokens)):
            yield span, position, NOWHERE

    def _hidden(
        self, runs: Sequence[LineageRun], scope: str, length: int
    ) -> Iterator[tuple[SpanKey, int]]:
        """Yield every span that KV under a lineage map remembers, and its reader in each run."""
        for start, end, readers in self._by_run(runs, scope, length):
            for span, position in readers.items():
                if position < end:
                    yield span, max(position, start)

    def _by_run(
        self, runs: Sequence[LineageRun], scope: str, length: int
    ) -> Iterator[tuple[int, int, Readers]]:
        """Yield each run's start, end and readers; an unknown lineage has read anything."""
        for run, end in run_extents(runs_before(runs, length), length):
            readers = self._readers.get((scope, run.lineage), {ANYTHING: run.start})
            yield run.start, end, readers

    def remembered(self, runs: Sequence[LineageRun], scope: str, length: int) -> frozenset[SpanKey]:
        """Return the spans that the first ``length`` positions under a lineage map remember."""
        return frozenset(span for span, _ in self._hidden(runs, scope, length))

    def enter(self, scope: str, carried: Carried) -> tuple[tuple[str, str], ...]:
        """Note a lineage's readers; if it is known already, the earlier position holds.

        Returns:
            (scope, lineage) of records that were dropped for it. Their KV must not stay matchable.
        """
        key = (scope, carried.lineage)
        known = self._readers.setdefault(key, {})
        self._readers.move_to_end(key)
        for span, position in carried.readers.items():
            known[span] = min(position, known.get(span, position))
        if len(known) > MAX_READERS:
            self._readers[key] = {ANYTHING: min(known.values())}
        if carried.foreign:
            self._foreign.add(key)
        if carried.share:
            self._share(scope, carried)
        surplus = len(self._readers) - self._max_lineages
        dropped = tuple(self._readers.popitem(last=False)[0] for _ in range(surplus))
        self._foreign.difference_update(dropped)
        return dropped

    def is_foreign(self, scope: str, runs: Sequence[LineageRun]) -> bool:
        """Return True if KV under a lineage map may have read what reuse brought along."""
        keys = [(scope, run.lineage) for run in runs]
        return any(key in self._foreign or key not in self._readers for key in keys)

    def _share(self, scope: str, carried: Carried) -> None:
        starts = self._shared.setdefault((scope, carried.share), OrderedDict())
        self._shared.move_to_end((scope, carried.share))
        starts[carried.start] = None
        starts.move_to_end(carried.start)
        while len(starts) > MAX_SHARED_STARTS:
            starts.popitem(last=False)
        while len(self._shared) > self._max_sessions:
            self._shared.popitem(last=False)

    def shared_starts(self, scope: str, share: str) -> tuple[int, ...]:
        """Return the positions at which KV that a scope shares begins, latest first."""
        return tuple(reversed(self._shared.get((scope, share), ())))

    def lineages_reading(self, scope: str, spans: Collection[SpanKey]) -> dict[str, int]:
        """Return a tenant's lineages whose moved KV read one of ``spans``, and from where on."""
        found: dict[str, int] = {}
        for (owner, lineage), readers in self._readers.items():
            first = [readers[span] for span in (*spans, ANYTHING) if span in readers]
            if owner == scope and first:
                found[lineage] = min(first)
        return found

    def hidden_spans(self, session: SessionKey) -> frozenset[SpanKey]:
        """Return all spans of a session that any lineage remembers."""
        scope, name = session
        return frozenset(
            span
            for (owner, _), readers in self._readers.items()
            if owner == scope
            for span in readers
            if span[0] == name
        )

    def strike(self, scope: str, spans: Collection[SpanKey]) -> None:
        """Remove spans from the readers: no KV that read them can be found any more."""
        for (owner, _), readers in self._readers.items():
            if owner == scope:
                for span in spans:
                    readers.pop(span, None)

    def read_by(
        self,
        struck: Struck,
        scope: str,
        runs: Sequence[LineageRun],
        carried: Carried | None,
        length: int,
    ) -> bool:
        """Return True if a request that runs while spans are struck may have read any of them.

        Args:
            runs: the request's lineage map.
            carried: the hidden readers of its splice, if not entered yet.
            length: length of its prompt. The request computed the KV after it itself.
        """
        if scope != struck.session[0]:
            return False
        if carried is not None and any(map(struck.names, carried.readers)):
            return True
        for run in runs:
            own = carried is not None and carried.lineage == run.lineage
            known = own or (scope, run.lineage) in self._readers
            first = struck.lineages.get(run.lineage, length if known else run.start)
            if max(first, run.start) < length:
                return True
        return False


def first_unlabelled(labels: Sequence[SpanLabel], length: int) -> int:
    """Return the first position that no label covers, or ``length``. Labels are sorted by start."""
    covered = 0
    for label in labels:
        if label.start > covered:
            break
        covered = max(covered, label.end)
    return min(covered, length)


def _landing(copy: CopySegment, position: int) -> int:
    """Return the place of a copy's first token that is at or after a source position."""
    return copy.dest + max(0, position - copy.start) if position < copy.end else NOWHERE
