"""The sessions that new ones continue under another id, which costs them what those had spliced."""

from __future__ import annotations

from collections import OrderedDict

from ..model.history import CONTINUES
from ..model.session import Session
from ..request.identify import Identity, chain_of
from ..request.parse import ChatRequest
from ..sessions import SessionStore
from .ports import TurnObserver
from .settled import SettledTurn

MAX_HISTORIES = 4096
"""Answered requests that are remembered, of all tenants; the latest are."""


class Predecessors(TurnObserver):
    """Finds the session that answered the beginning of a new one's list, for the account alone.

    It holds keyed hashes and ids, and only what this process has answered.

    Args:
        key: see :func:`~leyline_proxy.model.history.history_chain`.
    """

    def __init__(self, store: SessionStore, key: bytes, *, most: int = MAX_HISTORIES) -> None:
        self._store = store
        self._key = key
        self._most = most
        self._answered: OrderedDict[tuple[str, int], str] = OrderedDict()

    async def of(self, request: ChatRequest, identity: Identity) -> Session | None:
        """Return the session that a new one continues; None for one that isn't new."""
        tenant, new = request.tenant.name, identity.session is None
        if not new or not any(each.get("role") in CONTINUES for each in request.messages):
            return None
        for value in reversed(chain_of(request, self._key)):
            session_id = self._answered.get((tenant, value))
            if session_id is not None and session_id != identity.session_id:
                return await self._store.get(tenant, session_id)
        return None

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Remember a request and its session."""
        request = settled.turn.request
        chain = chain_of(request, self._key)
        if not chain:
            return
        place = request.tenant.name, chain[-1]
        self._answered[place] = session.id
        self._answered.move_to_end(place)
        if len(self._answered) > self._most:
            self._answered.popitem(last=False)
