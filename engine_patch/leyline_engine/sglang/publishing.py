"""Notes of what requests publish, taken before it becomes matchable: a forget must find it."""

from __future__ import annotations

from array import array
from typing import Any
from weakref import WeakSet

from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.publications import (
    NOBODY,
    Publication,
    Publications,
    Space,
)
from leyline_engine.records.sources import SessionKey
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.forgetting import Forgetter
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.turn import Turn


class KeptOut:
    """Requests whose KV isn't published, and is overwritten when they end."""

    def __init__(self) -> None:
        # SGLang may drop a request without notice.
        self._requests: WeakSet[Any] = WeakSet()

    def add(self, req: Any) -> None:
        """Publish nothing that a request computes, and overwrite it when it ends."""
        req.skip_radix_cache_insert = True
        self._requests.add(req)

    def owns(self, kv: Any) -> bool:
        """Return True if a KV record is that of one of the requests."""
        return any(req.kv is kv for req in self._requests)


class Publisher:
    """Notes the publications in one tree, and removes KV that can't be forgotten any more.

    Args:
        cache: the tree.
        ledger: learns which spans published KV has read.
        publications: takes the paths.
        forgetter: removes paths that lost their note.
        kept_out: takes requests that must not publish.
    """

    def __init__(
        self,
        cache: LeylineRadixCache,
        ledger: SpanLedger,
        publications: Publications,
        forgetter: Forgetter,
        *,
        kept_out: KeptOut,
    ) -> None:
        self._cache = cache
        self._ledger = ledger
        self._publications = publications
        self._forgetter = forgetter
        self._kept_out = kept_out

    def publishes(self, turn: Turn | None, req: Any, length: int) -> bool:
        """Prepare for the first ``length`` tokens of a request to become matchable.

        Returns:
            False if they must not: no forget would find KV that isn't noted.
        """
        if turn is not None and length <= turn.noted:
            return True
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        if turn is None or turn.session is None:
            with contained("noting what nobody published"):
                space = Space(req.extra_key, req.cache_salt)
                self.publish((NOBODY, req.rid), Publication(tokens, (), space))
            return True
        noted = turn.noted
        with contained("noting what is published"):
            if turn.lineage and self._cache.is_condemned(turn.keys(tokens)):
                # It would be filed as the condemned KV of the same name.
                self._kept_out.add(req)
                return False
            self.note(turn, tokens)
            noted = length
        turn.noted = noted
        return noted == length

    def note(self, turn: Turn, tokens: array[int]) -> None:
        """Note that a turn's session publishes ``tokens``, under the turn's lineage."""
        session = turn.session
        if session is None:
            return
        self._ledger.label(session, [label.span for label in turn.spans])
        self.publish(session, Publication(turn.keys(tokens), turn.lineage, turn.space))

    def publish(self, session: SessionKey, path: Publication) -> None:
        """Note that a session publishes a path; remove paths that were dropped for it."""
        within = self._cache.tree_keys.slots_within
        gone = self._publications.note(session, path)
        self._forgetter.remove_all([(old, within(length)) for old, length in gone])

    def enter(self, turn: Turn) -> None:
        """Note what a turn's copies have read, as they are about to become matchable."""
        if turn.carried is None:
            return
        dropped = dict.fromkeys(self._ledger.enter(turn.scope, turn.carried), 0)
        # Nobody could say any more what this KV has read.
        gone = self._publications.under(dropped)
        self._forgetter.remove_all([(path, start) for _, path, start in gone])
        for owner, path, start in gone:
            self._publications.cut(owner, path, self._cache.tree_keys.keys_of(start))
