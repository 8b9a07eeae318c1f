"""One turn over HTTP, in any API: plan it, forward it to an engine or the next one, account it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from time import perf_counter
from typing import Any

import httpx
import msgspec
import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyline_engine.contract import RECORD_MEMBER

from ..apis.chat_answers import AnswerError
from ..apis.events import Events, encoded
from ..apis.native import NativeApi
from ..apis.prewarm import emptied
from ..apis.recall_calls import asked_in
from ..errors import ClientDisconnected, ProxyError, UpstreamUnreachableError
from ..model.fields import OPTIONS_FIELD
from ..observe.turn_traces import note_failover, note_planned
from ..plan.outgoing import without_reserved
from ..request.parse import ChatRequest, decode_body
from ..request.tool_order import native_in_first_order
from ..request.wire import add_members, put_members, repeats_members, take_member
from ..telemetry.tracing.usage import note_answer
from ..tenants import Tenant
from ..turns.accounting import account_headers
from ..turns.prompt_size import document_size
from ..turns.records import record_in
from ..turns.turn import Turn
from ..upstream.client import GATEWAY_FAILURES, read
from ..upstream.headers import downstream_headers
from ..wiring.services import Services
from .api import Api, ApiCall, read_call, unfit_answer
from .chat import open_chat
from .compacting import Compacting, Written
from .exchange import Exchange
from .limits import until_disconnect, within
from .recalling import RecallLoop
from .refusal import answer_of, refusal_of_answer
from .relay import TurnRelay
from .sse import DONE, STREAM_HEADERS, is_text


async def paused_answer(call: ApiCall, written: Written, *, stream: bool) -> Response | bytes:
    """Return the answer in the client's API, whole or as the bytes of its events.

    It is an answer without words; the usage is that of the summary.
    """
    members = written.account.members
    members[OPTIONS_FIELD]["compaction"] = written.report.document()
    usage = _usage(written)
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    said = {"role": "assistant", "content": ""}
    if not stream:
        answer = {**_head(written, "chat.completion"), "choices": [{**choice, "message": said}]}
        shown = call.whole(orjson.dumps({**answer, "usage": usage}), answer)
        added = call.members(written.account, usage)
        body = add_members(shown, {name: msgspec.json.encode(v) for name, v in added.items()})
        await call.settled(written.turn, body)
        return Response(body, media_type="application/json")
    chunk = {**_head(written, "chat.completion.chunk"), "choices": [{**choice, "delta": said}]}
    chunk |= {"usage": usage, **members}
    events = call.events(written.turn)
    if events is None:
        return b"data: %b\n\ndata: %b\n\n" % (msgspec.json.encode(chunk), DONE)
    told = encoded(events.feed(chunk)) + encoded(events.close())
    await call.settled(written.turn, None)
    return told


def _head(written: Written, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{written.turn.message_id}",
        "object": kind,
        "created": int(time.time()),
        "model": written.turn.request.model,
    }


def _usage(written: Written) -> dict[str, Any]:
    counted = written.report.usage or {}
    prompt, output = counted.get("prompt_tokens", 0), counted.get("completion_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": counted.get("cached_tokens", 0)},
    }


log = structlog.get_logger("leyline.http")

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Failures before the engine got a byte."""


class ReplicaFailedError(UpstreamUnreachableError):
    """An engine failed a request before its first byte, and another engine is left to try."""


class TurnExchange(Exchange):
    """Serves one turn.

    Args:
        api: the client's API.
    """

    spends = True

    def __init__(self, services: Services, request: Request, api: Api) -> None:
        super().__init__(services, request, api.path)
        self._api = api
        self._call = api.call(services, request, self.clock)
        self.ping = self._call.ping
        self.extra_headers.update(self._call.headers)
        self._raw = b""
        self._native: NativeApi | None = None
        """The client's API, if this attempt's request goes upstream in it."""
        self._others = False
        """True if another engine is left to try."""
        self._pending = False
        """True while the turn isn't settled and the engine may have read it."""
        self._admitted = False
        """True once the budgets of the tenant had room for the request."""
        self._loop = RecallLoop(services.recalls)
        self._compacting = Compacting(services, self._call)
        self._spent_s = 0.0
        """Time of the turns before the last: those that only asked for texts, and a summary's."""
        self._events: Events | None = None
        """The mapping of a stream to the client's API."""
        self._events_made = False
        self._plan = ""
        self._opened = False
        """True once the client was sent the events that open its answer."""
        self._answering = False
        """True once a part of an engine's answer was sent: another engine can't answer any more."""

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Plan the turn, forward it, and account for it."""
        chat, self._raw = await read_call(self._call, tenant, raw, receive), raw
        self.model = self.services.pool.label(chat.model)
        if chat.stream:
            self.keep_alive(send)
        failed: set[str] = set()
        turn: Turn | None = None
        while True:
            turn = await self.services.turns.begin(chat, failed, again=turn)
            self.message_id = turn.message_id
            note_planned(turn)
            self._call.planned(turn)
            self.extra_headers["x-leyline-session"] = turn.identity.session_id
            self._plan = turn.planned.plan.planned.value
            if chat.compaction is not None and not chat.prewarms:
                step = await self._compacting.step(turn, receive, self.signs)
                self._spent_s += step.spent_s
                if step.paused is not None:
                    await self._pause(step.paused, scope, receive, send)
                    return
                chat = step.chat
                if step.withdrawn:
                    continue
                turn = replace(turn, request=chat)
            self._others = self._may_go_on(chat, {*failed, turn.replica.name})
            response: Response | None = None
            try:
                response = await self._attempt(turn, receive, send)
            except ReplicaFailedError as error:
                failed.add(turn.replica.name)
                self.services.metrics.failovers.labels(turn.replica.name).inc()
                note_failover(turn.replica.name, error.code)
                log.warning("failover", upstream=turn.replica.name, why=error.code)
                if self._pending:
                    self._loop.take_back()
                if not self._loop.goes_on:
                    continue
                # It broke off after the model had asked for texts: the other one continues.
            if self._loop.goes_on:
                chat = self._loop.next_request(chat)
                continue
            if response is not None:
                await self.answer(response, scope, receive, send)
            return

    async def _pause(self, written: Written, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a compaction alone."""
        self.message_id = written.turn.message_id
        answer = await paused_answer(self._call, written, stream=written.stream)
        if isinstance(answer, Response):
            answer.headers.update(self.extra_headers)
            await self.answer(answer, scope, receive, send)
            return
        if not self.started:
            await self.start_stream(send, STREAM_HEADERS)
        await self.send_chunk(send, answer)
        self.complete = True
        await self.end_stream(send)

    def first_sign(self) -> bytes:
        """Return the events that open an answer of the client's API, or a ping."""
        self.extra_headers["x-leyline-plan"] = self._plan
        # An engine that speaks the client's API opens the answer itself.
        return (self._open_answer() if self._native is None else b"") or self.ping

    def _open_answer(self) -> bytes:
        if self._answering or self._opened:
            return b""
        opening = self._call.opening()
        self._opened = bool(opening)
        return opening

    async def send_chunk(self, send: Send, chunk: bytes) -> None:
        """Send a part of the answer itself."""
        self._answering = True
        await super().send_chunk(send, chunk)

    def _may_go_on(self, chat: ChatRequest, failed: Collection[str]) -> bool:
        """Return True if another engine could serve the request after this one fails."""
        pool, allowed = self.services.pool, chat.tenant.upstreams
        return self.services.settings.failover and bool(pool.others(failed, chat.model, allowed))

    async def _attempt(self, turn: Turn, receive: Receive, send: Send) -> Response | None:
        """Return one engine's answer or refusal, or None after a stream or if another turn follows.

        Raises:
            ReplicaFailedError: it failed before the first byte, and another engine is left.
        """
        self._native = self._native_for(turn)
        limit_s = self.services.settings.total_timeout_s
        begun, left, self._pending = perf_counter(), False, False
        try:
            await self._reserve(turn)
            self._pending = True
            work = self._stream(turn, send) if turn.request.stream else self._fetch(turn)
            work = until_disconnect(receive, work, self.signs)
            return await within(limit_s, work, spent_s=self._spent_s)
        except ClientDisconnected:
            left = True
            raise
        except UpstreamUnreachableError as error:
            self._pending = self._pending and not isinstance(error.__cause__, _NEVER_SENT)
            if self._others and not self._answering:
                raise ReplicaFailedError(error.message, code=error.code) from error
            raise
        finally:
            if self._loop.goes_on:
                self._spent_s += perf_counter() - begun
            try:
                if self._pending:
                    await self.services.ends.abandon(turn, client_left=left)
            finally:
                await self.services.ends.release(turn)

    async def _reserve(self, turn: Turn) -> None:
        """Hold room in the tenant's budgets; a request that has begun isn't cut off by them."""
        headers = await self.services.charges.reserve(turn, forced=self._admitted)
        self.extra_headers.update(headers)
        self._admitted = True

    def failure(self, error: ProxyError) -> Response:
        """Return ``error`` in the shape of the client's API."""
        return self._call.error(error, self.extra_headers)

    def failure_event(self, error: ProxyError) -> bytes:
        """Return ``error`` as events of a stream, which it may open."""
        return self._open_answer() + self._call.error_event(error)

    def _open(self, turn: Turn) -> AbstractAsyncContextManager[httpx.Response]:
        if (api := self._native) is None:
            return open_chat(self.services, turn, self._call.headers_upstream())
        credentials = turn.request.tenant.forward_credentials
        raw, session = self._raw, turn.identity.session
        if turn.request.moved_tools and session is not None:
            raw = native_in_first_order(raw, decode_body(raw), session.tools)
        return turn.replica.forward(
            "POST",
            api.path,
            headers=self._call.headers_upstream(native=True),
            content=without_reserved(raw),
            own=[
                *self.services.routing.headers(turn),
                *(turn.replica.client.key_headers if not credentials else ()),
            ],
            credentials=credentials,
        )

    def _native_for(self, turn: Turn) -> NativeApi | None:
        """Return the API in which the request goes upstream, or None for the chat API."""
        api = self._api.native
        if self._opened or api is None or turn.request.offers_recall:
            return None
        if not _passes_natively(api, turn):
            return None
        if turn.request.compaction is not None or self._call.unfolds or turn.request.prewarms:
            return None
        # Of two equal members a server may take either; the proxy judged the request by the last.
        if repeats_members(self._raw) or not api.passes(decode_body(self._raw)):
            return None
        return api

    async def _fetch(self, turn: Turn) -> Response | None:
        """Return the whole answer, with the account in its body and headers; None if it only asks
        for texts."""
        async with self._open(turn) as upstream:
            body = await read(upstream)
        if upstream.status_code != httpx.codes.OK:
            return await self._refusal(turn, upstream, body)
        body, member = take_member(body, RECORD_MEMBER) if turn.enveloped else (body, None)
        # Before the turn counts: an answer that can't be passed on must not change the session.
        answer, prewarms = answer_of(body), turn.request.prewarms
        if prewarms:
            answer = emptied(answer)
            body = msgspec.json.encode(answer)
        note_answer(answer)
        api = self._native
        usage = answer.get("usage") if api is None else api.usage(answer)
        usage = usage if isinstance(usage, Mapping) else None
        asked = asked_in(answer) if turn.request.offers_recall else None
        aside = await self._loop.answer(turn, asked)
        if asked is not None or self._loop.text:
            body = self._loop.shown(answer)
            answer = answer_of(body)
        try:
            shown = self._call.whole(body, answer) if api is None else body
        except AnswerError as error:
            raise unfit_answer(error) from error
        if not prewarms:
            turn.request.clock.token(document_size(answer.get("choices")))
        account = await self.services.ends.settle(
            turn,
            usage,
            came=record_in(turn, member) if member is not None else None,
            aside=aside,
            quotable=api is None and is_text(answer) and not prewarms,
        )
        self._pending = False
        self._loop.account(turn, account)
        if self._loop.goes_on:
            self._loop.spent(usage)
            return None
        usage = self._loop.usage(usage) if usage is not None else None
        members = self._call.members(account, usage) if api is None else account.members
        body = put_members(shown, {name: orjson.dumps(value) for name, value in members.items()})
        await self._call.settled(turn, body)
        headers = downstream_headers(upstream.headers)
        return Response(
            body, headers={**headers, **self.extra_headers, **account_headers(account.receipt)}
        )

    async def _stream(self, turn: Turn, send: Send) -> Response | None:
        """Relay the events; the status line waits for the first. Return only a refusal."""
        async with self._open(turn) as upstream:
            if upstream.status_code != httpx.codes.OK:
                return await self._refusal(turn, upstream, await read(upstream))
            relay = self._relay(turn)
            self.extra_headers["x-leyline-plan"] = self._plan
            try:
                await self.send_relayed(relay, upstream, send)
            finally:
                self._pending = not relay.settled
        if self._loop.goes_on:
            return None
        self.complete = relay.settled
        if relay.broken:
            self.status = "503" if relay.refused else "502"
        await self.end_stream(send)
        return None

    def _relay(self, turn: Turn) -> TurnRelay:
        """Return the relay of one turn; all turns of a request go into the same events."""
        later = self._events_made
        if not later and self._native is None:
            self._events = self._call.events(turn)
        self._events_made = True
        return TurnRelay(
            self.services.ends,
            turn,
            self._call,
            self._native,
            events=self._events if self._native is None else None,
            loop=self._loop,
            later=later,
        )

    async def _refusal(self, turn: Turn, upstream: httpx.Response, body: bytes) -> Response:
        """Return the answer for an engine's status other than 200.

        Raises:
            ReplicaFailedError: it is a gateway failure, and another engine is left.
            ProxyError: an earlier turn has begun the stream, so that it is too late for a status.
        """
        self._pending = upstream.is_server_error
        if upstream.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            refused = await self.services.ends.refusal(turn)
            if refused is not None:
                turn.replica.breaker.succeeded()  # it works, and was asked for too much
                if self.started:
                    raise refused
                self.settle_status()
                return self.failure(refused)
        if upstream.status_code in GATEWAY_FAILURES and self._others:
            raise ReplicaFailedError(
                f"The engine answered with status {upstream.status_code}.", code="upstream_error"
            )
        rendered = turn.planned.rendered
        prompt = len(rendered.tokens) if rendered is not None else 0
        if self.started:
            raise refusal_of_answer(upstream.status_code, body, prompt=prompt)
        self.settle_status()
        return self._call.refused(upstream, body, self.extra_headers, prompt=prompt)


def _passes_natively(api: NativeApi, turn: Turn) -> bool:
    """Return True if a request goes upstream in the client's own API.

    False if the engine splices or the tenant's KV is kept apart: only chat requests carry the
    directive and the salt. False if a message was edited: edits apply to the chat messages of the
    translated request. False if text had to be searched for and removed: the search doesn't see
    members that the translation leaves out, such as citations.
    """
    return (
        api.path in turn.replica.apis
        and not turn.enveloped
        and not turn.searched
        and turn.request.tenant.cache_salt is None
        and turn.planned.prepared.sent_as_given
    )
