"""Proofs of forgets in the replay engine: its places, as proofs see them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from leyline_engine.contract import ProofPlace
from leyline_engine.proof.digests import Part, filled
from leyline_engine.proof.doomed import DoomedRow
from leyline_engine.proof.dooming import Doomed, doomed_text
from leyline_engine.proof.judging import Holder, Owner
from leyline_engine.proof.session_proof import STATE, IndexEntry, SessionProof
from leyline_engine.records.ledger import SpanKey
from leyline_engine.records.lineage import MAX_TOKEN, fold_keys
from leyline_engine.records.paths import PathState
from leyline_engine.records.provenance import Content, Contents, Provenance
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import Node
from leyline_replay.cache.slots import Slots
from leyline_replay.sequence import Sequence as Running

TREE, RUNNING = "pool.tree", "pool.running"


class _Stretch(NamedTuple):
    """A node of the tree, as its place on a path shows it."""

    node: Node
    start: int
    """Position of its first slot."""
    paths: list[bytes]
    """Path of each of its slots."""
    contents: Contents
    """Contents of its slots."""


class _OwnRow(NamedTuple):
    """A row that a request has computed and not published."""

    slot: int
    position: int
    path: bytes
    content: Content
    key: int


class ReplaySite:
    """The pool, tree, index, registry and ledger of one engine.

    Args:
        running: the running requests.
    """

    def __init__(self, cache: CacheManager, running: Collection[Running]) -> None:
        self._cache = cache
        self._running = running

    def parts(self) -> Sequence[Part]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        states = self._cache.anchors.states
        return self._cache.pool.parts() + ([] if states is None else states.parts(self._first))

    @property
    def _first(self) -> int:
        """Number of the first slot of a state, after those of rows."""
        return self._cache.capacity

    def walk(self) -> Iterator[_Stretch]:
        """Yield each node of the tree."""
        provenance = self.provenance()
        paths = provenance.paths
        stack: list[tuple[Node, PathState, PathState]] = [
            (child, paths.root(), paths.root()) for child in self._cache.tree.root.children.values()
        ]
        while stack:
            node, path, content = stack.pop()
            start = path.position
            contents = provenance.contents(node.keys, content)
            yield _Stretch(node, start, paths.along(path, node.keys), contents)
            stack += [(child, path.copy(), content.copy()) for child in node.children.values()]

    def detached(self) -> Iterator[_Stretch]:
        """Yield the nodes that only running requests hold any more."""
        provenance = self.provenance()
        for node in self._cache.tree.doomed():
            keys = array("q")
            for each in reversed([*self._cache.tree.path(node)]):
                keys += each.keys
            start = len(keys) - len(node.keys)
            contents = provenance.contents(keys).after(start)
            yield _Stretch(node, start, provenance.paths.of(keys)[start:], contents)

    def holders(self, slots: Collection[int]) -> Mapping[int, Sequence[Holder]]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        found: dict[int, list[Holder]] = {}
        if not slots:
            return found
        for place, nodes in ((TREE, self.walk()), (RUNNING, self.detached())):
            for each in nodes:
                owners = cast("frozenset[Owner]", frozenset(each.node.owners))
                for at, slot in enumerate(each.node.slots.tolist()):
                    if slot in slots:
                        key, position = each.node.keys[at], each.start + at
                        holder = Holder(place, each.contents.at(at), owners, key, position)
                        found.setdefault(slot, []).append(holder)
                for slot, at in self._state_at(each):
                    if slot in slots:
                        content, key = each.contents.at(at), each.node.keys[at]
                        holder = Holder(STATE, content, owners, key, each.start + at)
                        found.setdefault(slot, []).append(holder)
        for request in self._running:
            owners = cast("frozenset[Owner]", frozenset({request.session}))
            for place, row in self._of_running(request):
                if row.slot in slots:
                    holder = Holder(place, row.content, owners, row.key, row.position)
                    found.setdefault(row.slot, []).append(holder)
        return found

    def _state_at(self, stretch: _Stretch) -> Iterator[tuple[int, int]]:
        """Yield the slot of a node's state, if it has one, and the place of its last token."""
        if stretch.node.state is not None:
            yield self._first + stretch.node.state, len(stretch.node.keys) - 1

    def _of_running(self, request: Running) -> Iterator[tuple[str, _OwnRow]]:
        """Yield what a request has computed and not published: rows, and states by their last."""
        provenance = self.provenance()
        yield from ((RUNNING, row) for row in own_rows(request, provenance))
        keys = request.keys()
        digests, contents = provenance.paths.of(keys), provenance.contents(keys)
        for position, slot in request.states.items():
            at = position - 1
            row = _OwnRow(self._first + slot, at, digests[at], contents.at(at), keys[at])
            yield STATE, row

    def filled_free(self) -> Mapping[str, Slots]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        free, pool = self._cache.free_slots(), self._cache.pool
        found = {place: filled(rows, free) for place, rows in pool.tensors_by_place().items()}
        if (states := self._cache.anchors.states) is not None:
            found[STATE] = self._first + filled(states.tensors(), states.free_slots())
        return found

    def rows_by_place(self) -> Mapping[str, int]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        free, cached = self._cache.free_count, self._cache.tree.cached_count()
        states = self._cache.anchors.states
        kept = {} if states is None else {STATE: states.capacity}
        running = self._cache.capacity - free - cached
        return {"pool.free": free, TREE: cached, RUNNING: running, **kept}

    def sent(self, owners: Collection[Owner]) -> set[int]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        found, paths = set[int](), self.provenance().paths
        for owner in owners:
            for turn in self.turns(owner) if owner is not None else ():
                found.update(paths.heads(fold_keys(turn.tokens)).tolist())
        for request in self._running:
            if request.session in owners:
                found.update(paths.heads(fold_keys(request.prompt)).tolist())
        return found

    def provenance(self) -> Provenance:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._cache.ledger.provenance

    def turns(self, session: SessionKey) -> Sequence[SourceTurn]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._cache.registry.turns(session)

    def source_count(self) -> int:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._cache.registry.count()

    def index_entries(self) -> Iterable[IndexEntry]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        if self._cache.reuse is None:
            return
        cached = {slot for node in self._cache.tree.nodes() for slot in node.slots.tolist()}
        for slot, place in self._cache.reuse.entries():
            yield IndexEntry(place.source, place.position, slot in cached)

    def remembered(self, session: SessionKey) -> tuple[int, frozenset[SpanKey]]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        ledger = self._cache.ledger
        return ledger.lineage_count(), ledger.hidden_spans(session)

    def extra_places(self) -> Sequence[ProofPlace]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return ()

    def running(self, session: SessionKey) -> Collection[str]:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        own = [each for each in self._running if each.session == session]
        return {each.receipt.turn for each in own if each.receipt.turn}

    def doom(
        self,
        proof: SessionProof,
        spans: frozenset[SpanKey] | None,
        spared: Sequence[array[int]],
    ) -> Doomed:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        splices = [
            (each.session[0], each.carried)
            for each in self._running
            if each.session is not None and each.carried is not None
        ]
        turns = self.turns(proof.session)
        doomed = doomed_text(
            proof, turns, self._cache.ledger, spans, spared=spared, splices=splices
        )
        for nodes in (self.walk(), self.detached()):
            for each in nodes:
                doomed.add(
                    each.node.slots.tolist(),
                    each.node.keys,
                    each.paths,
                    each.contents,
                    start=each.start,
                    own=proof.session in each.node.owners,
                )
                for slot, at in self._state_at(each):
                    doomed.add(
                        [slot],
                        each.node.keys[at:],
                        each.paths[at:],
                        each.contents.after(at),
                        start=each.start + at,
                        own=proof.session in each.node.owners,
                    )
        for request in self._running:
            if request.session == proof.session:
                for _, row in self._of_running(request):
                    doomed.found[row.slot] = DoomedRow(row.content, row.key & MAX_TOKEN)
                    proof.text.add(row.path)
        return doomed

    def waiting(self) -> set[int]:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        found = {slot for node in self._cache.tree.doomed() for slot in node.slots.tolist()}
        for request in self._running:
            if not request.publishable:
                found.update(request.owned.tolist())
                found.update(self._first + slot for slot in request.states.values())
        return found

    def written(self, slots: Slots) -> Slots:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        return np.flatnonzero(~np.isin(slots, self._cache.pool.left()))

    def scrub(self) -> None:
        """See :class:`~leyline_engine.proof.prover.ProvenEngine`."""
        self._cache.scrub()


def own_rows(request: Running, provenance: Provenance) -> Iterator[_OwnRow]:
    """Yield the rows that a request has computed and not published."""
    keys = request.keys()
    digests, contents = provenance.paths.of(keys), provenance.contents(keys)
    waiting = {at for step in request.pending for at in range(step.start, step.end)}
    for at in range(request.owned_from, min(len(keys), len(request.held))):
        if at not in waiting:
            yield _OwnRow(int(request.held[at]), at, digests[at], contents.at(at), keys[at])
