"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API over the chat route."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..apis.anthropic.answer import map_answer, map_usage
from ..apis.anthropic.errors import FieldError, error_document
from ..apis.anthropic.models import map_models
from ..apis.anthropic.native import NativeMessages
from ..apis.anthropic.request import ChatMapping, map_request
from ..apis.anthropic.stream import Event, MessageEvents
from ..apis.chat_answers import AnswerError
from ..errors import BadRequestError, ProxyError, UpstreamRefusalError
from ..model.fields import OPTIONS_FIELD
from ..request.parse import ChatRequest, decode_body, parse_chat
from ..tenants import Tenant
from ..turns import Account, TurnSettler
from ..turns.turn import Turn
from ..upstream.headers import RawHeaders
from ..wiring.services import Services
from .chat import ChatExchange
from .exchange import Exchange
from .limits import until_disconnect
from .refusal import answer_of, refusal_of_answer, refusal_of_event
from .relay import TurnRelay
from .sse import DONE, ChunkFacts, event_data

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"

FailureEvent = Callable[[ProxyError], bytes]


class _AnthropicExchange(Exchange):
    """What both routes share: a request that is mapped, and errors in Anthropic's shape."""

    runs = True
    """Whether the request is one to answer; else its tokens are only counted."""

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request)
        self._request_id = f"req_{uuid4().hex}"
        self.extra_headers["request-id"] = self._request_id
        self.mapping: ChatMapping | None = None
        self._error_code: str | None = None

    def parse(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """The chat request that the body stands for.

        Raises:
            BadRequestError: names the field of the body.
        """
        try:
            self.mapping = map_request(decode_body(raw), runs=self.runs)
            mapped = msgspec.json.encode(self.mapping.body)
        except FieldError as error:
            self._error_code = error.code
            raise BadRequestError(str(error), param=error.param) from error
        except RecursionError as error:
            raise BadRequestError("The request body is nested too deeply.") from error
        return parse_chat(
            mapped,
            self.request.headers,
            tenant,
            arrived=self.arrived,
            bodies=self.services.bodies,
        )

    def failure(self, error: ProxyError) -> Response:
        """As an error of Anthropic's API."""
        headers = {**error.headers, **self.extra_headers}
        return Response(
            orjson.dumps(self._document(error)),
            status_code=error.status,
            headers=headers,
            media_type="application/json",
        )

    def failure_event(self, error: ProxyError) -> bytes:
        """As an ``error`` event."""
        return _encoded([self._document(error)])

    def _document(self, error: ProxyError) -> dict[str, Any]:
        message, param = error.message, error.param
        if self.mapping is not None:
            # Proxy and engine speak of the chat request, which the client never saw.
            message = self.mapping.in_request(message)
            param = self.mapping.in_request(param) if param is not None else None
        account = {"code": error.code, "param": param, **error.members}
        return error_document(
            error.status,
            message,
            request_id=self._request_id,
            account=account,
            code=self._error_code,
        )


class MessagesExchange(_AnthropicExchange, ChatExchange):
    """One turn."""

    route = MESSAGES_PATH
    native_api = NativeMessages()

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request)
        self._message_id = f"msg_{uuid4().hex}"

    def headers_upstream(self) -> RawHeaders:
        """Without those that are for Anthropic's servers."""
        return [item for item in super().headers_upstream() if not _is_anthropic(item[0])]

    def shown(self, body: bytes, answer: Mapping[str, Any]) -> bytes:
        """The message that an answer stands for."""
        try:
            message = map_answer(answer, message_id=self._message_id, stop_sequences=self._stops)
        except AnswerError as error:
            raise _invalid(error) from error
        return orjson.dumps(message)

    def members(self, account: Account, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """The account, and usage as Anthropic counts it."""
        counted = map_usage(usage, account.members[OPTIONS_FIELD])
        return {"usage": counted, **account.members}

    def relay(self, turn: Turn) -> TurnRelay:
        """One that gives events of a message."""
        events = MessageEvents(
            message_id=self._message_id, model=turn.request.model, stop_sequences=self._stops
        )
        return _MessageRelay(self.services.ends, turn, events, self.failure_event)

    def refused(self, upstream: httpx.Response, body: bytes) -> Response:
        """The engine's words in Anthropic's shape."""
        refused = self.failure(refusal_of_answer(upstream.status_code, body))
        if "retry-after" in upstream.headers:
            refused.headers["retry-after"] = upstream.headers["retry-after"]
        return refused

    @property
    def _stops(self) -> tuple[str, ...]:
        return self.mapping.stop_sequences if self.mapping is not None else ()


class CountTokensExchange(_AnthropicExchange):
    """Prompt tokens of a request that isn't run."""

    route = COUNT_PATH
    runs = False

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Count."""
        chat = self.parse(tenant, raw)
        self.model = self.services.pool.label(chat.model)
        counted = await until_disconnect(receive, self.services.turns.count_prompt(chat))
        body = orjson.dumps(counted)
        response = Response(body, headers=self.extra_headers, media_type="application/json")
        await self.answer(response, scope, receive, send)


class _MessageRelay(TurnRelay):
    """Gives events of a message for the chunks of a chat completion."""

    keeps = True

    def __init__(
        self, ends: TurnSettler, turn: Turn, events: MessageEvents, failure_event: FailureEvent
    ) -> None:
        super().__init__(ends, turn)
        self._events = events
        self._failure_event = failure_event
        self._told = False
        """The stream has had its error, behind which nothing comes."""

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """The events that the engine's stands for."""
        if self._told:
            return b""
        passed = await super().passed(event, facts)
        if facts.error is not None:
            self._told = True
            return passed
        return self._mapped(passed)

    async def closed(self, rest: bytes) -> bytes:
        """What ends the message, where no event of the engine's did."""
        rest = await super().closed(rest)
        if self._told:
            return b""
        return self._mapped(rest) + self._mapped(b"data: " + DONE)

    def failure_event(self, error: ProxyError) -> bytes:
        """In Anthropic's shape."""
        return self._failure_event(error)

    def engine_failure(self, event: bytes, error: Mapping[str, Any]) -> bytes:
        """In Anthropic's shape, with the engine's words."""
        return self._failure_event(refusal_of_event(error))

    def _mapped(self, event: bytes) -> bytes:
        data = event_data(event)
        if not data:
            # A comment keeps the connection alive, and so does a ping.
            return _encoded([{"type": "ping"}]) if event and self._events.started else b""
        try:
            if data == DONE:
                return _encoded(self._events.close())
            return _encoded(self._events.feed(answer_of(data)))
        except AnswerError as error:
            raise _invalid(error) from error


def models_as_asked(headers: Mapping[str, str], listed: Response) -> Response:
    """The list of models in Anthropic's shape, where the client is one of that API's.

    Args:
        listed: the list in OpenAI's shape, or an error.
    """
    if "anthropic-version" not in headers or listed.status_code != httpx.codes.OK:
        return listed
    page = map_models(answer_of(bytes(listed.body)))
    return Response(orjson.dumps(page), media_type="application/json")


def _is_anthropic(name: bytes) -> bool:
    return name.lower().startswith(b"anthropic-")


def _invalid(error: AnswerError) -> ProxyError:
    return UpstreamRefusalError(
        502, str(error), kind="upstream_error", code="upstream_invalid_response"
    )


def _encoded(events: Iterable[Event]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
        for event in events
    )
