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
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import CopySegment, LineageRun, SpanLabel
from leyline_engine.records.lineage import first_unlabelled, run_extents, runs_before
from leyline_engine.records.provenance import Provenance
from leyline_engine.records.sources import SessionKey, SourceTurn

NOWHERE = sys.maxsize

Positions = NDArray[np.int64]


def positions_of(values: Iterable[int], count: int) -> Positions:
    """Return ``count`` positions as a vector."""
    return np.fromiter(values, dtype=np.int64, count=count)


def first_readers(taken: Sequence[CopySegment], starts: Positions) -> Positions:
    """Return, per source position, the place of the first copied token that is at or after it.

    Returns:
        :data:`NOWHERE` where no copy reaches that far.
    """
    found = np.full(len(starts), NOWHERE, dtype=np.int64)
    for copy in taken:
        landing = np.where(
            starts < copy.end, copy.dest + np.maximum(0, starts - copy.start), NOWHERE
        )
        np.minimum(found, landing, out=found)
    return found


def moved_labels(
    labels: Sequence[SpanLabel], kept: Sequence[CopySegment], taken: Sequence[CopySegment]
) -> Iterator[tuple[SpanLabel, int]]:
    """Yield labels whose copied readers come before a whole place of theirs, with the first reader.

    Args:
        kept: pieces of the source that the prompt has.
        taken: those that are copied.
    """
    starts = positions_of((label.start for label in labels), len(labels))
    ends = positions_of((label.end for label in labels), len(labels))
    readers = first_readers(taken, starts)
    for at in np.flatnonzero(readers < _whole_places(kept, starts, ends)).tolist():
        yield labels[at], int(readers[at])


def _whole_places(kept: Sequence[CopySegment], starts: Positions, ends: Positions) -> Positions:
    """Return, per source extent, its first place in the prompt.

    Returns:
        :data:`NOWHERE` where no piece has all of it.
    """
    found = np.full(len(starts), NOWHERE, dtype=np.int64)
    for copy in kept:
        inside = (copy.start <= starts) & (ends <= copy.end)
        np.minimum(found, np.where(inside, copy.dest + starts - copy.start, NOWHERE), out=found)
    return found


class SpanKey(NamedTuple):
    """A span of a session; spans that several tenants name alike are several."""

    scope: str
    session: str
    span: str


ANYTHING = SpanKey("", "", "")
"""Reader entry of lineages that may carry any span of any tenant."""


def anything_of(scope: str) -> SpanKey:
    """Return the reader entry of lineages that may carry any span of a tenant."""
    return SpanKey(scope, "", "")


LineageKey = tuple[str, str]
"""(tenant scope, lineage); a lineage's name means nothing outside of its scope."""

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
    groups: frozenset[str] = frozenset()
    """Groups in which other tenants may take its KV: all that it has read was sent in them."""


@dataclass(frozen=True, slots=True)
class Struck:
    """Spans of which no KV is found any more, and their readers until then."""

    session: SessionKey
    spans: frozenset[SpanKey]
    lineages: Mapping[LineageKey, int]
    """Lineages, of any tenant, whose moved KV had read one of the spans, and the place from which
    on."""
    whole: bool = False
    """True if all KV of the session went, not just the named spans."""

    def names(self, span: SpanKey) -> bool:
        """Return True if a reader of ``span`` may have read any of it."""
        whole = self.whole and (span.scope, span.session) == self.session
        return whole or span in self.spans or span in _unknown(self.session[0])


class SpanLedger:
    """Span names by session, readers by lineage. Bounded; it stores positions and names only.

    Args:
        defers: see :class:`~.provenance.Provenance`.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 1024,
        max_names: int = 65_536,
        max_lineages: int = 4096,
        defers: bool = False,
    ) -> None:
        self.provenance = Provenance(defers=defers)
        self._max_sessions = max_sessions
        self._max_names = max_names
        self._max_lineages = max_lineages
        self._names: OrderedDict[SessionKey, set[str]] = OrderedDict()
        self._readers: OrderedDict[LineageKey, dict[SpanKey, int]] = OrderedDict()
        self._foreign: dict[LineageKey, frozenset[str]] = {}
        """Lineages of :attr:`_readers` whose KV may have read what reuse brought along, and the
        groups in which other tenants may take that KV."""
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
        own = (turn.scope, turn.session)
        names = {span.span for span in spans if (span.scope, span.session) == own}
        standing = min((label.start for label in turn.spans if label.span in names), default=length)
        return min(
            standing,
            first_unlabelled(turn.spans, length),
            self.hidden_reader(turn.lineage, turn.scope, spans, length),
        )

    def hidden_reader(
        self, runs: Sequence[LineageRun], scope: str, spans: Collection[SpanKey], length: int
    ) -> int:
        """Return the first position under a lineage map whose moved KV has read one of ``spans``.

        Args:
            scope: tenant of the lineages, and of the spans.

        Returns:
            A position; ``length`` if there is none.
        """
        wanted = {*spans, *_unknown(scope)}
        for start, end, readers in self._by_run(runs, scope, length):
            first = min((readers[span] for span in readers.keys() & wanted), default=end)
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
            labels = (
                (SpanKey(source.scope, source.session, label.span), reader)
                for label, reader in moved_labels(source.spans, kept, taken)
            )
            for span, reader in chain(labels, self._moved_rest(source, taken)):
                readers[span] = min(reader, readers.get(span, reader))
        return readers

    def _moved_rest(
        self, source: SourceTurn, taken: Sequence[CopySegment]
    ) -> Iterator[tuple[SpanKey, int]]:
        """Yield what a source has read that has no place in it, and its first copied readers.

        Text without a label has none, either.
        """
        length = len(source.tokens)
        rest = list(self._hidden(source.lineage, source.scope, length))
        unlabelled = first_unlabelled(source.spans, length)
        if unlabelled < length:
            rest.append((anything_of(source.scope), unlabelled))
        starts = positions_of((position for _, position in rest), len(rest))
        for (span, _), reader in zip(rest, first_readers(taken, starts).tolist(), strict=True):
            if reader < NOWHERE:
                yield span, reader

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

    def enter(self, scope: str, carried: Carried) -> tuple[LineageKey, ...]:
        """Note a lineage's readers; if it is known already, the earlier position holds.

        Returns:
            Lineages whose records were dropped for it. Their KV must not stay matchable.
        """
        key = (scope, carried.lineage)
        groups = carried.groups
        if key in self._readers:
            groups &= self._foreign.get(key, frozenset())
        known = self._readers.setdefault(key, {})
        self._readers.move_to_end(key)
        for span, position in carried.readers.items():
            known[span] = min(position, known.get(span, position))
        if len(known) > MAX_READERS:
            self._readers[key] = _by_tenant(known)
        if carried.foreign:
            self._foreign[key] = groups
        if carried.share:
            self._share(scope, carried)
        return self._make_room() if len(self._readers) > self._max_lineages else ()

    def _make_room(self) -> tuple[LineageKey, ...]:
        """Drop the least recently entered record of the tenant that has most."""
        counts = Counter(owner for owner, _ in self._readers)
        heaviest = counts.most_common(1)[0][0]
        gone = next(key for key in self._readers if key[0] == heaviest)
        del self._readers[gone]
        self._foreign.pop(gone, None)
        return (gone,)

    def is_foreign(self, scope: str, runs: Sequence[LineageRun]) -> bool:
        """Return True if KV under a lineage map may have read what reuse brought along."""
        keys = [(scope, run.lineage) for run in runs]
        return any(key in self._foreign or key not in self._readers for key in keys)

    def groups_of(
        self, scope: str, runs: Sequence[LineageRun], groups: frozenset[str]
    ) -> frozenset[str]:
        """Return those of ``groups`` in which other tenants may take KV under a lineage map."""
        for run in runs:
            groups &= self._foreign.get((scope, run.lineage), frozenset())
        return groups

    def offered_length(self, source: SourceTurn, groups: frozenset[str]) -> int:
        """Return how many leading tokens of a turn other tenants of ``groups`` may take.

        An edit ends it: KV after one remembers what its tenant has removed from the prompt.
        """
        length, groups = len(source.tokens), groups & source.groups
        if not groups:
            return 0
        for run in source.lineage:
            groups = self.groups_of(source.scope, (run,), groups)
            if not groups:
                return min(run.start, length)
        return length

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

    def lineages_reading(self, scope: str, spans: Collection[SpanKey]) -> dict[LineageKey, int]:
        """Return lineages whose moved KV read one of a tenant's ``spans``, and from where on."""
        found: dict[LineageKey, int] = {}
        wanted = {*spans, *_unknown(scope)}
        for key, readers in self.readers_of(scope):
            first = [readers[span] for span in readers.keys() & wanted]
            if first:
                found[key] = min(first)
        return found

    def hidden_spans(self, session: SessionKey) -> frozenset[SpanKey]:
        """Return all spans of a session that any lineage remembers."""
        return frozenset(
            span
            for _, readers in self.readers_of(session[0])
            for span in readers
            if (span.scope, span.session) == session
        )

    def strike(
        self, scope: str, spans: Collection[SpanKey], whole: SessionKey | None = None
    ) -> None:
        """Remove a tenant's spans from the readers: no KV that read them can be found any more.

        Args:
            whole: the session that forgot everything, if one did.
        """
        if whole is not None:
            self.provenance.forget(whole)
        gone = set(spans)
        for _, readers in self.readers_of(scope):
            for span in readers.keys() & gone:
                del readers[span]

    def borrowers(self, scope: str) -> frozenset[str]:
        """Return the tenants whose lineages may remember a tenant's spans, itself included."""
        others = {
            owner
            for (owner, _), readers in self.readers_of(scope)
            if any(span.scope == scope or span == ANYTHING for span in readers)
        }
        return frozenset({scope, *others})

    def readers_of(self, scope: str) -> Iterator[tuple[LineageKey, dict[SpanKey, int]]]:
        """Yield the records of lineages that may remember spans of a tenant, whosever they are."""
        for key, readers in self._readers.items():
            if key[0] == scope or key in self._foreign:
                yield key, readers

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
            scope: the request's tenant.
            runs: the request's lineage map.
            carried: the hidden readers of its splice, if not entered yet.
            length: length of its prompt. The request computed the KV after it itself.
        """
        if carried is not None and any(map(struck.names, carried.readers)):
            return True
        for run in runs:
            key = (scope, run.lineage)
            own = carried is not None and carried.lineage == run.lineage
            known = own or key in self._readers
            first = struck.lineages.get(key, length if known else run.start)
            if max(first, run.start) < length:
                return True
        return False


def _unknown(scope: str) -> tuple[SpanKey, SpanKey]:
    """Return the reader entries that stand for any span of a tenant."""
    return anything_of(scope), ANYTHING


def _by_tenant(readers: Readers) -> dict[SpanKey, int]:
    """Return the first reader of each tenant's spans, whichever span it is."""
    first: dict[SpanKey, int] = {}
    for span, position in readers.items():
        scope = anything_of(span.scope)
        first[scope] = min(position, first.get(scope, position))
    return first
