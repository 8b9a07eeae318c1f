"""Passing on what an upstream answers in the client's own API: its bytes, plus the account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from ..apis.native import NativeApi
from ..errors import ProxyError
from ..turns import TurnSettler
from ..turns.turn import Turn
from .relay import TurnRelay
from .sse import ChunkFacts, append_to_event, event_data


def passes_natively(api: NativeApi | None, turn: Turn) -> bool:
    """Whether a request goes upstream in the client's own API.

    Not where the engine splices or the tenant's KV is kept apart, because what says so travels with
    chat requests, nor where a message was edited: edits are made to the chat messages that the
    request was translated into. Nor where something had to be taken out of them if it was there:
    what the translation leaves out, such as citations, nobody has searched.
    """
    return (
        api is not None
        and api.path in turn.replica.apis
        and not turn.enveloped
        and not turn.searched
        and turn.request.tenant.cache_salt is None
        and turn.planned.prepared.sent_as_given
    )


class NativeRelay(TurnRelay):
    """Appends the account to the event that ends an answer."""

    def __init__(
        self,
        ends: TurnSettler,
        turn: Turn,
        api: NativeApi,
        failure_event: Callable[[ProxyError], bytes],
    ) -> None:
        super().__init__(ends, turn)
        self._api = api
        self._failure_event = failure_event
        self._counted: dict[str, Any] = {}

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """The event, with the account if it is the one that ends the answer."""
        if facts.error is not None:
            return await super().passed(event, facts)
        told = self._api.told(event_data(event))
        self._counted |= told.usage or {}
        if told.bears_token and self._ttft_s is None:
            self._ttft_s = perf_counter() - self._turn.request.arrived
        if not told.finishes or self.settled:
            return event
        usage: Mapping[str, Any] = self._counted
        account = await self._ends.settle(self._turn, usage, ttft_s=self._ttft_s)
        self.settled = True
        return append_to_event(event, account.members)

    async def ended(self) -> None:
        """A stream without the event that ends an answer has broken off."""
        self.broken = self.broken or not self.settled

    def failure_event(self, error: ProxyError) -> bytes:
        """In the shape of the client's API."""
        return self._failure_event(error)
