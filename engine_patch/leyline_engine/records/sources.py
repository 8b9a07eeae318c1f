"""Retained turns: token sequences that later turns may use. Bounded; no text but ids."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from leyline_engine.contract import LineageRun, SourceRef, SpanLabel, sealed_digest
from leyline_engine.records.keys import shared_length
from leyline_engine.records.lineage import alike_length, first_spliced, fold_keys

SessionKey = tuple[str, str]
"""(tenant scope, session)."""


@dataclass(frozen=True, slots=True)
class SourceTurn:
    """One retained turn: prompt and generated tokens, and their place in the tree."""

    turn: str
    tokens: array[int]
    digest: str
    lineage: tuple[LineageRun, ...]
    scope: str
    session: str = ""
    spans: tuple[SpanLabel, ...] = ()
    """Labels of its parts, sorted by start."""
    groups: frozenset[str] = frozenset()
    """Groups of tenants that may take its KV, as its request declared."""
    cache_salt: str | None = None
    """Salt of the radix namespace that has its KV, in an engine that has several."""
    extra_key: str | None = None
    """Name of what computed its KV beside the model, such as an adapter; part of its namespace."""

    def keys(self) -> array[int]:
        """Return the radix keys of the turn's tokens; nobody may change them."""
        return fold_keys(self.tokens, self.lineage, self.scope) if self.lineage else self.tokens

    def shared_keys(self, other: SourceTurn) -> int:
        """Return the number of leading keys that this turn and another of its tenant share."""
        shared = shared_length(self.tokens, other.tokens)
        return alike_length(self.lineage, other.lineage, shared)

    @property
    def exact_length(self) -> int:
        """Length of the prefix that nothing was spliced into."""
        return first_spliced(self.lineage, len(self.tokens))


class SourceRegistry:
    """Turns by tenant scope and session, least recently used sessions dropped first.

    Args:
        secret: secret that seals digests of prompt text before others see them.
    """

    def __init__(
        self, *, max_sessions: int = 1024, max_turns: int = 8, secret: str | None = None
    ) -> None:
        self.dropped: Callable[[SourceTurn, tuple[SourceTurn, ...]], None] = lambda _, __: None
        """Called with a turn that isn't retained any more, and the session's turns that are."""
        self._secret = secret
        self._max_sessions = max_sessions
        self._max_turns = max_turns
        self._sessions: OrderedDict[SessionKey, OrderedDict[str, SourceTurn]] = OrderedDict()
        self.token_count = 0
        """Number of tokens of all retained turns together."""

    def get(self, session: SessionKey, turn: str) -> SourceTurn | None:
        turns = self._sessions.get(session)
        if turns is None:
            return None
        self._sessions.move_to_end(session)
        return turns.get(turn)

    def get_plain(self, session: SessionKey, turn: str) -> SourceTurn | None:
        """Return a turn that the model computed without an adapter, as claims need it: they look
        for its keys in no namespace, which may have other KV of the same tokens."""
        found = self.get(session, turn)
        return None if found is None or found.extra_key is not None else found

    def seal(self, source: SourceTurn) -> str:
        """Return the source's digest as proxies name it."""
        return sealed_digest(source.digest, self._secret)

    def is_that(self, source: SourceTurn, wanted: SourceRef) -> bool:
        """Return True if a turn's tokens are those that a proxy refers to."""
        return (len(source.tokens), self.seal(source)) == (wanted.length, wanted.digest)

    def retain(self, session: SessionKey, source: SourceTurn) -> None:
        """Retain a turn; one of the same name, as of a replayed request, stays as it was."""
        turns = self._sessions.setdefault(session, OrderedDict())
        self._sessions.move_to_end(session)
        if source.turn not in turns:
            turns[source.turn] = source
            self.token_count += len(source.tokens)
        turns.move_to_end(source.turn)
        while len(turns) > self._max_turns:
            self._note_gone(turns.popitem(last=False)[1], turns)
        while len(self._sessions) > self._max_sessions:
            _, gone = self._sessions.popitem(last=False)
            while gone:
                self._note_gone(gone.popitem(last=False)[1], gone)

    def _note_gone(self, turn: SourceTurn, left: OrderedDict[str, SourceTurn]) -> None:
        self.token_count -= len(turn.tokens)
        self.dropped(turn, tuple(left.values()))

    def turns(self, session: SessionKey) -> tuple[SourceTurn, ...]:
        """Return a session's retained turns, oldest first."""
        return tuple(self._sessions.get(session, {}).values())

    def count(self) -> int:
        """Return the number of retained turns."""
        return sum(len(turns) for turns in self._sessions.values())

    def drop(self, session: SessionKey, turn: str) -> None:
        """Drop a retained turn."""
        turns = self._sessions.get(session, OrderedDict())
        gone = turns.pop(turn, None)
        if gone is not None:
            self._note_gone(gone, turns)
        if not turns:
            self._sessions.pop(session, None)

    def clear(self) -> None:
        self._sessions.clear()
        self.token_count = 0
