"""A turn's content in the index: its prompt once it is computed, then all that it was."""

from __future__ import annotations

from weakref import finalize

from leyline_engine.admit.content_reuse import ContentReuse
from leyline_engine.records.retention import source_of
from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.entering import Slots
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.turn import Phase, Turn


class TurnIndexer:
    """Makes the content of one tree known for reuse.

    Args:
        cache: the tree.
        reuse: its index.
    """

    def __init__(self, cache: LeylineRadixCache, reuse: ContentReuse) -> None:
        self._cache = cache
        self._reuse = reuse

    def checkpointed(self, turn: Turn) -> None:
        """Record that the tree has what a turn computed so far."""
        whole = turn.noted >= len(turn.req.origin_input_ids)
        if turn.phase is not Phase.RUNNING or not whole or turn.computed is not None:
            return
        receipt, session = turn.receipt, turn.session
        if session is None or receipt is None or not receipt.turn:
            return
        name = receipt.turn

        def source() -> SourceTurn:
            return source_of(
                session,
                name,
                turn.req.origin_input_ids,
                lineage=turn.lineage,
                spans=turn.spans,
                reuse=turn.reuse,
                cache_salt=turn.space.cache_salt,
                extra_key=turn.space.extra_key,
            )

        with contained("indexing a prompt"):
            turn.computed = self._reuse.computed(
                session[0], source, lambda found: self._slots(found, turn)
            )
        if turn.computed is not None:
            # SGLang may drop a request without notice.
            finalize(turn, self._reuse.ended, turn.computed).atexit = False

    def ended(self, turn: Turn, source: SourceTurn | None) -> None:
        """Record that a turn ended.

        Args:
            source: the source that it became; None if it wasn't retained.
        """
        with contained("indexing a turn"):
            if source is not None:
                self._reuse.retained(source, lambda: self._slots(source, turn))
            self.withheld(turn)

    def withheld(self, turn: Turn) -> None:
        """Take a turn's prompt out of the index, unless that has all of the turn."""
        if turn.computed is not None:
            self._reuse.ended(turn.computed)

    def _slots(self, source: SourceTurn, turn: Turn) -> Slots:
        slots: Slots = self._cache.peek(source.keys(), turn.space).cpu().numpy()
        return slots
