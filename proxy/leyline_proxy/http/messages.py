"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API over chat turns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from ..apis.anthropic.answer import map_answer, map_usage
from ..apis.anthropic.compaction import compaction_block, last_compaction, with_iterations
from ..apis.anthropic.diagnostics import Asked, asked_diagnostics, diagnosis, print_of
from ..apis.anthropic.errors import ANTHROPIC_VERSION, error_document
from ..apis.anthropic.models import map_model, map_models
from ..apis.anthropic.native import NativeMessages
from ..apis.anthropic.request import ChatMapping, map_request, without_beginning
from ..apis.anthropic.stream import NO_TOKENS, MessageEvents
from ..apis.chat_answers import AnswerError
from ..apis.events import encoded
from ..apis.fields import FieldError, in_request
from ..errors import BadRequestError, ProxyError
from ..model.clock import TurnClock
from ..model.compaction import CompactionReport
from ..model.fields import OPTIONS_FIELD
from ..request.parse import ChatRequest, decode_body, model_of, parse_chat
from ..tenants import Tenant
from ..turns import Account
from ..turns.settled import planned_loss, planned_usage
from ..turns.turn import Turn
from ..wiring.services import Services
from .api import Api, ApiCall, unfit_answer
from .errors import anthropic_message
from .limits import beside
from .refusal import answer_of, refusal_of_answer


class MessagesCall(ApiCall):
    """One request of Anthropic's Messages API."""

    path = "/v1/messages"
    ping = encoded([{"type": "ping"}])
    shows_compaction = False

    def __init__(
        self, services: Services, request: Request, clock: TurnClock, *, runs: bool = True
    ) -> None:
        super().__init__(services, request, clock, runs=runs)
        self._request_id = f"req_{uuid4().hex}"
        self._message_id = f"msg_{uuid4().hex}"
        self.headers["request-id"] = self._request_id
        self._mapping: ChatMapping | None = None
        self._error_code: str | None = None
        self._asked: Asked | None = None
        self._diagnosis: dict[str, Any] | None = None
        self._before: tuple[dict[str, Any], ...] = ()
        """Blocks in front of the model's."""

    async def read(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """Return the chat request for the body."""
        return await beside(raw, partial(self._parsed, tenant, raw))

    def _parsed(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        try:
            body = decode_body(raw)
            opens = self.opens(tenant, model_of(body))
            self._mapping = map_request(body, runs=self.runs, opens=opens)
            self._mapping.body["messages"] = self.written(self._mapping.body)
            if not self.services.pool.continues(model_of(body)):
                without_beginning(self._mapping.body)
            self._asked = asked_diagnostics(body)
            compacted = last_compaction(body["messages"]) is not None
            self.unfolds = compacted or bool(self._mapping.foreign)
            mapped = msgspec.json.encode(self._mapping.body)
        except FieldError as error:
            self._error_code = error.code
            raise BadRequestError(str(error), param=error.param) from error
        except RecursionError as error:
            raise BadRequestError("The request body is nested too deeply.") from error
        headers, bodies = self.request.headers, self.services.bodies
        return parse_chat(mapped, headers, tenant, clock=self.clock, bodies=bodies)

    def planned(self, turn: Turn) -> None:
        """Compare the request with the one before, if asked to."""
        if self._asked is None or self._mapping is None:
            return
        tenant, prints = turn.request.tenant.name, self.services.prints
        chain = prints.chain(turn.request.fingerprints)
        model, fingerprints = turn.request.computed_by, turn.request.fingerprints
        tools = turn.request.body.get("tools")
        made = print_of(self._mapping, model, fingerprints, chain[-1] if chain else 0, tools)
        if (previous := self._asked.previous) is not None:
            before = prints.get(tenant, previous)
            self._diagnosis = diagnosis(before, made, chain, planned_loss(turn))
        prints.put(tenant, self._message_id, made)

    def whole(self, body: bytes, answer: Mapping[str, Any]) -> bytes:
        """Return an answer as a message."""
        message = map_answer(
            answer,
            message_id=self._message_id,
            stop_sequences=self._stops,
            before=self._before,
            alone=self._paused,
        )
        if self._asked is not None:
            message["diagnostics"] = self._diagnosis
        return orjson.dumps(message)

    def members(self, account: Account, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the account, and usage as Anthropic counts it."""
        counted = map_usage(usage, account.members[OPTIONS_FIELD])
        if self._paused:
            counted = {**NO_TOKENS}
        counted = with_iterations(counted, self.compaction, counted=not self._paused)
        return {"usage": counted, **account.members}

    def events(self, turn: Turn) -> MessageEvents:
        """Return the mapping to a message's events."""
        head = {"diagnostics": self._diagnosis} if self._asked is not None else {}
        model = turn.request.model
        return MessageEvents(
            message_id=self._message_id,
            model=model,
            stop_sequences=self._stops,
            head=head,
            before=self._before,
            compaction=self.compaction,
            usage=planned_usage(turn),
        )

    def compacts(self, chat: ChatRequest, report: CompactionReport) -> None:
        """Note the compaction of the request as the first block of the answer."""
        super().compacts(chat, report)
        if report.compacted is not None:
            seal = self.services.compactions
            carried = seal.close(report.compacted, tenant=chat.tenant.name, model=chat.model)
            self._before = (compaction_block(report.compacted, carried),)

    def error(self, error: ProxyError, headers: Mapping[str, str]) -> Response:
        """Return an error of Anthropic's API."""
        return Response(
            orjson.dumps(self._document(error)),
            status_code=error.status,
            headers={**error.headers, **headers},
            media_type="application/json",
        )

    def error_event(self, error: ProxyError) -> bytes:
        """Return an ``error`` event."""
        return encoded([self._document(error)])

    def refused(
        self, upstream: httpx.Response, body: bytes, headers: Mapping[str, str], *, prompt: int = 0
    ) -> Response:
        """Return the engine's words in Anthropic's shape."""
        error = refusal_of_answer(upstream.status_code, body, prompt=prompt)
        refused = self.error(error, headers)
        if "retry-after" in upstream.headers:
            refused.headers["retry-after"] = upstream.headers["retry-after"]
        return refused

    @property
    def _paused(self) -> bool:
        return self.compaction is not None and self.compaction.paused

    @property
    def _stops(self) -> tuple[str, ...]:
        return self._mapping.stop_sequences if self._mapping is not None else ()

    def _document(self, error: ProxyError) -> dict[str, Any]:
        message, param = anthropic_message(error), error.param
        if self._mapping is not None:
            # Proxy and engine speak of the chat request, which the client never saw.
            message = in_request(message, self._mapping.origins)
            param = in_request(param, self._mapping.origins) if param is not None else None
        account = {"code": error.code, "param": param, **error.members}
        return error_document(
            error.status,
            message,
            request_id=self._request_id,
            account=account,
            code=self._error_code,
        )


MESSAGES = Api(
    MessagesCall.path, f"{MessagesCall.path}/count_tokens", MessagesCall, NativeMessages()
)


def model_as_asked(
    asked: Mapping[str, str], entry: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Return a model's entry, in Anthropic's shape if the client uses that API.

    Args:
        asked: headers of the request.
        headers: those of the answer.

    Raises:
        ProxyError: it is no entry of a model.
    """
    if not isinstance(entry.get("id"), str):
        raise unfit_answer(AnswerError("The engine's entry of a model has no id."))
    shown = map_model(entry) if ANTHROPIC_VERSION in asked else entry
    return Response(orjson.dumps(shown), headers=headers, media_type="application/json")


def models_as_asked(headers: Mapping[str, str], listed: Response) -> Response:
    """Return the list of models, in Anthropic's shape if the client uses that API.

    Args:
        listed: the list in OpenAI's shape, or an error.
    """
    if ANTHROPIC_VERSION not in headers or listed.status_code != httpx.codes.OK:
        return listed
    page = map_models(answer_of(bytes(listed.body)))
    return Response(orjson.dumps(page), media_type="application/json")
