"""Leyline's documents and commands, as routes for an engine's own HTTP application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leyline_engine.contract import (
    CAPABILITY_PATH,
    CLAIMS_PATH,
    LEDGER_PATH,
    MAX_COMMAND_BYTES,
    MAX_QUESTION_BYTES,
    RECEIPT_PATH,
    RENDERER_PATH,
    SIGNATURE_HEADER,
    ClaimProblem,
    ClaimReply,
    LedgerAnswer,
    ProblemCode,
    decode_command,
    decode_question,
    is_signature_of,
    with_carriage,
    with_receipts_in_answers,
)
from leyline_engine.server.channel import ReceiptChannel
from leyline_engine.server.claim_clock import ClaimClock, SchedulerSilentError, Send


class NoRendererError(Exception):
    """An engine that renders chats in a way that no document describes; the text says why."""


class Endpoints:
    """The handlers."""

    def __init__(
        self,
        channel: ReceiptChannel,
        send: Send,
        renderer: Callable[[], Mapping[str, Any]],
        *,
        replicas: int = 1,
        secret: str | None = None,
    ) -> None:
        """
        Args:
            send: see :class:`ClaimClock`.
            renderer: returns the chat renderer's parts and arguments, in a thread; it raises
                :class:`NoRendererError` if there are none.
            replicas: number of data-parallel replicas.
            secret: secret that signs the proxy's commands; None takes them unsigned.
        """
        self._channel = channel
        # The schedulers end with this process, and their retained turns with them.
        self._instance = channel.records.instance
        self._renderer = renderer
        self._replicas = replicas
        self._secret = secret
        self._clock = ClaimClock(send)

    def routes(self, middleware: Sequence[Middleware] = ()) -> list[Route]:
        """Return one route for each document.

        Args:
            middleware: of each route, for engines whose own guards only their own paths.
        """
        return [
            Route(path, handler, methods=[method], middleware=middleware)
            for method, path, handler in (
                ("GET", CAPABILITY_PATH, self.capability),
                ("GET", RECEIPT_PATH, self.receipt),
                ("GET", RENDERER_PATH, self.renderer),
                ("POST", CLAIMS_PATH, self.claims),
                ("POST", LEDGER_PATH, self.ledger),
            )
        ]

    async def claims(self, request: Request) -> Response:
        """Carry out one command about claims."""
        body = await self._signed(request, MAX_COMMAND_BYTES, decode_command)
        if isinstance(body, Response):
            return body
        if self._replicas > 1:
            message = "claims need one data-parallel replica: a claim must know where it is"
            reply = ClaimReply(problem=ClaimProblem(ProblemCode.UNSUPPORTED, message))
            return _json(reply)
        try:
            return _json(await self._clock.command(body))
        except SchedulerSilentError as error:
            return _error(503, str(error), "not_ready")

    async def ledger(self, request: Request) -> Response:
        """Answer one question about the ledger, from the replica that serves the session."""
        body = await self._signed(request, MAX_QUESTION_BYTES, decode_question)
        if isinstance(body, Response):
            return body
        try:
            return _json(await self._clock.question(body))
        except SchedulerSilentError as error:
            return _error(503, str(error), "not_ready")

    async def capability(self, request: Request) -> Response:
        """Return the handshake document; 503 until every replica has sent its own."""
        capability = self._channel.capability(self._replicas)
        if capability is None:
            return _error(503, "the schedulers haven't said what they can do", "not_ready")
        named = msgspec.structs.replace(capability, instance=self._instance)
        full = with_carriage(with_receipts_in_answers(named))
        return JSONResponse(msgspec.to_builtins(full))

    async def receipt(self, request: Request) -> Response:
        """Return the record of one request, by the ``message_id`` of its envelope."""
        record = self._channel.records.get(request.path_params["message_id"])
        if record is None:
            return _error(404, "no record of that message is kept", "not_found", "message_id")
        return JSONResponse(msgspec.to_builtins(record))

    async def renderer(self, request: Request) -> Response:
        """Return the chat renderer's parts and arguments; 404 if there are none to show."""
        try:
            return JSONResponse(await run_in_threadpool(self._renderer))
        except NoRendererError as error:
            return _error(404, str(error), "not_found")

    async def _signed(
        self, request: Request, most: int, decode: Callable[[bytes], object]
    ) -> str | Response:
        """Return a command of the proxy's as text, or the error that answers it.

        Args:
            most: maximum length, in bytes.
            decode: checks it.
        """
        body = await _bounded_body(request, most)
        if body is None:
            return _error(413, f"a command has at most {most} bytes", "too_large")
        given = request.headers.get(SIGNATURE_HEADER, "")
        if self._secret is not None and not is_signature_of(given, body, self._secret):
            return _error(403, "the signature is not the proxy's", "invalid_signature")
        try:
            decode(body)
            return body.decode()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, str(error), "invalid_command")


def special_tokens_of(tokenizer: Any) -> dict[str, str]:
    """Return a transformers tokenizer's named special tokens, as its chat template sees them."""
    named = tokenizer.special_tokens_map.items()
    return {name: str(value) for name, value in named if isinstance(value, str)}


async def _bounded_body(request: Request, most: int) -> bytes | None:
    """Return a request's body; None if it is longer than ``most``."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            return None
    return bytes(body)


def _json(reply: ClaimReply | LedgerAnswer) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _error(status: int, message: str, code: str, param: str | None = None) -> Response:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status)
