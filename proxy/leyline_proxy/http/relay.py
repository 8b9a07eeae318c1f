"""Passing an engine's event stream on, event by event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from time import perf_counter
from typing import Any

import httpx

from leyline_engine.contract import RECORD_MEMBER, TurnRecord

from ..errors import AnswerTooLargeError, ProxyError, UpstreamUnreachableError
from ..turns import Account, TurnSettler
from ..turns.records import record_in
from ..turns.turn import Turn
from ..upstream.bounds import bounds_of
from ..upstream.client import chunks
from .errors import error_event
from .refusal import refusal_of_event
from .sse import (
    DONE,
    ChunkFacts,
    EventSplitter,
    append_to_event,
    chunk_facts,
    event_data,
    take_from_event,
    tells_nothing,
)


class Relay:
    """The engine's bytes as they are. ``broken``: the engine reported an error on the way."""

    keeps = False
    """What is remembered of a stream grows with it, so that the whole is bounded."""

    def __init__(self) -> None:
        self.broken = False

    async def events(self, upstream: httpx.Response) -> AsyncGenerator[bytes, None]:
        """The bytes to send. Nothing is yielded before the first real event is known.

        Raises:
            UpstreamRefusalError: the first event is an error.
            UpstreamUnreachableError: the stream breaks, or ends before an event.
            AnswerTooLargeError: more of it would have to be kept than may be.
        """
        held = bytearray()
        started = False
        bounds, kept = bounds_of(upstream), 0
        splitter = EventSplitter(bounds.event)
        async with aclosing(chunks(upstream)) as received:
            async for chunk in received:
                if started and splitter.empty and self.passes(chunk):
                    yield chunk
                    continue
                kept = kept + len(chunk) if self.keeps else len(held)
                if kept > bounds.answer:
                    raise AnswerTooLargeError(
                        f"The engine's stream is longer than {bounds.answer} bytes "
                        "(max_answer_bytes)."
                    )
                for event in splitter.feed(chunk):
                    if held and started and not tells_nothing(event):
                        yield bytes(held)  # what follows may take a while
                        held.clear()
                    facts = chunk_facts(event)
                    if facts.error is not None:
                        if not started:
                            raise await self.refusal(facts.error)
                        self.broken = True
                    held += await self.passed(event, facts)
                    # A comment or keep-alive tells nothing about the request yet.
                    started = started or bool(event_data(event))
                if started and held:
                    yield bytes(held)
                    held.clear()
        rest = splitter.rest()
        if not started and not held and not rest:
            raise UpstreamUnreachableError("The engine ended its stream before the first event.")
        held += await self.closed(rest)
        if held:
            yield bytes(held)

    def passes(self, chunk: bytes) -> bool:
        """Whether a chunk is sent as it is, without a look at its events."""
        return False

    async def refusal(self, error: Mapping[str, Any]) -> ProxyError:
        """What a first event that is an error becomes."""
        return refusal_of_event(error)

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """What to send for ``event``."""
        return event

    async def closed(self, rest: bytes) -> bytes:
        """The engine has closed its stream; what to send for what came behind its last event."""
        return rest


class TurnRelay(Relay):
    """Appends the account to the finish chunk.

    The turn is settled before the event that ends it is passed on, because an agent sends its
    next turn as soon as it has read that event.

    Args:
        verbatim: events are sent as the engine wrote them, but for the one that gets the account.
    """

    def __init__(self, ends: TurnSettler, turn: Turn, *, verbatim: bool = False) -> None:
        super().__init__()
        self._verbatim = verbatim
        self._ends = ends
        self._turn = turn
        self._usage: Mapping[str, Any] | None = None
        self._ttft_s: float | None = None
        self._marked = False
        self._record: TurnRecord | None = None
        """What came with the answer."""
        self.settled = False
        self.refused = False
        """The engine gave the turn up for the sake of claims."""
        self._asked = False
        """Whether it did has been asked."""

    async def refusal(self, error: Mapping[str, Any]) -> ProxyError:
        """The error, by its name where claims are in the turn's way."""
        refused = await self._ends.refusal(self._turn)
        return refused if refused is not None else refusal_of_event(error)

    def passes(self, chunk: bytes) -> bool:
        """Whether the chunk brings tokens behind the first, and nothing else."""
        return self._verbatim and self._ttft_s is not None and tells_nothing(chunk)

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """The event, with the account if it is the finish chunk."""
        if facts.error is not None:
            return await self._error(event, facts.error)
        self._usage = facts.usage or self._usage
        if facts.bears_token and self._ttft_s is None:
            self._ttft_s = perf_counter() - self._turn.request.arrived
        event = self._without_record(event)
        if facts.finishes and not self._marked:
            self._marked = True
            return append_to_event(event, await self._account())
        if event_data(event) == DONE:
            await self.ended()
        return event

    def _without_record(self, event: bytes) -> bytes:
        """The event as a client gets it that hasn't asked for the record."""
        if not self._turn.enveloped:
            return event
        event, member = take_from_event(event, RECORD_MEMBER)
        if member is not None:
            self._record = record_in(self._turn, member)
        return event

    async def closed(self, rest: bytes) -> bytes:
        """Settle, also without the event that ends a stream."""
        await self.ended()
        return rest

    def failure_event(self, error: ProxyError) -> bytes:
        """An error of the proxy's own, in the shape of the client's API."""
        return error_event(error)

    def engine_failure(self, event: bytes, error: Mapping[str, Any]) -> bytes:
        """What to send for an event in which the engine reports an error."""
        return event

    async def ended(self) -> None:
        """Settle, once; a stream that reported an error leaves the session as it was."""
        if not self.settled and not self.broken:
            await self._settle()

    async def _error(self, event: bytes, error: Mapping[str, Any]) -> bytes:
        refused = None
        if not (self.settled or self._asked):
            self._asked = True
            refused = await self._ends.refusal(self._turn)
        if refused is None:
            return self.engine_failure(event, error)
        self.refused = True
        return self.failure_event(refused)

    async def _account(self) -> dict[str, Any]:
        if not self._turn.enveloped:
            # There is no receipt, and the usage comes behind this chunk.
            return self._ends.preview(self._turn, self._usage).members
        return (await self._settle()).members

    async def _settle(self) -> Account:
        account = await self._ends.settle(
            self._turn, self._usage, ttft_s=self._ttft_s, came=self._record
        )
        self.settled = True
        return account
