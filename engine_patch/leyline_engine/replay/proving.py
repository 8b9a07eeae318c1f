"""Proofs of forgets in the replay engine: its places, as proofs see them."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from leyline_engine.contract import ForgetCounts, Proof, ProofPlace, ProvePayload
from leyline_engine.ledger import SpanKey, Struck
from leyline_engine.lineage import MAX_TOKEN, TOKEN_BITS, exact_length, fold_keys, lineage_bits
from leyline_engine.proof.digests import Part
from leyline_engine.proof.doomed import MAX_BYTES
from leyline_engine.proof.judging import Holder, Owner
from leyline_engine.proof.paths import Paths
from leyline_engine.proof.session_proof import IndexEntry, SessionProof
from leyline_engine.proof.witness import ForgetWitness
from leyline_engine.replay.cache.manager import CacheManager
from leyline_engine.replay.cache.radix import Node
from leyline_engine.replay.cache.slots import Slots
from leyline_engine.replay.sequence import Sequence as Running
from leyline_engine.sources import SessionKey, SourceTurn

log = logging.getLogger(__name__)

MAX_OPEN = 8
"""Proofs that may be open at once; of more, the oldest fails."""

TREE, RUNNING = "pool.tree", "pool.running"


class _Stretch(NamedTuple):
    """A node of the tree, as its place on a path shows it."""

    node: Node
    start: int
    """Position of its first slot."""
    paths: list[bytes]
    """Path of each of its slots."""
    exact: int
    """Number of its leading slots under plain keys."""


class ReplaySite:
    """The pool, tree, index, registry and ledger of one engine.

    Args:
        running: the running requests.
    """

    def __init__(self, cache: CacheManager, running: Collection[Running]) -> None:
        self._cache = cache
        self.running = running

    def parts(self) -> Sequence[Part]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        return self._cache.pool.parts()

    def walk(self, paths: Paths) -> Iterator[_Stretch]:
        """Yield each node of the tree."""
        stack: list[tuple[Node, Any, int, bool]] = [
            (child, paths.root(), 0, True) for child in self._cache.tree.root.children.values()
        ]
        while stack:
            node, state, start, exact = stack.pop()
            found = paths.along(state, node.keys)
            length = exact_length(node.keys) if exact else 0
            yield _Stretch(node, start, found, length)
            end, whole = start + len(node.keys), length == len(node.keys)
            stack += [(child, state.copy(), end, whole) for child in node.children.values()]

    def detached(self, paths: Paths) -> Iterator[_Stretch]:
        """Yield the nodes that only running requests hold any more."""
        for node in self._cache.tree.doomed():
            keys = array("q")
            for each in reversed([*self._cache.tree.path(node)]):
                keys += each.keys
            start = len(keys) - len(node.keys)
            yield _Stretch(node, start, paths.of(keys)[start:], max(0, exact_length(keys) - start))

    def holders(self, slots: Collection[int], paths: Paths) -> Mapping[int, Sequence[Holder]]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        found: dict[int, list[Holder]] = {}
        if not slots:
            return found
        for place, nodes in ((TREE, self.walk(paths)), (RUNNING, self.detached(paths))):
            for each in nodes:
                owners = cast("frozenset[Owner]", frozenset(each.node.owners))
                for at, slot in enumerate(each.node.slots.tolist()):
                    if slot in slots:
                        path = each.paths[at] if at < each.exact else None
                        lineage = each.node.keys[at] >> TOKEN_BITS
                        found.setdefault(slot, []).append(Holder(place, path, owners, lineage))
        for request in self.running:
            for slot, path, lineage in own_rows(request, paths):
                if slot in slots:
                    holder = Holder(RUNNING, path, frozenset({request.session}), lineage)
                    found.setdefault(slot, []).append(holder)
        return found

    def rows_by_place(self) -> Mapping[str, int]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        free, cached = self._cache.free_count, self._cache.tree.cached_count()
        return {"pool.free": free, TREE: cached, RUNNING: self._cache.capacity - free - cached}

    def sent(self, owners: Collection[Owner], paths: Paths) -> set[bytes]:
        """See :class:`~leyline_engine.proof.session_proof.ProofSite`."""
        found: set[bytes] = set()
        for owner in owners:
            for turn in self.turns(owner) if owner is not None else ():
                found.update(paths.of(fold_keys(turn.tokens)))
        for request in self.running:
            if request.session in owners:
                found.update(paths.of(fold_keys(request.prompt)))
        return found

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


class ReplayWitness(ForgetWitness):
    """Proves forgets that are expected; a fault in a proof never fails a request."""

    def __init__(self, cache: CacheManager, running: Collection[Running]) -> None:
        self.max_bytes = MAX_BYTES
        self.max_open = MAX_OPEN
        self._cache = cache
        self._site = ReplaySite(cache, running)
        self._open: OrderedDict[str, SessionProof] = OrderedDict()
        self._changed: dict[str, Proof] = {}

    def expect(self, ticket: str, session: SessionKey, asked: ProvePayload) -> None:
        """Expect a forget that is to be proven, before anything is done for it."""
        if ticket in self._open:
            return
        proof = SessionProof(bytes.fromhex(asked.nonce), session, self.max_bytes)
        proof.turns |= {
            request.receipt.turn
            for request in self._site.running
            if request.session == session and request.receipt.turn
        }
        self._open[ticket] = proof
        while len(self._open) > self.max_open:
            gone, proof = self._open.popitem(last=False)
            proof.failed = "more proofs were asked for than an engine keeps open"
            self._changed[gone] = Proof(pending=False, unscanned=proof.failed)

    def forgetting(
        self,
        ticket: str,
        session: SessionKey,
        spans: frozenset[SpanKey] | None,
        spared: Sequence[array[int]],
    ) -> None:
        """Digest all that has to go; see :class:`.ForgetWitness`."""
        proof = self._open.get(ticket)
        if proof is None:
            return
        try:
            _Doom(self._cache, self._site, proof, spans, spared).collect()
        except Exception as error:
            self._fail(proof, error)

    def forgot(self, ticket: str, counts: ForgetCounts) -> None:
        """Look for what had to go; see :class:`.ForgetWitness`."""
        proof = self._open.get(ticket)
        if proof is None:
            return
        waiting = {slot for node in self._cache.tree.doomed() for slot in node.slots.tolist()}
        for request in self._site.running:
            if not request.publishable:
                waiting.update(request.owned.tolist())
        try:
            result = proof.begun(self._site, waiting, pending=bool(counts.pending))
        except Exception as error:
            result = self._fail(proof, error)
        self._changed[ticket] = result
        if not result.pending:
            del self._open[ticket]

    def overwriting(
        self, tickets: Collection[str], slots: Slots, keys: array[int], start: int
    ) -> None:
        """Digest rows that were computed beside a forget; see :class:`.ForgetWitness`."""
        for proof in [self._open[ticket] for ticket in tickets if ticket in self._open]:
            try:
                self._doom_late(proof, slots[: len(keys) - start], keys, start)
            except Exception as error:
                self._fail(proof, error)

    def _doom_late(self, proof: SessionProof, slots: Slots, keys: array[int], start: int) -> None:
        exact, digests = exact_length(keys), proof.paths.of(keys)
        # A slot that its request never wrote still holds what others left there.
        written = np.flatnonzero(~np.isin(slots, self._cache.pool.left()))
        paths = [digests[start + at] if start + at < exact else None for at in written.tolist()]
        proof.doom(self._site, slots[written], paths)
        proof.waiting.update(slots.tolist())

    def overwritten(self, slots: Slots) -> None:
        """Check rows that forgets waited for; see :class:`.ForgetWitness`."""
        for proof in self._open.values():
            try:
                proof.checked(self._site, slots)
            except Exception as error:
                self._fail(proof, error)

    def settled(self, forgets: Mapping[str, ForgetCounts]) -> dict[str, Proof]:
        """Return the proofs that changed since the last call, given the forgets that did."""
        for ticket, counts in forgets.items():
            proof = self._open.get(ticket)
            if proof is None or proof.first is None or counts.pending:
                continue
            try:
                # Since then, others may have given up slots in which they had the same text.
                self._cache.pool.erase(self._cache.pool.left())
                self._changed[ticket] = proof.closed(self._site)
            except Exception as error:
                self._changed[ticket] = self._fail(proof, error)
            del self._open[ticket]
        changed, self._changed = self._changed, {}
        return changed

    def _fail(self, proof: SessionProof, error: Exception) -> Proof:
        log.error("a proof failed", exc_info=error)
        proof.failed = f"the proof failed in the engine ({type(error).__name__})"
        return Proof(pending=False, unscanned=proof.failed)


class _Doom:
    """Finds what a forget has to remove, by owners and text, before the forget looks for it."""

    def __init__(
        self,
        cache: CacheManager,
        site: ReplaySite,
        proof: SessionProof,
        spans: frozenset[SpanKey] | None,
        spared: Sequence[array[int]],
    ) -> None:
        self._cache = cache
        self._site = site
        self._proof = proof
        self._spans = spans
        self._kept = {path for keys in spared for path in proof.paths.of(keys)}

    def collect(self) -> None:
        """Note doomed text and spans, and digest doomed rows."""
        proof, cache, site = self._proof, self._cache, self._site
        turns = site.turns(proof.session)
        proof.turns |= {turn.turn for turn in turns}
        spans = self._spans
        proof.spans |= cache.ledger.hidden_spans(proof.session) if spans is None else spans
        shown = [(proof.paths.of(turn.keys()), self._first(turn)) for turn in turns]
        for paths, first in shown:
            if first >= len(paths):  # it has read none of the spans
                self._kept.update(paths)
        for paths, first in shown:
            # What a turn shows of a span is doomed, whatever else keeps it.
            self._kept.difference_update(paths[first:] if spans is not None else ())
        for paths, _ in shown:
            proof.text.update(path for path in paths if path not in self._kept)
        found: dict[int, bytes | None] = {}
        bits = {
            lineage_bits(name, owner): at
            for (owner, name), at in cache.ledger.lineages_reading(
                proof.session[0], proof.spans
            ).items()
        }
        proof.readers |= bits.keys() | self._running_readers()
        for nodes in (site.walk(proof.paths), site.detached(proof.paths)):
            for each in nodes:
                self._add(found, each, bits)
        for request in site.running:
            if request.session == proof.session:
                own = {slot: path for slot, path, _ in own_rows(request, proof.paths)}
                found.update(own)
                proof.text.update(path for path in own.values() if path is not None)
        slots = np.fromiter(found, dtype=np.int64, count=len(found))
        proof.doom(site, slots, list(found.values()))

    def _running_readers(self) -> set[int]:
        """Return the lineages of splices that aren't in the ledger yet."""
        struck = Struck(
            self._proof.session, frozenset(self._proof.spans), {}, whole=self._spans is None
        )
        return {
            lineage_bits(request.carried.lineage, request.session[0])
            for request in self._site.running
            if request.carried is not None
            and request.session is not None
            and any(map(struck.names, request.carried.readers))
        }

    def _first(self, turn: SourceTurn) -> int:
        """Return the first token of a turn that shows, or has read, a doomed span."""
        if self._spans is None:
            return 0
        shown = [
            label.start
            for label in turn.spans
            if SpanKey(turn.scope, turn.session, label.span) in self._spans
        ]
        return min([*shown, self._cache.ledger.first_reader(turn, self._spans)])

    def _add(
        self, found: dict[int, bytes | None], each: _Stretch, lineages: Mapping[int, int]
    ) -> None:
        """Add the slots of a node that have to go."""
        node, own = each.node, self._proof.session in each.node.owners
        for at, (slot, key) in enumerate(zip(node.slots.tolist(), node.keys, strict=True)):
            first = lineages.get(key >> TOKEN_BITS) if key > MAX_TOKEN else None
            read = first is not None and first <= each.start + at
            if read or (own and each.paths[at] not in self._kept):
                found[slot] = each.paths[at] if at < each.exact else None


def own_rows(request: Running, paths: Paths) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield the slots that a request has computed and not published.

    Yields:
        (slot, exact path or None, lineage as the radix key carries it).
    """
    keys = request.keys()
    digests, exact = paths.of(keys), exact_length(keys)
    waiting = {at for step in request.pending for at in range(step.start, step.end)}
    for at in range(request.owned_from, min(len(keys), len(request.held))):
        if at not in waiting:
            path = digests[at] if at < exact else None
            yield int(request.held[at]), path, keys[at] >> TOKEN_BITS
