"""Forgetting in SGLang's tree: a session's published KV is found by path, removed, overwritten.

KV that running requests hold is condemned instead: no request can match it from now on, and it is
removed when they release it. If the pool's rows can't be written, removed slots count as pending
forever: no request finds them, but only another request's KV overwrites them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from leyline_engine.admit.plan import page_floor
from leyline_engine.contract import ForgetCounts
from leyline_engine.proof.witness import ForgetWitness
from leyline_engine.records.ledger import (
    LineageKey,
    SpanKey,
    SpanLedger,
    Struck,
)
from leyline_engine.records.lineage import first_spliced
from leyline_engine.records.pending import PendingForgets
from leyline_engine.records.publications import Publication, Publications
from leyline_engine.records.sources import SessionKey, SourceRegistry
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.condemned import Condemned, Unpublished
from leyline_engine.sglang.matching import reach
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.rows.pages import reserved_until

log = logging.getLogger(__name__)

_REMEMBERED = 4096
"""Number of tickets whose counts are kept; as many as records are kept of requests."""
_AT_ONCE = 1 << 17
"""Keys of the paths that are removed at once, in a few milliseconds; others are condemned, and
removed in the steps that follow."""
_LEAST = 1 << 14
"""Keys that a path counts as at least: removing a short one takes its time, too."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The result of a forget."""

    counts: ForgetCounts
    struck: Struck
    long: bool
    """True if that took a good part of a scheduler's step."""


class Forgetter:
    """Carries out forgets on one tree.

    Args:
        erases: True if the cache can overwrite what it removes.
        told: called with a ticket's counts before, and its counts now.
        witness: learns when a forget begins.
    """

    def __init__(
        self,
        cache: LeylineRadixCache,
        registry: SourceRegistry,
        ledger: SpanLedger,
        publications: Publications,
        *,
        erases: bool,
        told: Callable[[ForgetCounts, ForgetCounts], None] = lambda _, __: None,
        witness: ForgetWitness | None = None,
    ) -> None:
        self._cache = cache
        self._registry = registry
        self._ledger = ledger
        self._publications = publications
        self._erases = erases
        self._told = told
        self._witness = witness or ForgetWitness()
        self._reached: OrderedDict[str, ForgetCounts] = OrderedDict()
        self._reserved: dict[Any, int] = {}
        """Requests with slots for drafts that were theirs before a forget, and the length at which
        they will have written to all of them."""
        self._due = 0
        """Condemned paths that are to be looked at: nothing has changed for the others."""
        self.pending = PendingForgets()

    def forget(
        self,
        session: SessionKey,
        spans: frozenset[SpanKey] | None,
        *,
        spared: Sequence[Publication],
        ticket: str,
    ) -> Forgotten:
        """Remove a session's published KV that may have read ``spans``.

        That is all but the ``spared`` paths and turns that are known to have read none of them.
        Tokens that other sessions published as well stay theirs, but no spliced KV that read the
        spans does, whoever holds it.

        Args:
            spans: spans to forget; None for all that the session holds.
            spared: paths that the session's new prompt may continue.
            ticket: name of the forget in :attr:`pending`. Several with one ticket add up.
        """
        self._witness.forgetting(ticket, session, spans, [path.keys for path in spared])
        scope = session[0]
        turns = self._registry.turns(session)
        whole = spans is None
        if spans is not None:
            clean = [t for t in turns if self._ledger.first_reader(t, spans) == len(t.tokens)]
        else:
            spans, clean = self._ledger.hidden_spans(session), []
        kept = [*spared, *map(Publication.of_turn, clean)]
        tainted = self._ledger.lineages_reading(scope, spans)
        doomed = self._doomed(session, kept, tainted)
        erased = shared = 0
        soon = _first_keys([path for _, path, _, _ in doomed], _AT_ONCE)
        repeated = self._publications.repeated(
            [(owner, path) for owner, path, _, _ in doomed[soon:]]
        )
        for number, (owner, path, start, theirs) in enumerate(doomed):
            if theirs > start:
                shared += self._cached(path, theirs) - self._cached(path, start)
            if number < soon:
                erased += self._remove(path, theirs, ticket)
            else:
                # Those of several paths count once.
                self._condemn_late(path, theirs, ticket, repeated.pop(id(path), len(path.keys)))
            self._publications.cut(owner, path, self._keys(start))
        for _, path, _, theirs in doomed[:soon]:
            self._condemn_rest(path, theirs, ticket)
        for turn in turns:
            if turn not in clean:
                self._registry.drop(session, turn.turn)
        self._ledger.strike(scope, spans, session if whole else None)
        self._cache.scrub()
        self._await_reserved(ticket)
        struck = Struck(session, spans, tainted, whole)
        long = sum(len(path.keys) for _, path, _, _ in doomed) > _AT_ONCE // 2
        return Forgotten(self._open(ticket, session, erased, shared), struck, long)

    def _doomed(
        self,
        session: SessionKey,
        kept: Sequence[Publication],
        tainted: Mapping[LineageKey, int],
    ) -> list[tuple[SessionKey, Publication, int, int]]:
        """Return the paths to remove: (session, path, its first key that goes, the first that no
        other session has)."""
        doomed = []
        for owner, path, reader in self._publications.under(self._looking_ahead(tainted)):
            start = self._floor(reader)
            doomed.append((owner, path, start, start))
        within = self._cache.tree_keys.slots_within
        for path, agreed in self._publications.agreed(session, kept):
            start = within(agreed)
            if self._keys(start) < len(path.keys):
                exact = first_spliced(path.runs, len(path.keys))
                shared_to = within(self._publications.shared(session, path, self._keys(start)))
                theirs = self._floor(min(max(shared_to, start), max(exact, start)))
                doomed.append((session, path, start, theirs))
        return doomed

    def _open(self, ticket: str, session: SessionKey, erased: int, shared: int) -> ForgetCounts:
        before = self._reached.get(ticket, ForgetCounts())
        erased, shared = erased + before.overwritten, shared + before.shared_retained
        return self._note(ticket, self.pending.open(ticket, erased, shared, session))

    def _note(self, ticket: str, counts: ForgetCounts) -> ForgetCounts:
        before = self._reached.get(ticket, ForgetCounts())
        self._told(self._honest(before), self._honest(counts))
        self._reached[ticket] = counts
        self._reached.move_to_end(ticket)
        while len(self._reached) > _REMEMBERED:
            self._reached.popitem(last=False)
        return self.counts(ticket)

    def _honest(self, counts: ForgetCounts) -> ForgetCounts:
        """Return the counts to report for slots that were removed from the tree."""
        if self._erases:
            return counts
        left = counts.pending + counts.overwritten
        return msgspec.structs.replace(counts, overwritten=0, pending=left)

    def counts(self, ticket: str) -> ForgetCounts:
        """Return the present counts to report of a ticket."""
        return self._honest(self._reached.get(ticket, ForgetCounts()))

    def progress(self) -> dict[str, ForgetCounts]:
        """Return the tickets that progressed since the last call."""
        return {ticket: self._note(ticket, new) for ticket, new in self.pending.take().items()}

    def _floor(self, slot: int) -> int:
        """Return the start of a slot's page: it goes or stays whole, and others have all of it
        or none."""
        return page_floor(slot, self._cache.page_size)

    def _keys(self, slots: int) -> int:
        return self._cache.tree_keys.keys_of(slots)

    def _looking_ahead(self, lineages: Mapping[LineageKey, int]) -> dict[LineageKey, int]:
        """Return the first slot of each lineage that has read what its first reader reads."""
        ahead = self._cache.tree_keys.lookahead
        return {key: max(0, reader - ahead) for key, reader in lineages.items()}

    def _cached(self, path: Publication, slots: int) -> int:
        """Return how many of a path's first ``slots`` slots can be found."""
        return reach(self._cache.find(path.keys, path.space, self._keys(slots)))

    def condemn(self, session: SessionKey, ticket: str) -> ForgetCounts:
        """Make KV that a session published unmatchable, and KV that a splice moved.

        That is its tenant's, and that of tenants which have taken KV from it. :meth:`settle`
        removes it. If a forget failed, the readers can't be distinguished.
        """
        for turn in self._registry.turns(session):
            self._registry.drop(session, turn.turn)
        doomed = [Condemned(path, 0) for path in self._publications.of(session)]
        for scope in self._ledger.borrowers(session[0]):
            spliced = self._publications.spliced(scope)
            doomed += [Condemned(path, self._floor(at)) for path, at in spliced]
        self._cache.condemned.extend(doomed)
        for each in doomed:
            self.pending.wait(ticket, each, len(each.path.keys) - each.start)
            with contained("ending claims"):
                self._cache.announce(each.path, each.start, "forgotten")
        return self._open(ticket, session, 0, 0)

    def retire(
        self, session: SessionKey, turns: Collection[str], spared: Sequence[Publication]
    ) -> int:
        """Drop turns that none continues, free KV that only they have, and return its slots.

        Args:
            spared: paths of the session's running requests and claims.
        """
        for name in turns:
            self._registry.drop(session, name)
        kept = [*spared, *map(Publication.of_turn, self._registry.turns(session))]
        doomed = self._doomed(session, kept, {})
        repeated = self._publications.repeated([(owner, path) for owner, path, _, _ in doomed])
        freed = 0
        for owner, path, start, theirs in doomed:
            known = self._cache.tree_keys.slots_within(repeated.pop(id(path), 0))
            freed += max(0, self._cache.slot_count(path) - max(theirs, known))
            self._publications.cut(owner, path, self._keys(start))
        self.remove_all([(path, theirs) for _, path, _, theirs in doomed])
        return freed

    def remove_all(self, paths: Sequence[tuple[Publication, int]]) -> None:
        """Remove the cached part of each path from a position on; if they are many, one by one in
        the steps that follow, but nobody finds them from now on."""
        soon = _first_keys([path for path, _ in paths], _AT_ONCE)
        for path, start in paths[:soon]:
            self.remove(path, start)
        for path, start in paths[soon:]:
            self._condemn_late(path, self._floor(start))

    def remove(self, path: Publication, start: int) -> None:
        """Remove the cached part of a path from ``start`` on, and report no counts."""
        start = self._floor(start)
        try:
            self._remove(path, start, "")
        except Exception:
            log.exception("a path could not be removed; nobody finds it from here on")
            self._cache.condemned.append(Condemned(path, start))

    def _remove(self, path: Publication, start: int, ticket: str) -> int:
        done = self._take_out(path, start, "forgotten" if ticket else "unpublished")
        if done.held:
            self._condemn(path, start, ticket, done.held)
        return done.erased

    def _take_out(self, path: Publication, start: int, cause: str) -> Unpublished:
        """Remove the cached part of a path from ``start`` on, and its sessionless continuations.

        Those are what requests without a session published from there on.
        """
        erased = 0
        for owner, theirs in self._publications.strangers(path, self._keys(start)):
            done = self._cache.unpublish(theirs, start, cause)
            erased += done.erased
            if not done.held:
                self._publications.cut(owner, theirs, self._keys(start))
        done = self._cache.unpublish(path, start, cause)
        return replace(done, erased=done.erased + erased)

    def _condemn_late(
        self, path: Publication, start: int, ticket: str = "", counted: int = 0
    ) -> None:
        """Make a path unmatchable at once, and remove it in one of the next steps.

        Args:
            counted: leading keys whose slots the ticket counts already.
        """
        self._cache.announce(path, start, "forgotten" if ticket else "unpublished")
        begin = max(start, self._cache.tree_keys.slots_within(counted))
        # What is condemned counts, too: most paths here share their beginnings.
        cached = self._cache.slot_count(path) if ticket else begin
        self._condemn(path, start, ticket, max(0, cached - begin))
        self._due += 1

    def _condemn(self, path: Publication, start: int, ticket: str, held: int) -> None:
        doomed = Condemned(path, start)
        self._cache.condemned.append(doomed)
        if ticket:
            self.pending.wait(ticket, doomed, held)

    def _condemn_rest(self, path: Publication, start: int, ticket: str) -> None:
        """Condemn what is still found of a removed path, as another path continues there."""
        left = self._cached(path, len(path.keys)) - start
        if left > 0:
            self._condemn(path, start, ticket, left)

    def _await_reserved(self, ticket: str) -> None:
        """Wait for slots that requests have reserved: they may hold what was evicted before."""
        for req in tuple(self._cache.requests):
            until = reserved_until(req)
            if until:
                self._reserved[req] = max(until, self._reserved.get(req, 0))
                self.pending.wait(ticket, req, until - int(req.kv.kv_committed_len))

    def written(self) -> bool:
        """Return True if requests have written to their reserved slots since, or gave them back."""
        done = [
            req
            for req, until in self._reserved.items()
            if not (req.kv.holds_kv and req.kv.kv_committed_len < until)
        ]
        if not all(req.kv.holds_kv for req in done):
            self._cache.scrub()
        for req in done:
            del self._reserved[req]
        self.pending.let_go(done)
        return bool(done)

    def settle(self) -> None:
        """Remove condemned KV that has no holder any more, or begin to."""
        self._due = len(self._cache.condemned)
        self.work()
        self.written()
        self.pending.settle()

    def work(self) -> bool:
        """Remove a portion of the condemned KV; returns False if none is to be looked at."""
        condemned, left, before = self._cache.condemned, _AT_ONCE // 2, len(self._cache.condemned)
        worked = self._due > 0 and before > 0
        while self._due > 0 and condemned and left >= 0:
            doomed = next(iter(condemned))
            left -= max(_LEAST, len(doomed.path.keys))
            if self._settled(doomed):
                # One condemned path may block another.
                self._due = len(condemned)
            else:
                self._due -= 1
                condemned.defer(doomed)
        if len(condemned) < before:
            # The holder may have given back more than the tree knew.
            self._cache.scrub()
            self.pending.settle()
        return worked

    def _settled(self, doomed: Condemned) -> bool:
        with contained("removing a condemned path"):
            path, start = doomed.path, doomed.start
            done = self._take_out(path, start, "forgotten")
            # A rest without a known holder stays until it is evicted.
            reach = start
            if done.shared:
                shared_to = self._publications.shared(None, path, self._keys(start))
                reach = max(start, self._cache.tree_keys.slots_within(shared_to))
            if not done.held and start + done.shared <= reach:
                self._cache.condemned.remove(doomed)
                self.pending.let_go([doomed])
                return True
        return False

    def finish(self) -> None:
        """Remove all condemned KV that has no holder any more."""
        self.settle()
        while self.work():
            continue

    def clear(self) -> None:
        """Record that the tree is empty: nothing is held."""
        self.pending.let_go((*self._cache.condemned, *self._reserved))
        self._reserved.clear()
        self.pending.settle()


def _first_keys(paths: Sequence[Publication], keys: int) -> int:
    """Return the number of leading paths that have ``keys`` keys together, at least one."""
    for number, path in enumerate(paths, 1):
        keys -= max(_LEAST, len(path.keys))
        if keys <= 0:
            return number
    return len(paths)
