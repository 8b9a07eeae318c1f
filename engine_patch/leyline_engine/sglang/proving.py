"""Proofs of forgets in one SGLang scheduler: its places, as proofs see them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from leyline_engine.contract import Proof, ProofPlace
from leyline_engine.proof.digests import Part, filled
from leyline_engine.proof.doomed import DoomedRow
from leyline_engine.proof.dooming import Doomed, doomed_text
from leyline_engine.proof.judging import Holder, Owner
from leyline_engine.proof.prover import Prover
from leyline_engine.proof.session_proof import IndexEntry, SessionProof
from leyline_engine.proof.witness import Slots
from leyline_engine.records.ledger import SpanKey, SpanLedger
from leyline_engine.records.lineage import MAX_TOKEN, fold_keys
from leyline_engine.records.provenance import Provenance
from leyline_engine.records.publications import NOBODY, Publication, Publications
from leyline_engine.records.sources import SessionKey, SourceRegistry, SourceTurn
from leyline_engine.reuse.index import ReuseIndex
from leyline_engine.rows.host import CopiedRows
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.rows.host import HOST
from leyline_engine.sglang.turn import Turn


class HostCopies:
    """The copies of one tree's rows.

    Args:
        tree: a :class:`.host_tree.HostedRadixCache` if there are any.
        rows: the host's rows; None for a tree without copies.
    """

    def __init__(self, tree: Any, rows: CopiedRows | None) -> None:
        self._tree = tree
        self._rows = rows

    def parts(self) -> list[Part]:
        """Return the tensors to look at."""
        return [] if self._rows is None else self._rows.parts()

    def runs(
        self, path: Publication, start: int = 0, *, alone: bool = False
    ) -> Iterator[tuple[int, Slots]]:
        """Yield the copies of a path's slots after ``start``: where a run begins, and its numbers.

        Args:
            alone: True for copies of what the device has no more.
        """
        if self._rows is None:
            return
        places, copies = self._tree.copies_of(path, alone=alone)
        after = places >= start
        places, numbers = places[after], self._rows.numbers(copies[after])
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        for run, slots in zip(np.split(places, breaks), np.split(numbers, breaks), strict=True):
            if len(run):
                yield int(run[0]), slots

    def after(self, path: Publication, start: int) -> set[int]:
        """Return the numbers of a path's copies after ``start``."""
        return {slot for _, slots in self.runs(path, start) for slot in slots.tolist()}

    def filled_free(self) -> Mapping[str, Slots]:
        """Return the free rows that hold anything, by place."""
        return {} if self._rows is None else {HOST: self._rows.filled_free()}

    def rows_by_place(self) -> Mapping[str, int]:
        """Return the number of rows by place."""
        return {} if self._rows is None else {HOST: len(self._rows)}


TREE, RUNNING = "pool.tree", "pool.running"


class SchedulerSite:
    """The pool, tree, index, registry and ledger of one scheduler.

    Args:
        pool: None if its rows can't be read.
        records: retained turns, spans' readers, and what each session published.
        turns: turns that wait or run, by request.
    """

    def __init__(
        self,
        cache: LeylineRadixCache,
        pool: SplicePool | None,
        records: tuple[SourceRegistry, SpanLedger, Publications],
        index: ReuseIndex,
        turns: Mapping[str, Turn],
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._registry, self._ledger, self._publications = records
        self._index = index
        self._turns = turns
        self._copies = HostCopies(cache, pool.host if pool is not None else None)

    def parts(self) -> Sequence[Part]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return [*self._pool.parts(), *self._copies.parts()] if self._pool is not None else ()

    def cached(self, path: Publication) -> Slots:
        """Return the slots of a path's cached beginning, condemned or not; nothing is touched."""
        return _numbers(self._cache.slots_of(path))

    def own_rows(self, turn: Turn, *, computed: bool = True) -> tuple[Slots, array[int], int]:
        """Return the slots that a running turn doesn't share, its keys, and the first one's place.

        Args:
            computed: False for all of its slots, True for those with KV.
        """
        kv = turn.req.kv
        keys = turn.keys(turn.req.origin_input_ids + turn.req.output_ids)
        if not kv.holds_kv:
            return np.empty(0, dtype=np.int64), keys, 0
        start = int(kv.cache_protected_len)
        row = self._cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
        end = int(kv.kv_committed_len if computed else kv.kv_allocated_len)
        end = min(end, len(keys)) if computed else end
        return _numbers(row[start:end]), keys, start

    def _running(self) -> Iterator[Turn]:
        for turn in tuple(self._turns.values()):
            if turn.req.kv.holds_kv:
                yield turn

    def holders(self, slots: Collection[int]) -> Mapping[int, Sequence[Holder]]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        found: dict[int, list[Holder]] = {}
        if not slots:
            return found
        for owner, path in self._publications.all():
            who: Owner = None if owner[0] == NOBODY else owner
            self._note(found, slots, self.cached(path), path.keys, 0, TREE, who)
            for start, copies in self._copies.runs(path):
                self._note(found, slots, copies, path.keys, start, HOST, who)
        for turn in self._running():
            own, keys, start = self.own_rows(turn)
            self._note(found, slots, own, keys, start, RUNNING, turn.session)
        return found

    def _note(  # noqa: PLR0917 - a run of slots and what reaches it
        self,
        found: dict[int, list[Holder]],
        wanted: Collection[int],
        slots: Slots,
        keys: array[int],
        start: int,
        place: str,
        owner: Owner,
    ) -> None:
        held = [(at, slot) for at, slot in enumerate(slots.tolist(), start) if slot in wanted]
        if not held:
            return
        contents = self.provenance().contents(keys)
        for at, slot in held:
            # A forget spares nothing of requests without a session.
            owners = frozenset({owner} if owner is not None else ())
            holder = Holder(place, contents.at(at), owners, keys[at], at)
            found.setdefault(slot, []).append(holder)

    def filled_free(self) -> Mapping[str, Slots]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        if self._pool is None:
            return {}
        free = _numbers(self._cache.idle_slots())
        return {"pool": filled(self._pool.every_tensor, free), **self._copies.filled_free()}

    def rows_by_place(self) -> Mapping[str, int]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        allocator = self._cache.row_allocator
        free = int(allocator.available_size())
        cached = int(self._cache.full_evictable_size()) + int(self._cache.full_protected_size())
        rows = {"pool.free": free, TREE: cached, RUNNING: int(allocator.size) - free - cached}
        return {**rows, **self._copies.rows_by_place()}

    def sent(self, owners: Collection[Owner]) -> set[int]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        found, paths = set[int](), self.provenance().paths
        for owner in owners:
            for turn in self.turns(owner) if owner is not None else ():
                found.update(paths.heads(fold_keys(turn.tokens)).tolist())
        for running in tuple(self._turns.values()):
            if running.session in owners:
                found.update(paths.heads(fold_keys(running.req.origin_input_ids)).tolist())
        return found

    def provenance(self) -> Provenance:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._ledger.provenance

    def turns(self, session: SessionKey) -> Sequence[SourceTurn]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._registry.turns(session)

    def source_count(self) -> int:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._registry.count()

    def index_entries(self) -> Iterable[IndexEntry]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        entries = list(self._index.entries())
        wanted = {slot for slot, _ in entries}
        cached: set[int] = set()
        for _, path in self._publications.all() if wanted else ():
            cached.update(self.cached(path).tolist())
        for slot, place in entries:
            yield IndexEntry(place.source, place.position, slot in cached)

    def remembered(self, session: SessionKey) -> tuple[int, frozenset[SpanKey]]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._ledger.lineage_count(), self._ledger.hidden_spans(session)

    def extra_places(self) -> Sequence[ProofPlace]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        places = [] if self._cache.state is None else self._cache.state.free_places()
        if self._cache.empty_corpus is not None:
            unseen = "NGRAM's corpus was emptied, and can't be looked at"
            places.append(ProofPlace(place="corpus", unscanned=unseen))
        return places

    # What a prover asks beside the places.

    def running(self, session: SessionKey) -> Collection[str]:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        own = [turn for turn in tuple(self._turns.values()) if turn.session == session]
        return {turn.payload.turn for turn in own if turn.payload is not None}

    def doom(
        self,
        proof: SessionProof,
        spans: frozenset[SpanKey] | None,
        spared: Sequence[array[int]],
    ) -> Doomed:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        if self._pool is not None:
            self._pool.behind_forwards()
        running = list(self._running())
        splices = [(turn.scope, turn.carried) for turn in running if turn.carried is not None]
        turns = self.turns(proof.session)
        doomed = doomed_text(proof, turns, self._ledger, spans, spared=spared, splices=splices)
        for owner, path in self._publications.all():
            own = owner == proof.session
            if own or path.runs:
                self._doom(doomed, proof, self.cached(path), path.keys, 0, own=own)
                for start, copies in self._copies.runs(path, alone=True):
                    self._doom(doomed, proof, copies, path.keys, start, own=own)
        for each in self._cache.condemned:
            # An earlier forget waits for it, perhaps of this session: nothing tells whose it is.
            keys = each.path.keys
            every, contents = proof.paths.of(keys), self.provenance().contents(keys)
            on_device = (each.start, self.cached(each.path)[each.start :])
            for start, slots in (on_device, *self._copies.runs(each.path, each.start, alone=True)):
                end = start + len(slots)
                doomed.add(
                    slots.tolist(),
                    keys[start:end],
                    every[start:end],
                    contents.after(start),
                    start=start,
                    own=True,
                )
        for turn in running:
            # Its own KV is withheld, or its forget is this one's.
            if turn.session == proof.session and turn.withheld:
                slots, keys, start = self.own_rows(turn)
                self._doom(doomed, proof, slots, keys, start, own=True)
        return doomed

    def _doom(
        self,
        doomed: Doomed,
        proof: SessionProof,
        slots: Slots,
        keys: array[int],
        start: int,
        *,
        own: bool,
    ) -> None:
        """Add a run of slots, and note their text if the session published them."""
        paths, contents = proof.paths.of(keys), self.provenance().contents(keys)
        end = start + len(slots)
        doomed.add(
            slots.tolist(),
            keys[start:end],
            paths[start:end],
            contents.after(start),
            start=start,
            own=own,
        )
        if own:
            proof.text.update(path for path in paths[start:end] if path not in doomed.kept)
            self._doom_drafts(doomed, proof, slots, keys, start)

    def _doom_drafts(
        self, doomed: Doomed, proof: SessionProof, slots: Slots, keys: array[int], start: int
    ) -> None:
        """Digest draft rows that have read doomed text as the token after their own."""
        parts = self._pool.draft_parts() if self._pool is not None else ()
        if not parts:
            return
        paths = proof.paths.of(keys)
        seams = [
            at
            for at in range(start, min(start + len(slots), len(paths) - 1))
            if paths[at] in doomed.kept and paths[at + 1] not in doomed.kept
        ]
        if seams:
            contents = self.provenance().contents(keys)
            # As draft rows read one token more, a session that continues otherwise has none.
            rows = [DoomedRow(contents.at(at + 1), keys[at] & MAX_TOKEN) for at in seams]
            proof.rows.add(slots[np.array(seams) - start], rows, parts)

    def waiting(self) -> set[int]:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        found: set[int] = set()
        for doomed in self._cache.condemned:
            found.update(self.cached(doomed.path)[doomed.start :].tolist())
            found.update(self._copies.after(doomed.path, doomed.start))
        for turn in self._running():
            if turn.withheld:
                found.update(self.own_rows(turn, computed=False)[0].tolist())
        return found

    def written(self, slots: Slots) -> Slots:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        # A forget overwrites all free slots, so what a slot holds was written since.
        return np.arange(len(slots))

    def scrub(self) -> None:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        self._cache.scrub()


def agreed_proof(agree: Callable[[bool], bool]) -> Callable[[Proof], Proof]:
    """Return a function that joins the proofs of tensor-parallel ranks, each over its own shard.

    Args:
        agree: returns True if all ranks succeeded; takes this rank's success.
    """

    def joined(proof: Proof) -> Proof:
        clean = proof.complete and not proof.survivors
        if agree(clean) or not clean:
            return proof
        other = "another rank found survivors, or could not look everywhere"
        place = ProofPlace(place="ranks", unscanned=other)
        return msgspec.structs.replace(proof, places=(*proof.places, place))

    return joined


def overwriting_watch(prover: Prover) -> Callable[[Any], None]:
    """Return a function that shows a prover which slots were overwritten, while a proof is open."""

    def watch(slots: Any) -> None:
        if prover.busy:
            prover.overwritten(_numbers(slots))

    return watch


def _numbers(slots: Any) -> Slots:
    found: Slots = slots.cpu().numpy().astype(np.int64)
    return found
