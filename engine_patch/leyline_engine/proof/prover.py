"""The proofs of one engine: when they begin, what they wait for, and when they close."""

from __future__ import annotations

import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from leyline_engine.contract import ForgetCounts, Proof, ProvePayload
from leyline_engine.proof.doomed import MAX_BYTES, DoomedRow
from leyline_engine.proof.dooming import Doomed
from leyline_engine.proof.session_proof import ProofSite, SessionProof
from leyline_engine.proof.witness import ForgetWitness, Slots
from leyline_engine.records.ledger import SpanKey
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_engine.records.sources import SessionKey

log = logging.getLogger(__name__)

MAX_OPEN = 8
"""Proofs that may be open at once; of more, the oldest of the tenant with most fails."""


class ProvenEngine(ProofSite, Protocol):
    """An engine whose forgets are proven."""

    def running(self, session: SessionKey) -> Collection[str]:
        """Return the names of a session's turns that run."""

    def doom(
        self,
        proof: SessionProof,
        spans: frozenset[SpanKey] | None,
        spared: Sequence[array[int]],
    ) -> Doomed:
        """Return what a forget has to remove; see :meth:`.ForgetWitness.forgetting`."""

    def written(self, slots: Slots) -> Slots:
        """Return the indices of slots that their request has written."""

    def scrub(self) -> None:
        """Overwrite free slots: since a forget, others may have given up the same text."""


class Prover(ForgetWitness):
    """Proves forgets that are expected; a fault in a proof never fails a request.

    Args:
        agreed: takes a proof's result on one rank of a replica, and returns it for all ranks.
    """

    def __init__(
        self, site: ProvenEngine, *, agreed: Callable[[Proof], Proof] = lambda proof: proof
    ) -> None:
        self.max_bytes = MAX_BYTES
        self.max_open = MAX_OPEN
        self._site = site
        self._agreed = agreed
        self._open: OrderedDict[str, SessionProof] = OrderedDict()
        self._changed: dict[str, Proof] = {}

    @property
    def busy(self) -> bool:
        """True while a proof is open."""
        return bool(self._open)

    def expect(self, ticket: str, session: SessionKey, asked: ProvePayload) -> None:
        """Expect a forget that is to be proven, before anything is done for it."""
        if ticket in self._open:
            return
        nonce, paths = bytes.fromhex(asked.nonce), self._site.provenance().paths
        proof = SessionProof(nonce, session, paths, self.max_bytes)
        proof.turns |= {*self._site.running(session)}
        self._open[ticket] = proof
        while len(self._open) > self.max_open:
            gone = self._most_dispensable()
            proof = self._open.pop(gone)
            proof.failed = "more proofs were asked for than an engine keeps open"
            self._changed[gone] = Proof(pending=False, unscanned=proof.failed)

    def _most_dispensable(self) -> str:
        """Return the oldest proof of the tenant that has most open: no tenant ends another's."""
        (scope, _), *_ = Counter(proof.session[0] for proof in self._open.values()).most_common(1)
        return next(name for name, proof in self._open.items() if proof.session[0] == scope)

    def give_up(self, ticket: str, reason: str) -> None:
        """Note that a forget failed, so that nothing can be proven."""
        if self._open.pop(ticket, None) is not None:
            self._changed[ticket] = Proof(pending=False, unscanned=reason)

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
            doomed = self._site.doom(proof, spans, spared)
            proof.doom(self._site, doomed.slots, doomed.rows)
        except Exception as error:
            _fail(proof, error)

    def forgot(self, ticket: str, counts: ForgetCounts) -> None:
        """Look for what had to go; see :class:`.ForgetWitness`."""
        proof = self._open.get(ticket)
        if proof is None:
            return
        try:
            waiting = self._site.waiting()
            result = proof.begun(self._site, waiting, pending=bool(counts.pending))
        except Exception as error:
            result = _fail(proof, error)
        self._changed[ticket] = result if result.pending else self._agreed(result)
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
                _fail(proof, error)

    def _doom_late(self, proof: SessionProof, slots: Slots, keys: array[int], start: int) -> None:
        contents = self._site.provenance().contents(keys)
        # A slot that its request never wrote still holds what others left there.
        written = self._site.written(slots)
        rows = [
            DoomedRow(contents.at(at), keys[at] & MAX_TOKEN) for at in (start + written).tolist()
        ]
        proof.doom(self._site, slots[written], rows)
        proof.waiting.update(slots.tolist())

    def overwritten(self, slots: Slots) -> None:
        """Check rows that forgets waited for; see :class:`.ForgetWitness`."""
        for proof in self._open.values():
            try:
                proof.checked(self._site, slots)
            except Exception as error:
                _fail(proof, error)

    def settled(self, forgets: Mapping[str, ForgetCounts]) -> dict[str, Proof]:
        """Return the proofs that changed since the last call, given the forgets that did."""
        for ticket in self._closing(forgets):
            proof = self._open.pop(ticket)
            try:
                self._site.scrub()
                result = proof.closed(self._site)
            except Exception as error:
                result = _fail(proof, error)
            self._changed[ticket] = self._agreed(result)
        changed, self._changed = self._changed, {}
        return changed

    def _closing(self, forgets: Mapping[str, ForgetCounts]) -> list[str]:
        """Return the proofs that nothing holds open any more, given the forgets that progressed."""
        begun = {ticket: proof for ticket, proof in self._open.items() if proof.first is not None}
        # Rows may also be freed by what no forget reports, as an eviction of what one condemned.
        is_held = any(proof.held for proof in begun.values())
        if not forgets and not is_held:
            return []
        for ticket, counts in forgets.items():
            if ticket in begun:
                begun[ticket].owed = bool(counts.pending)
        # What one forget waits for may be what an earlier one does.
        waiting = self._site.waiting() if is_held else set()
        for proof in begun.values():
            proof.held &= waiting
        return [ticket for ticket, proof in begun.items() if not proof.owed and not proof.held]


def _fail(proof: SessionProof, error: Exception) -> Proof:
    log.error("a proof failed", exc_info=error)
    proof.failed = f"the proof failed in the engine ({type(error).__name__})"
    return Proof(pending=False, unscanned=proof.failed)
