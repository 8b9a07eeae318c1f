"""One proof: what a forget dooms, what waits to be overwritten, and what is found afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from leyline_engine.contract import Proof, ProofPlace
from leyline_engine.proof.digests import Part, RowDigester
from leyline_engine.proof.doomed import MAX_BYTES, DoomedRow, DoomedRows
from leyline_engine.proof.judging import Equal, Holder, Judgement, Owner, judge
from leyline_engine.proof.witness import Slots
from leyline_engine.records.ledger import SpanKey
from leyline_engine.records.paths import Paths
from leyline_engine.records.provenance import Provenance, Sent
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_engine.reuse.winnowing import GRAM

NO_ROWS = "no layer of this pool depends on the tokens in front of a row"
FREE = "pool.free"
STATE = "state"
"""Place of what a model keeps per sequence; its slots have numbers after those of all rows."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry of the index of content: tokens of a source from ``position`` on."""

    source: SourceTurn
    position: int
    cached: bool
    """True if the slot of its first token is cached."""


class ProofSite(Protocol):
    """An engine's places, as proofs see them."""

    def parts(self) -> Sequence[Part]:
        """Return the tensors to look at: those of layers that read other rows."""

    def holders(self, slots: Collection[int]) -> Mapping[int, Sequence[Holder]]:
        """Return the holders of slots."""

    def filled_free(self) -> Mapping[str, Slots]:
        """Return the free slots that hold anything in any layer, by ``pool`` and ``origin``."""

    def waiting(self) -> set[int]:
        """Return the slots that are to be overwritten when running requests end."""

    def rows_by_place(self) -> Mapping[str, int]:
        """Return the number of the pool's rows by place."""

    def sent(self, owners: Collection[Owner]) -> set[int]:
        """Return the contents that sessions sent, as far as their turns are known."""

    def provenance(self) -> Provenance:
        """Return the origins of copied KV."""

    def turns(self, session: SessionKey) -> Sequence[SourceTurn]:
        """Return the turns of a session that are retained as sources."""

    def source_count(self) -> int:
        """Return the number of all retained turns."""

    def index_entries(self) -> Iterable[IndexEntry]:
        """Return all entries of the index of content."""

    def remembered(self, session: SessionKey) -> tuple[int, frozenset[SpanKey]]:
        """Return the number of lineages in the ledger, and the session's spans that they name."""

    def extra_places(self) -> Sequence[ProofPlace]:
        """Return places that this engine can't look at, with the reasons."""


@dataclass(slots=True)
class SessionProof:
    """The proof of one forget.

    Args:
        nonce: key of the digests.
        session: the session that forgets.
        paths: the engine's paths.
        max_bytes: see :data:`~leyline_engine.proof.doomed.MAX_BYTES`.
    """

    nonce: bytes
    session: SessionKey
    paths: Paths
    max_bytes: int = MAX_BYTES
    rows: DoomedRows = field(init=False)
    text: set[bytes] = field(default_factory=set)
    """Paths of doomed text, cached or not."""
    spans: set[SpanKey] = field(default_factory=set)
    """Doomed spans."""
    readers: dict[int, int] = field(default_factory=dict)
    """Lineages that have read them, as radix keys carry them, and the position from which on."""
    waiting: set[int] = field(default_factory=set)
    """Slots that are to be overwritten when their holders end."""
    doomed: set[int] = field(default_factory=set)
    """Slots of the rows that were doomed when the forget began."""
    held: set[int] = field(default_factory=set)
    """Those of them that wait to be overwritten, for whichever forget."""
    owed: bool = False
    """True while the forget itself is pending."""
    turns: set[str] = field(default_factory=set)
    """Names of the session's turns that were retained, or ran, when it forgot."""
    first: Proof | None = None
    """The result right after the forget."""
    late: int = 0
    """Rows that were still there right after they had been overwritten."""
    failed: str = ""
    """Reason why the proof can't be completed."""

    def __post_init__(self) -> None:
        self.rows = DoomedRows(RowDigester(self.nonce), max_bytes=self.max_bytes)

    def doom(self, site: ProofSite, slots: Slots, rows: Sequence[DoomedRow]) -> None:
        """Digest rows that have to go."""
        parts = site.parts()
        self.doomed.update(slots.tolist())
        if parts and len(slots):
            self.rows.add(slots, rows, parts)

    def checked(self, site: ProofSite, slots: Slots) -> None:
        """Check rows that have just been overwritten late."""
        waited = np.array([slot for slot in slots.tolist() if slot in self.waiting], dtype=np.int64)
        self.waiting.difference_update(waited.tolist())
        if len(waited):
            self.late += len(_equals(self, site.parts(), waited))

    def begun(self, site: ProofSite, waiting: set[int], *, pending: bool) -> Proof:
        """Look everywhere right after the forget, when nothing else has run yet.

        Args:
            waiting: slots that are to be overwritten when their holders end.
            pending: True if the forget waits for any of them.

        An earlier forget may wait for the same rows; the proof is pending then, too.
        """
        self.waiting, self.held, self.owed = waiting, waiting & self.doomed, pending
        self.first = self._result([*self._changing(site, again=False), _ledger(self, site)], site)
        return msgspec.structs.replace(self.first, pending=pending or bool(self.held))

    def closed(self, site: ProofSite) -> Proof:
        """Look everywhere again, after the last slot was overwritten.

        What was found right after the forget still counts: from then on, other requests may have
        written to its place.
        """
        first = self.first
        if first is None:
            return self._result([], site)
        # What still waits was others', who have forgotten it since: a running request holds it.
        self.waiting = site.waiting()
        before = {place.place: place for place in first.places}
        # Spans have the same names when the session sends them again.
        places = [*self._changing(site, again=True), before["ledger"]]
        worst = [_worse(place, before.get(place.place)) for place in places]
        return self._result(worst, site)

    def _changing(self, site: ProofSite, *, again: bool) -> list[ProofPlace]:
        places = _pool(self, site, again=again)
        return [*places, _index(self, site, again=again), _sources(self, site, again=again)]

    def _result(self, places: Sequence[ProofPlace], site: ProofSite) -> Proof:
        return Proof(
            pending=False,
            doomed=self.rows.count,
            digested=self.rows.digested,
            places=(*places, *site.extra_places()),
            unscanned=self.failed or ("" if site.parts() else NO_ROWS),
        )


def _equals(proof: SessionProof, parts: Sequence[Part], slots: Slots | None) -> dict[int, Equal]:
    """Return the slots whose rows equal doomed ones, of those given."""
    found: dict[int, set[DoomedRow]] = {}
    counts: Counter[int] = Counter()
    for part in parts:
        entries = None if slots is None else part.entries(slots)
        wanted = entries if entries is None else entries[entries >= 0]
        equal = proof.rows.find(part, wanted)
        slots_of = part.slots(equal.keys())
        for entry, paths in equal.items():
            # An entry of no slot has no holder.
            for slot in slots_of[entry] or [-1 - entry]:
                found.setdefault(slot, set()).update(paths)
                counts[slot] += 1
    return {slot: Equal(paths, counts[slot], len(parts)) for slot, paths in found.items()}


@dataclass(frozen=True, slots=True)
class _Sent:
    """The paths that sessions sent, computed once per set of sessions: rows have few of them."""

    site: ProofSite
    proof: SessionProof
    known: dict[frozenset[Owner], Sent] = field(default_factory=dict)

    def __call__(self, owners: Collection[Owner]) -> Sent:
        some = frozenset(owners)
        if some not in self.known:
            contents = self.site.sent(some)
            copied = self.site.provenance().sent(some, self.proof.session)
            self.known[some] = Sent(contents, copied)
        return self.known[some]


def _pool(proof: SessionProof, site: ProofSite, *, again: bool) -> list[ProofPlace]:
    """Return the pool's rows by place, and the store of as-computed keys."""
    parts = site.parts()
    by_place = {
        place: [part for part in parts if part.place == place]
        for place in dict.fromkeys(part.place for part in parts)
    }
    rows = site.rows_by_place()
    sent = _Sent(site, proof)
    filled = site.filled_free()
    tallies: dict[str, Counter[Judgement]] = {place: Counter() for place in (*rows, "origin")}
    by_chance: dict[str, Counter[frozenset[Owner]]] = {}
    doubted: set[int] = set()
    for place, some in by_place.items():
        equals = _equals(proof, some, None)
        holders = site.holders(equals.keys() - proof.waiting)
        for slot, equal in equals.items():
            if slot in proof.waiting:
                continue
            held = holders.get(slot, ())
            found = judge(
                equal,
                held,
                proof.session,
                sent,
                readers=proof.readers,
                again=again,
            )
            if found is Judgement.KEPT and not _in_tenant(proof.session, held):
                continue  # a count would tell one tenant what another sends
            where = held[0].place if held else FREE
            if found is Judgement.CHANCE:
                if slot not in doubted:  # its keys, as they were computed, are no second row
                    owners = frozenset(owner for holder in held for owner in holder.owners)
                    by_chance.setdefault(where, Counter())[owners] += 1
                doubted.add(slot)
                continue
            tallies[where if place == "pool" else place][found] += 1
        # A forget overwrites all free slots. The first layer of one gives its token away, and what
        # was evicted before the forget was never digested.
        rest = {*filled.get(place, np.empty(0)).tolist()} - equals.keys() - proof.waiting
        tallies[FREE if place == "pool" else place][Judgement.SURVIVOR] += len(rest)
    tallies.setdefault(FREE, Counter())[Judgement.SURVIVOR] += proof.late
    for name, counts in by_chance.items():
        # Many sessions may hold the same text in as many other contexts.
        tallies[name][Judgement.CHANCE] = max(counts.values())
    scanned = {**rows, "origin": sum(rows.values()) - rows.get(STATE, 0)}
    return [_place(name, scanned[name], tally) for name, tally in tallies.items()]


def _in_tenant(session: SessionKey, holders: Iterable[Holder]) -> bool:
    """Return True if another session of the same tenant is among the holders."""
    owners = {owner for holder in holders for owner in holder.owners} - {session}
    return any(owner is not None and owner[0] == session[0] for owner in owners)


def _place(name: str, scanned: int, tally: Mapping[Judgement, int]) -> ProofPlace:
    return ProofPlace(
        place=name,
        scanned=scanned,
        survivors=tally.get(Judgement.SURVIVOR, 0),
        kept=tally.get(Judgement.KEPT, 0),
        chance=tally.get(Judgement.CHANCE, 0),
        sent_again=tally.get(Judgement.SENT_AGAIN, 0),
    )


def _holds(proof: SessionProof, turn: SourceTurn) -> bool:
    """Return True if a turn has doomed text."""
    return not proof.text.isdisjoint(proof.paths.of(turn.keys()))


def _index(proof: SessionProof, site: ProofSite, *, again: bool) -> ProofPlace:
    """Return the index of content: no entry may lead to doomed text of the session."""
    tally: Counter[Judgement] = Counter()
    scanned = 0
    known: dict[int, list[bytes]] = {}
    for entry in site.index_entries():
        scanned += 1
        source = entry.source
        if id(source) not in known:
            known[id(source)] = proof.paths.of(source.keys())
        last = min(entry.position + GRAM, len(known[id(source)])) - 1
        if known[id(source)][last] not in proof.text:
            continue
        if (source.scope, source.session) == proof.session:
            tally[_of_own(proof, source, again=again)] += 1
        elif not entry.cached:
            tally[Judgement.SURVIVOR] += 1
        elif source.scope == proof.session[0]:
            tally[Judgement.KEPT] += 1
    return _place("index", scanned, tally)


def _sources(proof: SessionProof, site: ProofSite, *, again: bool) -> ProofPlace:
    """Return the retained turns: none of the session's may hold doomed text."""
    own = [turn for turn in site.turns(proof.session) if _holds(proof, turn)]
    tally = Counter(_of_own(proof, turn, again=again) for turn in own)
    return _place("sources", site.source_count(), tally)


def _of_own(proof: SessionProof, turn: SourceTurn, *, again: bool) -> Judgement:
    """Judge a turn of the session: one that ran when it forgot must not be retained later."""
    new = again and turn.turn not in proof.turns
    return Judgement.SENT_AGAIN if new else Judgement.SURVIVOR


def _ledger(proof: SessionProof, site: ProofSite) -> ProofPlace:
    """Return the ledger: no lineage may remember a doomed span."""
    scanned, spans = site.remembered(proof.session)
    return _place("ledger", scanned, {Judgement.SURVIVOR: len(spans & proof.spans)})


def _worse(place: ProofPlace, before: ProofPlace | None) -> ProofPlace:
    """Return a place with the survivors that it had before, if those were more."""
    most = max(place.survivors, before.survivors if before is not None else 0)
    return msgspec.structs.replace(place, survivors=most)
