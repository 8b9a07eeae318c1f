"""Turns that an engine got and that nobody has settled yet, by session."""

from __future__ import annotations

from .table import SessionName


class OpenTurns:
    """Names of turns under way. One whose proxy was killed stays: its KV is in no account."""

    def __init__(self) -> None:
        self._open: dict[SessionName, frozenset[str]] = {}

    def of(self, session: SessionName) -> frozenset[str]:
        """Return a session's open turns."""
        return self._open.get(session, frozenset())

    def open(self, session: SessionName, turn: str) -> None:
        """Note a turn."""
        self._open[session] = self.of(session) | {turn}

    def close(self, session: SessionName, turn: str) -> None:
        """Take a turn's note back."""
        rest = self.of(session) - {turn}
        if rest:
            self._open[session] = rest
        else:
            self._open.pop(session, None)
