"""``POST /v1/responses`` and ``/v1/responses/input_tokens``: OpenAI's Responses API over the chat
route."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..apis.chat_answers import AnswerError
from ..apis.responses.answer import Opening, map_answer, map_usage, shown_request
from ..apis.responses.errors import FieldError
from ..apis.responses.ids import response_id, with_id
from ..apis.responses.native import NativeResponses
from ..apis.responses.request import ChatMapping, input_items, map_request, previous_id, stores
from ..apis.responses.stored import joined
from ..apis.responses.stream import Event, ResponseEvents
from ..errors import BadRequestError, NotFoundError, ProxyError, UpstreamRefusalError
from ..model.fields import OPTIONS_FIELD
from ..model.history import OWN_HEADER, session_key
from ..model.stored_response import StoredResponse
from ..request.parse import ChatRequest, decode_body, model_of, parse_chat
from ..tenants import Tenant
from ..turns import Account, TurnSettler
from ..turns.turn import Turn
from ..upstream.headers import RawHeaders
from ..wiring.services import Services
from .chat import ChatExchange
from .errors import error_response
from .exchange import Exchange
from .limits import until_disconnect
from .refusal import answer_of, refusal_of_event, refusal_response
from .relay import TurnRelay
from .response_chain import read_chain, resolve_references
from .response_fit import fitting
from .sse import DONE, ChunkFacts, event_data

RESPONSES_PATH = "/v1/responses"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"

_TO_OPENAI = (b"openai-", b"chatgpt-", b"x-codex-", b"x-openai-")
"""How headers begin that are for OpenAI's servers."""

_HISTORY = "history"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, read and mapped."""

    chat: ChatRequest
    mapping: ChatMapping
    opening: Opening
    items: list[dict[str, Any]]
    """Its own, with ids."""
    previous: str | None
    store: bool


class _ResponsesExchange(Exchange):
    """What both routes share: a request that is mapped, and errors in its own terms."""

    runs = True
    """Whether the request is one to answer; else its tokens are only counted."""

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request)
        self._key = uuid4().hex
        self._asked: _Asked | None = None
        self._mapping: ChatMapping | None = None

    async def ask(self, tenant: Tenant, raw: bytes) -> _Asked:
        """Read a request, and what it goes on from.

        Raises:
            BadRequestError: names the field of the body.
            NotFoundError: a response or an item that isn't there (for this tenant).
        """
        try:
            return await self._ask(tenant, raw)
        except FieldError as error:
            kind = NotFoundError if error.missing else BadRequestError
            raise kind(str(error), param=error.param, code=error.code) from error
        except RecursionError as error:
            raise BadRequestError("The request body is nested too deeply.") from error

    async def _ask(self, tenant: Tenant, raw: bytes) -> _Asked:
        body = decode_body(raw)
        model, store = model_of(body), self.runs and stores(body)
        previous = previous_id(body)
        limit = tenant.limits.max_body_bytes
        chain = await read_chain(self.services.responses, tenant.name, previous, limit)
        given = input_items(body)
        items = await resolve_references(self.services.responses, tenant.name, given, limit)
        mapping = self._mapping = map_request(body, items, joined(chain), runs=self.runs)
        shown = shown_request(body, store=store)
        # Behind the last step no one is told of what can't be written. Events hold it deeper.
        msgspec.json.encode([[[shown]]])
        opening = Opening(
            key=self._key,
            created_at=int(time.time()),
            model=model,
            shown=shown,
            tools=mapping.tools,
            carries_reasoning=mapping.carries_reasoning,
        )
        headers = self._named(mapping.body, chain[-1].session if chain else None)
        mapped = msgspec.json.encode(mapping.body)
        chat = parse_chat(
            mapped, headers, tenant, arrived=self.arrived, bodies=self.services.bodies
        )
        if mapping.truncates:
            chat = await fitting(self.services, chat, mapping.body)
        own = [with_id(item, self._key, index) for index, item in enumerate(items)]
        return _Asked(chat, mapping, opening, own, previous, store)

    def _named(self, body: Mapping[str, Any], session: str | None) -> Mapping[str, str]:
        """The request's headers, with the session of the response that it goes on from.

        Instructions may be others on each turn, and then the history alone tells nothing.
        """
        headers = self.request.headers
        _, where = session_key(headers, body)
        if session is None or where == OWN_HEADER:
            return headers
        return {**headers, OWN_HEADER: session}

    def failure(self, error: ProxyError) -> Response:
        """In OpenAI's shape, with the client's own fields."""
        return error_response(self.told(error), self.extra_headers)

    def told(self, error: ProxyError) -> ProxyError:
        """The error, put into the terms of the request: proxy and engine speak of the chat request,
        which the client never saw."""
        if self._mapping is not None:
            error.message = self._mapping.in_request(error.message)
            error.param = self._mapping.in_request(error.param) if error.param else error.param
        return error


class ResponsesExchange(_ResponsesExchange, ChatExchange):
    """One turn."""

    route = RESPONSES_PATH
    native_api = NativeResponses()
    _events: ResponseEvents | None = None

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Read what the request goes on from, then as a chat turn."""
        self._asked = await until_disconnect(receive, self.ask(tenant, raw))
        await super().serve(tenant, raw, scope, receive, send)

    def parse(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """The chat request that the body stands for."""
        return self._read.chat

    def headers_upstream(self) -> RawHeaders:
        """Without those that are for OpenAI's servers."""
        given = super().headers_upstream()
        return [item for item in given if not item[0].lower().startswith(_TO_OPENAI)]

    def shown(self, body: bytes, answer: Mapping[str, Any]) -> bytes:
        """The response that an answer stands for."""
        try:
            return msgspec.json.encode(map_answer(answer, self._read.opening))
        except AnswerError as error:
            raise _invalid(error) from error

    def members(self, account: Account, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """The account, and usage as this API counts it."""
        counted = map_usage(usage, account.members[OPTIONS_FIELD])
        return {"usage": counted, **account.members}

    def relay(self, turn: Turn) -> TurnRelay:
        """One that gives events of a response."""
        events = self._events = ResponseEvents(self._read.opening)
        return _ResponseRelay(self.services.ends, turn, events, self)

    async def keep(self, turn: Turn, response: dict[str, Any]) -> None:
        """Store a response, if its request wants that."""
        asked = self._read
        if not asked.store:
            return
        identifier = response_id(self._key)
        stored = StoredResponse(
            id=identifier,
            session=turn.identity.session_id,
            previous=asked.previous,
            input=asked.items,
            response=response,
        )
        await self.services.responses.put(turn.request.tenant.name, identifier, stored)

    def refused(self, upstream: httpx.Response, body: bytes) -> Response:
        """The engine's own error, with the client's fields."""
        refused = refusal_response(upstream, body, self.extra_headers)
        document = answer_of(bytes(refused.body))
        error = document["error"]
        for name in ("message", "param"):
            if isinstance(error.get(name), str):
                error[name] = self._read.mapping.in_request(error[name])
        headers = {k: v for k, v in refused.headers.items() if k != "content-length"}
        content = msgspec.json.encode(document)
        return Response(content, status_code=refused.status_code, headers=headers)

    def failure_event(self, error: ProxyError) -> bytes:
        """The events of a response that failed."""
        events = self._events or ResponseEvents(self._read.opening)
        told = self.told(error)
        return encoded(events.fail(told.status, told.message, code=told.code, param=told.param))

    async def _fetch(self, turn: Turn) -> Response:
        answer = await super()._fetch(turn)
        if answer.status_code == httpx.codes.OK and self._read.store:
            await self.keep(turn, msgspec.json.decode(answer.body, type=dict[str, Any]))
        return answer

    @property
    def _read(self) -> _Asked:
        assert self._asked is not None  # noqa: S101 - serve() reads it before anything else
        return self._asked


class InputTokensExchange(_ResponsesExchange):
    """Prompt tokens of a request that isn't run."""

    route = INPUT_TOKENS_PATH
    runs = False

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Count."""
        asked = await until_disconnect(receive, self.ask(tenant, raw))
        self.model = self.services.pool.label(asked.chat.model)
        counted = await until_disconnect(receive, self.services.turns.count_prompt(asked.chat))
        body = orjson.dumps({"object": "response.input_tokens", **counted})
        response = Response(body, headers=self.extra_headers, media_type="application/json")
        await self.answer(response, scope, receive, send)


class _ResponseRelay(TurnRelay):
    """Gives events of a response for the chunks of a chat completion."""

    keeps = True

    def __init__(
        self, ends: TurnSettler, turn: Turn, events: ResponseEvents, exchange: ResponsesExchange
    ) -> None:
        super().__init__(ends, turn)
        self._events = events
        self._exchange = exchange

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """The events that the engine's stands for."""
        if self._events.ended:
            return b""
        passed = await super().passed(event, facts)
        return passed if facts.error is not None else await self._mapped(passed)

    async def closed(self, rest: bytes) -> bytes:
        """What ends the response, where no event of the engine's did."""
        rest = await super().closed(rest)
        if self._events.ended:
            return b""
        return await self._mapped(rest) + await self._mapped(b"data: " + DONE)

    def failure_event(self, error: ProxyError) -> bytes:
        """The events of a response that failed."""
        return self._exchange.failure_event(error)

    def engine_failure(self, event: bytes, error: Mapping[str, Any]) -> bytes:
        """The same, with the engine's words."""
        return self._exchange.failure_event(refusal_of_event(error))

    async def _mapped(self, event: bytes) -> bytes:
        data = event_data(event)
        if not data:
            # A comment keeps the connection alive; it is one in this API as well.
            return event
        try:
            if data != DONE:
                return encoded(self._events.feed(answer_of(data)))
            last = encoded(self._events.close())
        except AnswerError as error:
            raise _invalid(error) from error
        if last and self._events.response is not None:
            # Before its client knows that it may go on from it.
            await self._exchange.keep(self._turn, self._events.response)
        return last


def encoded(events: Iterable[Event]) -> bytes:
    """Events as a stream has them."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in events
    )


def _invalid(error: AnswerError) -> ProxyError:
    return UpstreamRefusalError(
        502, str(error), kind="upstream_error", code="upstream_invalid_response"
    )
