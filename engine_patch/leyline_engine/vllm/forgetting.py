"""Forgetting in vLLM's block pool: a session's published KV is found by path, removed, overwritten.

A removed block can't be found from that moment on, also while requests hold it; it is overwritten
when they give it back. Blocks that hold an ended request's unfiled rows are overwritten, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from leyline_engine.admit.plan import page_floor
from leyline_engine.contract import ForgetCounts
from leyline_engine.records.ledger import (
    LineageKey,
    SpanKey,
    SpanLedger,
    Struck,
)
from leyline_engine.records.lineage import first_spliced
from leyline_engine.records.publications import Publication, Publications
from leyline_engine.records.sources import SessionKey, SourceRegistry
from leyline_engine.vllm.block_keys import PathHasher
from leyline_engine.vllm.blocks import UNPUBLISHED, BlockCache

_REMEMBERED = 4096
"""Number of tickets whose counts are kept; as many as records are kept of requests."""


@dataclass(frozen=True, slots=True)
class _Doomed:
    """A path that a forget reached."""

    session: SessionKey
    path: Publication
    start: int
    """Its first position that isn't the session's any more; a block's edge."""
    theirs: int
    """The first that no other session has: it is removed from there on."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The result of a forget."""

    counts: ForgetCounts
    struck: Struck
    removed: tuple[tuple[int, bytes], ...]
    """By removed path, the number of its first removed block, and its key: who has that block has
    read what was forgotten."""


class Forgetter:
    """Carries out forgets on one block pool.

    Args:
        cache: the blocks.
        hasher: finds the keys of noted paths.
        erases: True if the workers can overwrite rows; else removed ones count as pending.
        told: called with a ticket's counts before, and its counts now.
    """

    def __init__(
        self,
        cache: BlockCache,
        hasher: PathHasher,
        registry: SourceRegistry,
        ledger: SpanLedger,
        publications: Publications,
        *,
        erases: bool = True,
        told: Callable[[ForgetCounts, ForgetCounts], None] = lambda _, __: None,
    ) -> None:
        self._cache = cache
        self._hasher = hasher
        self._registry = registry
        self._ledger = ledger
        self._publications = publications
        self._erases = erases
        self._told = told
        self._reached: OrderedDict[str, ForgetCounts] = OrderedDict()
        self.pending = cache.pending

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
        turns = self._registry.turns(session)
        whole = spans is None
        if spans is not None:
            clean = [t for t in turns if self._ledger.first_reader(t, spans) == len(t.tokens)]
        else:
            spans, clean = self._ledger.hidden_spans(session), []
        kept = [*spared, *map(Publication.of_turn, clean)]
        tainted = self._ledger.lineages_reading(session[0], spans)
        overwritten = shared = 0
        removed: list[tuple[int, bytes]] = []
        for doomed in self._doomed(session, kept, tainted):
            shared += self._cached(doomed, doomed.theirs) - self._cached(doomed, doomed.start)
            overwritten += self._remove(doomed, ticket, removed)
            self._publications.cut(doomed.session, doomed.path, doomed.start)
        for turn in turns:
            if turn not in clean:
                self._registry.drop(session, turn.turn)
        self._ledger.strike(session[0], spans, session if whole else None)
        self._cache.scrub(ticket)
        struck = Struck(session, spans, tainted, whole)
        counts = self._open(ticket, session, overwritten, shared)
        return Forgotten(counts, struck, tuple(removed))

    def _doomed(
        self,
        session: SessionKey,
        kept: Sequence[Publication],
        tainted: Mapping[LineageKey, int],
    ) -> list[_Doomed]:
        block, doomed = self._cache.block, []
        for owner, path, reader in self._publications.under(tainted):
            start = page_floor(reader, block)
            doomed.append(_Doomed(owner, path, start, start))
        for path, agreed in self._publications.agreed(session, kept):
            start = page_floor(agreed, block)
            if start < len(path.keys):
                exact = first_spliced(path.runs, len(path.keys))
                held = self._publications.shared(session, path, start)
                theirs = page_floor(min(max(held, start), max(exact, start)), block)
                doomed.append(_Doomed(session, path, start, max(theirs, start)))
        return doomed

    def agreed(self, path: Publication, others: Iterable[Publication]) -> int:
        """Return how many leading tokens of a path any of ``others`` has, too."""
        return max((self._publications.common(path, other) for other in others), default=0)

    def kept(self, session: SessionKey, path: Publication, others: Iterable[Publication]) -> int:
        """Return how many leading tokens of an exact path stay when its session forgets.

        Args:
            others: paths that count beside those that other sessions have published.
        """
        return self._publications.shared(session, path, self.agreed(path, others))

    def leave(self, session: SessionKey, path: Publication) -> None:
        """Note that KV of a path is left to a session, so that a forget of its finds it."""
        gone = self._publications.note(session, path)
        self.remove_all([(session[0], old, length) for old, length in gone])

    def _keys(self, doomed: _Doomed) -> list[bytes]:
        return self._hasher.keys(doomed.path, doomed.session[0])

    def _cached(self, doomed: _Doomed, position: int) -> int:
        """Return how many of a path's leading tokens, up to a position, can be found."""
        if not position:
            return 0
        found = self._cache.find(self._keys(doomed), position // self._cache.block)
        return len(found) * self._cache.block

    def _remove(self, doomed: _Doomed, ticket: str, removed: list[tuple[int, bytes]]) -> int:
        """Remove a path from its first own position on, with what nobody's requests published
        after it; returns the tokens that are overwritten in front of the next forward."""
        first, overwritten = doomed.theirs // self._cache.block, 0
        paths = [(doomed.session, doomed.path)]
        paths += self._publications.strangers(doomed.path, doomed.theirs)
        for owner, path in paths:
            keys = self._hasher.keys(path, owner[0])[first:]
            removed.extend((first, key) for key in keys[:1])
            overwritten += self._overwrite(keys, ticket)
            if path is not doomed.path:
                self._publications.cut(owner, path, doomed.theirs)
        return overwritten

    def _overwrite(self, keys: Iterable[bytes], ticket: str) -> int:
        overwritten = 0
        for block in self._cache.remove(keys, "forgotten" if ticket else UNPUBLISHED):
            if self._cache.doom(block):
                overwritten += self._cache.block
            elif ticket:
                self._cache.await_block(ticket, block)
        return overwritten

    def _open(
        self, ticket: str, session: SessionKey, overwritten: int, shared: int
    ) -> ForgetCounts:
        before = self._reached.get(ticket, ForgetCounts())
        overwritten += before.overwritten
        shared += before.shared_retained
        return self._note(ticket, self.pending.open(ticket, overwritten, shared, session))

    def _note(self, ticket: str, counts: ForgetCounts) -> ForgetCounts:
        before = self._reached.get(ticket, ForgetCounts())
        self._told(self._honest(before), self._honest(counts))
        self._reached[ticket] = counts
        self._reached.move_to_end(ticket)
        while len(self._reached) > _REMEMBERED:
            self._reached.popitem(last=False)
        return self._honest(counts)

    def _honest(self, counts: ForgetCounts) -> ForgetCounts:
        """Return the counts to report for blocks that were removed."""
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

    def condemn(self, session: SessionKey, ticket: str) -> ForgetCounts:
        """Remove all that a session published, and all KV that splices moved for its tenant or for
        tenants that have taken KV from it: a forget failed, and readers can't be told apart."""
        for turn in self._registry.turns(session):
            self._registry.drop(session, turn.turn)
        doomed = [(session, path, 0) for path in self._publications.of(session)]
        for scope in self._ledger.borrowers(session[0]):
            spliced = self._publications.spliced(scope)
            doomed += [
                ((scope, ""), path, page_floor(at, self._cache.block)) for path, at in spliced
            ]
        overwritten = 0
        for owner, path, start in doomed:
            keys = self._hasher.keys(path, owner[0])[start // self._cache.block :]
            overwritten += self._overwrite(keys, ticket)
        self._cache.scrub(ticket)
        return self._open(ticket, session, overwritten, 0)

    def remove_all(self, paths: Iterable[tuple[str, Publication, int]]) -> None:
        """Remove paths from a position on: no forget would find them any more.

        Args:
            paths: (tenant scope, path, position).
        """
        for scope, path, start in paths:
            first = page_floor(start, self._cache.block) // self._cache.block
            self._overwrite(self._hasher.keys(path, scope)[first:], "")

    def retire(
        self, session: SessionKey, turns: Collection[str], spared: Sequence[Publication]
    ) -> int:
        """Drop turns that none continues, free KV that only they have, and return its tokens.

        Args:
            spared: paths of the session's running requests and claims.
        """
        for name in turns:
            self._registry.drop(session, name)
        kept = [*spared, *map(Publication.of_turn, self._registry.turns(session))]
        freed = 0
        for doomed in self._doomed(session, kept, {}):
            keys = self._keys(doomed)[doomed.theirs // self._cache.block :]
            for block in self._cache.remove(keys, "retired"):
                self._cache.retire(block)
                freed += self._cache.block
            self._publications.cut(doomed.session, doomed.path, doomed.start)
        return freed

    def clear(self) -> None:
        """Record that nothing is cached any more."""
        self._cache.clear()
        self.pending.settle()
