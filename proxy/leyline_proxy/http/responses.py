"""``POST /v1/responses``, ``…/input_tokens`` and ``…/compact``: OpenAI's Responses API over chat
turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..apis.events import encoded
from ..apis.fields import FieldError, in_request
from ..apis.responses.answer import Opening, map_answer, map_usage, shown_request, usage_of
from ..apis.responses.compaction import TRIGGER, compaction_item
from ..apis.responses.ids import response_id, with_id
from ..apis.responses.items import COMPACTION
from ..apis.responses.native import NativeResponses
from ..apis.responses.request import ChatMapping, input_items, map_request, previous_id, stores
from ..apis.responses.stored import joined, users
from ..apis.responses.stream import ResponseEvents
from ..apis.responses.truncation import Unit, droppable, with_dropped
from ..errors import BadRequestError, NotFoundError, ProxyError, UnsupportedError
from ..model.clock import TurnClock
from ..model.compaction import CompactionReport
from ..model.fields import OPTIONS_FIELD
from ..model.history import OWN_HEADER, session_key
from ..model.stored_response import StoredResponse
from ..plan.draft import LongPromptError
from ..request.compaction import forced
from ..request.parse import ChatRequest, decode_body, model_of, parse_chat
from ..request.prewarm import prewarms
from ..sessions.stored_responses import ResponseSource
from ..tenants import Tenant
from ..turns import Account
from ..turns.accounting import account_headers
from ..turns.turn import Turn
from ..upstream.tokens import TokensRefusedError
from ..wiring.services import Services
from .api import Api, ApiCall, read_call
from .compacting import Compacting
from .errors import error_event, error_response
from .exchange import Exchange
from .limits import beside
from .refusal import answer_of, overflow_in, refusal_response
from .response_chain import read_chain, resolve_references

_LEAST_ANSWER = 1024
_ANSWER_SHARE = 8
"""Room for an answer of no stated length: so many tokens, or that fraction of the window."""


async def fitting(services: Services, chat: ChatRequest, body: Mapping[str, Any]) -> ChatRequest:
    """Return the request with as few of its oldest messages dropped as needed to make it fit.

    A request that fits stays as it is. So does one that can't be counted; the engine then decides.

    Args:
        body: the source of ``chat``.

    Raises:
        NotFoundError: no engine serves the model.
        BadRequestError, ForbiddenError: the request's ``leyline`` options are wrong.
    """
    window = _window(services, chat)
    if window is None:
        return chat
    limit = body.get("max_tokens")
    room = limit if isinstance(limit, int) else min(_LEAST_ANSWER, window // _ANSWER_SHARE)
    if len(chat.raw) + room <= window:
        # A token is a byte at least, so there is nothing to count.
        return chat
    units = droppable(chat.messages)
    try:
        if await _fits(services, chat, window - room) or not units:
            return chat
        # Find the fewest units that are enough, or all of them.
        few, many = 1, len(units)
        while few < many:
            middle = (few + many) // 2
            fits = await _fits(services, _without(chat, body, units[:middle]), window - room)
            few, many = (few, middle) if fits else (middle + 1, many)
    except (UnsupportedError, TokensRefusedError):
        return chat
    return _without(chat, body, units[:few])


def _without(chat: ChatRequest, body: Mapping[str, Any], units: list[Unit]) -> ChatRequest:
    raw = msgspec.json.encode(with_dropped(body, units))
    return parse_chat(raw, chat.headers, chat.tenant, clock=chat.clock)


async def _fits(services: Services, chat: ChatRequest, room: int) -> bool:
    """Return True if a request's prompt has at most so many tokens."""
    try:
        counted = await services.turns.count_prompt(chat)
    except LongPromptError:
        return False
    return int(counted["input_tokens"]) <= room


def _window(services: Services, chat: ChatRequest) -> int | None:
    """Return the smallest window of the engines that may serve the request."""
    allowed = chat.tenant.upstreams
    known = [
        replica.status.capability.max_context
        for replica in services.pool
        if (allowed is None or replica.name in allowed)
        and replica.status.serves(chat.model)
        and replica.status.capability is not None
    ]
    return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Given:
    """A request's body, and what it continues."""

    body: dict[str, Any]
    model: str
    store: bool
    chain: list[StoredResponse]
    """The responses in front of it, oldest first."""
    items: Sequence[Mapping[str, Any]]
    """Its own items, with references resolved."""
    previous: str | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, read and mapped."""

    chat: ChatRequest
    mapping: ChatMapping
    opening: Opening
    items: list[dict[str, Any]]
    """The request's own items, with ids."""
    earlier: list[dict[str, Any]]
    """The items of the responses that it continues."""
    previous: str | None
    store: bool


class ResponsesCall(ApiCall):
    """One request of OpenAI's Responses API."""

    path = "/v1/responses"
    looks_up = True
    shows_compaction = False
    keeps_all = False
    """True if responses that aren't to be stored are kept, too."""

    def __init__(
        self, services: Services, request: Request, clock: TurnClock, *, runs: bool = True
    ) -> None:
        super().__init__(services, request, clock, runs=runs)
        self._key = uuid4().hex
        self._asked: _Asked | None = None
        self._mapping: ChatMapping | None = None
        self._events: ResponseEvents | None = None

    async def read(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """Return the chat request for the body and the responses that it continues."""
        with request_errors():
            self._asked = await self._ask(tenant, raw)
        return self._asked.chat

    async def given(self, tenant: Tenant, raw: bytes, *, may_be_empty: bool = False) -> Given:
        """Return a request's body, and what it continues.

        Args:
            may_be_empty: True takes an empty input, too.
        """
        body = await beside(raw, partial(self.decoded, raw))
        model, store = model_of(body), self.runs and stores(body)
        previous, limit = previous_id(body), tenant.limits.max_body_bytes
        chain = await read_chain(self.responses, tenant.name, previous, limit)
        named = [] if may_be_empty and body.get("input") == [] else input_items(body)
        items = await resolve_references(self.responses, tenant.name, named, limit)
        return Given(body, model, store, chain, items, previous)

    def decoded(self, raw: bytes) -> dict[str, Any]:
        """Return the members of a request's body. Raises as :func:`decode_body`."""
        return decode_body(raw)

    def opening_of(self, given: Given, mapping: ChatMapping) -> Opening:
        """Return the beginning of the response to a request."""
        return Opening(
            key=self._key,
            created_at=int(time.time()),
            model=given.model,
            shown=shown_request(given.body, store=given.store),
            tools=mapping.tools,
            carries_reasoning=mapping.carries_reasoning,
            alone=prewarms(mapping.body),
        )

    async def _ask(self, tenant: Tenant, raw: bytes) -> _Asked:
        given = await self.given(tenant, raw)
        asked = await beside(raw, partial(self._mapped, tenant, given))
        if asked.mapping.truncates and not asked.mapping.compacts:
            chat = await fitting(self.services, asked.chat, asked.mapping.body)
            asked = replace(asked, chat=chat)
        return asked

    def _mapped(self, tenant: Tenant, given: Given) -> _Asked:
        items, earlier, chain = given.items, joined(given.chain), given.chain
        mapping = self._mapping = map_request(
            given.body, items, earlier, runs=self.runs, opens=self.opens(tenant, given.model)
        )
        mapping.body["messages"] = self.written(mapping.body)
        compacted = any(item.get("type") in (COMPACTION, TRIGGER) for item in items)
        self.unfolds = compacted or bool(mapping.foreign)
        opening = self.opening_of(given, mapping)
        # After the last step an encoding error can't be reported. Events nest it deeper.
        msgspec.json.encode([[[opening.shown]]])
        headers = self._named(mapping.body, chain[-1].session if chain else None)
        mapped = msgspec.json.encode(mapping.body)
        chat = parse_chat(mapped, headers, tenant, clock=self.clock, bodies=self.services.bodies)
        if mapping.compacts:
            chat = replace(chat, compaction=forced(chat.compaction))
        own = own_items(items, self._key)
        return _Asked(chat, mapping, opening, own, earlier, given.previous, given.store)

    @property
    def responses(self) -> ResponseSource:
        """The responses that the request may continue."""
        return self.services.responses

    async def keep(self, tenant: str, stored: StoredResponse, *, store: bool) -> None:
        """Keep a response for later requests.

        Args:
            store: the request asks to store it.
        """
        if store:
            await self.services.responses.put(tenant, stored.id, stored)

    @property
    def identifier(self) -> str:
        """The id of the response."""
        return response_id(self._key)

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items of the conversation, those of earlier responses included."""
        return [*self._read.earlier, *self._read.items]

    def compacts(self, chat: ChatRequest, report: CompactionReport) -> None:
        """Note the compaction of the request as the first item of the answer."""
        super().compacts(chat, report)
        asked, opening = self._read, self._read.opening
        before = (self.compaction_item(chat, report, 0),)
        opening = replace(opening, before=before, alone=report.paused)
        self._asked = replace(asked, opening=opening)

    def compaction_item(
        self, chat: ChatRequest, report: CompactionReport, index: int
    ) -> dict[str, Any]:
        """Return the item of a compaction.

        Args:
            index: its place in the output.
        """
        assert report.compacted is not None  # noqa: S101 - there is nothing else to report
        seal = self.services.compactions
        carried = seal.close(report.compacted, tenant=chat.tenant.name, model=chat.model)
        return compaction_item(self._read.opening.item_id(COMPACTION, index), carried)

    def _named(self, body: Mapping[str, Any], session: str | None) -> Mapping[str, str]:
        """Return the request's headers, with the session of the response that it continues.

        Instructions may change from turn to turn, and then the history alone finds no session.
        """
        headers = self.request.headers
        _, where = session_key(headers, body)
        if not session or where == OWN_HEADER:
            return headers
        return {**headers, OWN_HEADER: session}

    def whole(self, body: bytes, answer: Mapping[str, Any]) -> bytes:
        """Return an answer as a response."""
        return msgspec.json.encode(map_answer(answer, self._read.opening))

    def members(self, account: Account, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the account, and usage as this API counts it."""
        counted = map_usage(usage, account.members[OPTIONS_FIELD])
        return {"usage": counted, **account.members}

    def events(self, turn: Turn) -> ResponseEvents:
        """Return the mapping to a response's events, of which some may have been sent."""
        if self._events is None:
            self._events = ResponseEvents(self._read.opening)
        else:
            self._events.goes_on(self._read.opening)
        return self._events

    def opening(self) -> bytes:
        """Return the events that open a response, unless they were sent."""
        if self._events is None:
            self._events = ResponseEvents(self._read.opening)
        return encoded(self._events.begin())

    async def settled(self, turn: Turn, body: bytes | None) -> None:
        """Keep the response for later requests."""
        asked, events = self._read, self._events
        if not (asked.store or self.keeps_all):
            return
        response: dict[str, Any] | None = events.response if events is not None else None
        if body is not None:
            response = msgspec.json.decode(body, type=dict[str, Any])
        if response is None:
            return
        stored = StoredResponse(
            id=self.identifier,
            session=turn.identity.session_id,
            previous=asked.previous,
            input=asked.items,
            response=response,
        )
        await self.keep(turn.request.tenant.name, stored, store=asked.store)

    def counted(self, tokens: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the counts as an object of this API."""
        return {"object": "response.input_tokens", **tokens}

    def error(self, error: ProxyError, headers: Mapping[str, str]) -> Response:
        """Return an error in OpenAI's shape, with the client's own fields."""
        return error_response(self._in_request(error), dict(headers))

    def error_event(self, error: ProxyError) -> bytes:
        """Return the events of a response that failed."""
        shown = self._in_request(error)
        if self._asked is None:
            return error_event(shown)
        events = self._events or ResponseEvents(self._asked.opening)
        return encoded(events.fail(shown.status, shown.message, code=shown.code, param=shown.param))

    def refused(
        self, upstream: httpx.Response, body: bytes, headers: Mapping[str, str], *, prompt: int = 0
    ) -> Response:
        """Return the engine's own error, with the client's fields."""
        if (error := overflow_in(upstream.status_code, body, prompt=prompt)) is not None:
            return self.error(error, headers)
        refused = refusal_response(upstream, body, headers)
        document = answer_of(bytes(refused.body))
        error = document["error"]
        for name in ("message", "param"):
            if isinstance(error.get(name), str):
                error[name] = in_request(error[name], self._read.mapping.origins)
        kept = {k: v for k, v in refused.headers.items() if k != "content-length"}
        return Response(msgspec.json.encode(document), refused.status_code, kept)

    def _in_request(self, error: ProxyError) -> ProxyError:
        """Express an error in the request's fields: the proxy and the engine name fields of the
        chat request, which the client never saw."""
        if error.overflow is not None:
            error.param = "input"
        elif self._mapping is not None:
            error.message = in_request(error.message, self._mapping.origins)
            error.param = (
                in_request(error.param, self._mapping.origins) if error.param else error.param
            )
        return error

    @property
    def _read(self) -> _Asked:
        assert self._asked is not None  # noqa: S101 - read() comes before anything else
        return self._asked


@contextmanager
def request_errors() -> Iterator[None]:
    """Report a request that can't be mapped as the client's error.

    Raises:
        BadRequestError, NotFoundError: a field is wrong, or names what isn't stored.
    """
    try:
        yield
    except FieldError as error:
        kind = NotFoundError if error.missing else BadRequestError
        raise kind(str(error), param=error.param, code=error.code) from error
    except RecursionError as error:
        raise BadRequestError("The request body is nested too deeply.") from error


def own_items(items: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return a request's items as they are kept: with ids, and without the order to compact."""
    return [
        with_id(item, key, index) for index, item in enumerate(items) if item.get("type") != TRIGGER
    ]


RESPONSES = Api(
    ResponsesCall.path, f"{ResponsesCall.path}/input_tokens", ResponsesCall, NativeResponses()
)


COMPACT_PATH = f"{RESPONSES.path}/compact"


class CompactExchange(Exchange):
    """Compacts a conversation. The answer is nothing but the summary's turn, so its errors are the
    client's."""

    spends = True

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request, COMPACT_PATH)
        self._call = ResponsesCall(services, request, self.clock, runs=False)

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Ask the model for the summary, and answer with the user's messages and the summary."""
        chat = await read_call(self._call, tenant, raw, receive)
        self.model = self.services.pool.label(chat.model)
        wish = forced(chat.compaction)
        written = await Compacting(self.services, self._call).write(chat, wish, receive)
        self.message_id = written.turn.message_id
        self.extra_headers["x-leyline-session"] = written.turn.identity.session_id
        output = users(self._call.items)
        output.append(self._call.compaction_item(chat, written.report, len(output)))
        members = written.account.members
        members[OPTIONS_FIELD]["compaction"] = written.report.document()
        document: dict[str, Any] = {
            "id": self._call.identifier,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": output,
            "usage": usage_of(written.report.usage or {}),
            **members,
        }
        response = Response(
            msgspec.json.encode(document),
            headers={**self.extra_headers, **account_headers(written.account.receipt)},
            media_type="application/json",
        )
        await self.answer(response, scope, receive, send)

    def failure(self, error: ProxyError) -> Response:
        """Return ``error`` in the shape of the API."""
        return self._call.error(error, self.extra_headers)
