"""APIs over chat turns: how each reads requests and writes answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from ..apis.chat_answers import AnswerError
from ..apis.events import Events
from ..apis.native import NativeApi
from ..errors import BadRequestError, ProxyError, UpstreamRefusalError
from ..model.clock import TurnClock
from ..model.compaction import Compacted, CompactionReport
from ..model.fields import OPTIONS_FIELD
from ..model.template_roles import framed, written_for
from ..request.declared import edits_by_characters
from ..request.parse import ChatRequest
from ..request.recall_tool import with_recall_tool
from ..tenants import Tenant
from ..turns import Account
from ..turns.turn import Turn
from ..upstream.headers import NATIVE, RawHeaders, headers_of_route
from ..wiring.services import Services
from .errors import error_event, error_response
from .limits import until_disconnect
from .refusal import refusal_response
from .sse import PING


class ApiCall(ABC):
    """One request of an API. The defaults are the chat API's, whose bytes pass unchanged.

    Args:
        clock: times the request.
        runs: False if the request isn't answered, and only its tokens are counted.
    """

    looks_up = False
    """True if reading a request asks a store. Its client may leave meanwhile."""
    ping = PING
    """A sign of life within a stream."""
    shows_compaction = True
    """True if the account shows the messages of a compaction: the API has no other place for
    them."""

    def __init__(
        self, services: Services, request: Request, clock: TurnClock, *, runs: bool = True
    ) -> None:
        self.services = services
        self.request = request
        self.clock = clock
        self.runs = runs
        self.headers: dict[str, str] = {}
        """Headers of every response, errors included."""
        self.compaction: CompactionReport | None = None
        """The compaction of the request, once there is one."""
        self.unfolds = False
        """True if the request has parts that only the proxy can read."""
        self.continues: str | None = None
        """Id of the session whose compaction the request carries."""

    def opens(self, tenant: Tenant, model: str) -> Callable[[str], Compacted | None]:
        """Return the function that opens compactions for a request's tenant and model."""

        def opened(carried: str) -> Compacted | None:
            seal = self.services.compactions
            found = seal.open(carried, tenant=tenant.name, model=model)
            self.continues = found.session if found is not None else None
            return found

        return opened

    def written(self, body: Mapping[str, Any]) -> Any:
        """Return a chat request's messages in roles that the engine's template shows.

        Raises:
            BadRequestError: an edit concerns characters of a text that has got a frame.
        """
        messages = body.get("messages")
        found = written_for(messages, self.services.pool.roles(body.get("model")))
        if isinstance(messages, list) and found is not messages:
            places = framed(messages, found)
            for field, _ in edits_by_characters(body.get(OPTIONS_FIELD), places):
                raise BadRequestError(
                    f"{field} can't be counted: the model's chat template shows no such message, "
                    "so that it is sent as the user's, in a frame. Replace or drop the whole "
                    "message.",
                    param=field,
                )
        return found

    @abstractmethod
    async def read(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """Return the chat request for a body.

        Raises:
            BadRequestError: a field of the body is wrong; the error names it.
            NotFoundError: the body refers to something that doesn't exist (for this tenant).
        """

    path: str
    """The path of the API, by which the client's headers are chosen for the engine."""

    def headers_upstream(self, *, native: bool = False) -> RawHeaders:
        """Return the client's headers; the upstream client filters them further.

        Args:
            native: True if the request goes upstream as it came.
        """
        route = NATIVE + self.path if native else self.path
        return headers_of_route(self.request.headers.raw, route)

    def planned(self, turn: Turn) -> None:  # noqa: B027 - most need nothing
        """Note a turn that is about to go to an engine; after a failure there is another."""

    def whole(self, body: bytes, answer: Mapping[str, Any]) -> bytes:
        """Return an engine's whole answer in the client's API, without the account.

        Args:
            answer: ``body``, decoded.

        Raises:
            AnswerError: the answer can't be expressed in this API.
        """
        return body

    def members(self, account: Account, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the members to append to an answer."""
        return account.members

    def events(self, turn: Turn) -> Events | None:
        """Return the mapping of chunks to this API's events, or None to pass the chunks on."""
        return None

    def opening(self) -> bytes:
        """Return what a stream begins with before an engine answers; empty if that is nothing."""
        return b""

    def compacts(self, chat: ChatRequest, report: CompactionReport) -> None:
        """Note the compaction of the request, which its answer reports.

        Args:
            chat: the request before it.
        """
        self.compaction = report

    async def settled(self, turn: Turn, body: bytes | None) -> None:  # noqa: B027 - most need nothing
        """Note a settled turn, before the client gets the end of its answer.

        Args:
            body: the whole answer; None after a stream.
        """

    def counted(self, tokens: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the document of a token count."""
        return tokens

    def error(self, error: ProxyError, headers: Mapping[str, str]) -> Response:
        """Return an error in the shape of the API.

        Args:
            headers: headers of the response, besides the error's own.
        """
        return error_response(error, dict(headers))

    def error_event(self, error: ProxyError) -> bytes:
        """Return an error as events of a stream."""
        return error_event(error)

    def refused(
        self, upstream: httpx.Response, body: bytes, headers: Mapping[str, str], *, prompt: int = 0
    ) -> Response:
        """Return an engine's answer with a status other than 200, in the shape of the API.

        Args:
            prompt: tokens of the prompt as the proxy counts them; 0 if it doesn't know.
        """
        return refusal_response(upstream, body, headers, prompt=prompt)


@dataclass(frozen=True, slots=True)
class Api:
    """An API served over chat turns."""

    path: str
    count_path: str
    """Path that counts the prompt tokens of a request."""
    call: Callable[..., ApiCall]
    """The class of its requests."""
    native: NativeApi | None = None
    """Reader of answers of an upstream that speaks this API itself."""


async def read_call(call: ApiCall, tenant: Tenant, raw: bytes, receive: Receive) -> ChatRequest:
    """Return the chat request of a call.

    Raises:
        ClientDisconnected: the client left meanwhile.
        ProxyError: see :meth:`ApiCall.read`.
    """
    if call.looks_up:
        chat = await until_disconnect(receive, call.read(tenant, raw))
    else:
        # Watching the connection costs a task, which reading alone isn't worth.
        with call.clock.working():
            chat = await call.read(tenant, raw)
    if call.continues is not None:
        chat = replace(chat, continues=call.continues)
    return with_recall_tool(chat, tool=call.services.settings.recall_tool)


def unfit_answer(error: AnswerError) -> ProxyError:
    """Return the error for an engine's answer that can't be expressed in the client's API."""
    return UpstreamRefusalError(
        502, str(error), kind="upstream_error", code="upstream_invalid_response"
    )
