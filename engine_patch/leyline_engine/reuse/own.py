"""Places in a session's own turns, for requests that take no other KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from leyline_engine.records.keys import shared_length
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_engine.reuse.index import Place
from leyline_engine.reuse.winnowing import GRAM

MAX_OTHERS = 64
"""Maximum number of other sessions' turns that one search compares with the session's own."""


class OwnTurns:
    """A session's own turns, in one search.

    Of KV that two sessions share, the index has the entries under the one that had it first. So a
    place in another session's turn stands for the same position of an own turn that begins with the
    same tokens.

    Args:
        session: whose turns they are.
        turns: those that it retains.
    """

    def __init__(self, session: SessionKey, turns: Sequence[SourceTurn]) -> None:
        self.bounded = False
        """True if there may be more places than were found."""
        self._session = session
        self._turns = turns
        self._known: dict[int, tuple[SourceTurn | None, int]] = {}
        """By the identity of another session's turn, the own turn with the longest common
        beginning, and its length."""

    def places(self, found: Iterable[Place]) -> Iterator[Place]:
        """Yield the places in own turns that places of the tenant stand for."""
        for place in found:
            source = place.source
            if (source.scope, source.session) == self._session:
                yield place
                continue
            turn, shared = self._likest(source)
            if turn is not None and place.position + GRAM <= shared:
                yield Place(turn, place.position)

    def _likest(self, source: SourceTurn) -> tuple[SourceTurn | None, int]:
        """Return the own turn that begins most like a turn, and the length of that beginning."""
        known = self._known.get(id(source))
        if known is None:
            if len(self._known) >= MAX_OTHERS:
                self.bounded = True
                return None, 0
            shares = [(shared_length(own.tokens, source.tokens), own) for own in self._turns]
            shared, turn = max(shares, key=lambda share: share[0], default=(0, None))
            known = self._known[id(source)] = (turn, shared)
        return known
