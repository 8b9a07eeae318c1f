"""Relays of an engine's event stream, event by event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx

from leyline_engine.contract import RECORD_MEMBER, TurnRecord

from ..apis.chat_answers import CUT_OFF, AnswerError
from ..apis.events import Events, encoded
from ..apis.native import NativeApi
from ..apis.prewarm import emptied
from ..errors import AnswerTooLargeError, ProxyError, UpstreamUnreachableError
from ..telemetry.tracing import current_trace
from ..telemetry.tracing.usage import note_answer
from ..turns import Account, TurnSettler
from ..turns.records import record_in
from ..turns.turn import Turn
from ..upstream.client import bounds_of, chunks
from .api import ApiCall, unfit_answer
from .recalling import RecallLoop, RecallStream
from .refusal import answer_of, refusal_of_event
from .sse import (
    DONE,
    ChunkFacts,
    EventSplitter,
    append_to_event,
    chunk_facts,
    event_data,
    take_from_event,
    tells_nothing,
    with_data,
)


class Relay:
    """Relays the engine's bytes unchanged. ``broken``: the engine reported an error in between."""

    keeps = False
    """True if the relay's memory grows with the stream, so that the whole stream is bounded."""

    def __init__(self) -> None:
        self.broken = False

    async def events(self, upstream: httpx.Response) -> AsyncGenerator[bytes, None]:
        """Yield the bytes to send, nothing before the first real event is known.

        Raises:
            UpstreamRefusalError: the first event is an error.
            UpstreamUnreachableError: the stream breaks, or ends before an event.
            AnswerTooLargeError: the kept part exceeds its bound.
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
                        yield bytes(held)  # passing the next event may take a while
                        held.clear()
                    facts = chunk_facts(event)
                    if facts.error is not None:
                        if not started:
                            raise await self.refusal(facts.error)
                        self.broken = True
                    held += await self.passed(event, facts)
                    # A comment or keep-alive says nothing about the request yet.
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
        """Return True to send a chunk unchanged, without a look at its events."""
        return False

    async def refusal(self, error: Mapping[str, Any]) -> ProxyError:
        """Return the error to raise for a first event that is an error."""
        return refusal_of_event(error)

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """Return the bytes to send for ``event``."""
        return event

    async def closed(self, rest: bytes) -> bytes:
        """Return the bytes to send at the stream's end; ``rest`` came after its last event."""
        return rest


class TurnRelay(Relay):
    """Appends the account to the event that ends the answer, and makes the events of the client's
    API.

    The relay settles the turn before it passes on the event that ends it, because an agent sends
    its next turn as soon as it has read that event.

    Args:
        call: the client's request.
        native: the client's API, if the engine answers in it.
        events: the mapping of chunks to events of the client's API; None to pass the chunks on.
        loop: the request's recalls.
        later: True for a turn after the request's first.
    """

    def __init__(
        self,
        ends: TurnSettler,
        turn: Turn,
        call: ApiCall,
        native: NativeApi | None = None,
        *,
        events: Events | None,
        loop: RecallLoop,
        later: bool = False,
    ) -> None:
        super().__init__()
        self._ends = ends
        self._turn = turn
        self._call = call
        self._native = native
        self._events = events
        self._loop = loop
        offers = turn.request.offers_recall
        self._recalls = RecallStream(loop, turn, later=later) if offers else None
        self.keeps = self._events is not None or offers
        self._failed = False
        """True once the client got an error, after which nothing comes."""
        self._usage: Mapping[str, Any] | None = None
        self._marked = False
        """True once the account has been appended."""
        self._is_text = False
        """True if the answer ended, as a text without calls."""
        self._record: TurnRecord | None = None
        """The record that came with the answer."""
        self.settled = False
        self.refused = False
        """True if the engine gave the turn up because of claims."""
        self._asked = False
        """True once the engine was asked about that."""
        self._spent = False
        """True once the usage of a turn that only asked for texts is added up."""

    async def refusal(self, error: Mapping[str, Any]) -> ProxyError:
        """Return the error, or the claims' own error if claims are in the turn's way."""
        refused = await self._ends.refusal(self._turn)
        return refused if refused is not None else refusal_of_event(error)

    def passes(self, chunk: bytes) -> bool:
        """Return True if the chunk has only tokens after the first, and goes out unchanged."""
        clock, verbatim = self._turn.request.clock, self._events is None and self._native is None
        if not verbatim or self._recalls is not None or clock.ttft_s is None:
            return False
        if not tells_nothing(chunk):
            return False
        clock.token(chunk.count(b"data:"))
        return True

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """Return the event, or the events of the client's API, with the account at the end."""
        if self._has_ended:
            return b""
        if facts.error is not None:
            return await self._error(event, facts.error)
        if self._native is not None:
            return await self._passed_natively(event, self._native)
        event = self._without_record(event)
        if self._turn.request.prewarms:
            event = with_data(event, emptied)
            facts = replace(chunk_facts(event), bears_token=False, is_text=False)
        self._note(facts.usage or self._usage, bears_token=facts.bears_token)
        if self._recalls is not None:
            event = await self._recalls.passed(event, facts)
        if facts.finishes and not self._marked:
            self._marked, self._is_text = True, facts.is_text
            if current_trace().recording:
                note_answer(answer_of(event_data(event)))
            event = append_to_event(event, await self._account())
        elif event_data(event) == DONE:
            await self._ended()
        return await self._mapped(event) if event and not self._loop.goes_on else b""

    async def closed(self, rest: bytes) -> bytes:
        """Settle the turn, even without the stream's ``[DONE]``.

        Raises:
            UpstreamRefusalError: the answer itself has no end. It broke off, however cleanly the
                connection ended, as one through a router does.
        """
        if self._has_ended:
            return b""
        whole = (
            self._marked or self.settled or event_data(rest) == DONE or chunk_facts(rest).finishes
        )
        if self._native is None and not whole and not self.broken:
            raise unfit_answer(AnswerError(CUT_OFF))
        await self._ended()
        if self._loop.goes_on:
            return b""
        if self._events is None:
            return rest
        return await self._mapped(rest) + await self._mapped(b"data: " + DONE)

    @property
    def _has_ended(self) -> bool:
        return self._failed or (self._events is not None and self._events.ended)

    def _note(self, usage: Mapping[str, Any] | None, *, bears_token: bool) -> None:
        self._usage = usage
        if bears_token:
            self._turn.request.clock.token()

    async def _passed_natively(self, event: bytes, native: NativeApi) -> bytes:
        told = native.told(event_data(event))
        self._note({**(self._usage or {}), **(told.usage or {})}, bears_token=told.bears_token)
        if not told.finishes or self.settled:
            return event
        return append_to_event(event, (await self._settle()).members)

    def _without_record(self, event: bytes) -> bytes:
        """Return the event without the engine's record, which clients don't get."""
        if not self._turn.enveloped:
            return event
        event, member = take_from_event(event, RECORD_MEMBER)
        if member is not None:
            self._record = record_in(self._turn, member)
        return event

    async def _mapped(self, event: bytes) -> bytes:
        """Return the events of the client's API for one of the engine's."""
        if self._events is None:
            return event
        data = event_data(event)
        try:
            if not data:
                return self._events.keep_alive(event)
            if data != DONE:
                return encoded(self._events.feed(answer_of(data)))
            last = encoded(self._events.close())
        except AnswerError as error:
            raise unfit_answer(error) from error
        if last:
            await self._call.settled(self._turn, None)
        return last

    async def _ended(self) -> None:
        """Settle the turn once. A stream that reported an error doesn't change the session."""
        if self._native is not None:
            # A stream without the event that ends an answer broke off.
            self.broken = self.broken or not self.settled
        elif not self.settled and not self.broken:
            await self._settle()
        if self._loop.goes_on and not self._spent:
            self._spent = True
            self._loop.spent(self._usage)

    async def _error(self, event: bytes, error: Mapping[str, Any]) -> bytes:
        self._failed = self._events is not None
        refused = None
        if not (self.settled or self._asked):
            self._asked = True
            refused = await self._ends.refusal(self._turn)
        if refused is not None:
            self.refused = True
            return self._call.error_event(refused)
        shown = refusal_of_event(error)
        if self._events is None and shown.overflow is None:
            return event
        return self._call.error_event(shown)

    async def _account(self) -> dict[str, Any]:
        if not self._turn.enveloped:
            # The engine sends no receipt, and the usage comes after this chunk.
            account = self._ends.preview(self._turn, self._usage)
        else:
            account = await self._settle()
        self._loop.account(self._turn, account)
        return account.members

    async def _settle(self) -> Account:
        aside = self._recalls.aside if self._recalls is not None else None
        account = await self._ends.settle(
            self._turn, self._usage, came=self._record, aside=aside, quotable=self._is_text
        )
        self.settled = True
        return account
