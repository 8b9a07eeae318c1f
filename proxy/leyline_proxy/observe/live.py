"""The live feed's view of turns."""

from __future__ import annotations

from leyline_engine.contract import Receipt

from ..live.feed import LiveFeed
from ..model.session import Session
from ..turns.ports import TurnObserver
from ..turns.settled import SettledTurn
from ..turns.turn import Turn


class LiveTurns(TurnObserver):
    """Publishes turns to the feed's readers."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Publish the session's newest turn."""
        self._feed.settled(session)

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """Publish that a turn isn't part of its session."""
        self._feed.lost(turn.request.tenant.name, turn.identity.session_id, "refused")

    def abandoned(self, turn: Turn, model: str) -> None:
        """Publish that a turn isn't part of its session."""
        self._feed.lost(turn.request.tenant.name, turn.identity.session_id, "abandoned")
