"""Leyline's documents on SGLang's own HTTP application, behind SGLang's own API key.

``EngineHttp`` lives in the launching process, which also serves HTTP: it opens the channel before
SGLang starts the schedulers, and adds the routes before SGLang starts to serve. Where SGLang serves
from other processes (``--tokenizer-worker-num``, the Rust server, ``--use-ray``), the routes are
missing, and the proxy takes the engine for one that doesn't splice.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
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
    ChatDialect,
    ClaimProblem,
    ClaimReply,
    LedgerAnswer,
    ProblemCode,
    decode_command,
    decode_question,
    is_signature_of,
    with_receipts_in_answers,
)
from leyline_engine.hints import envelope_of
from leyline_engine.sglang.channel import ENDPOINT_VARIABLE, ReceiptChannel
from leyline_engine.sglang.claim_clock import (
    ClaimAnswer,
    ClaimClock,
    ClaimMessage,
    SchedulerSilentError,
)
from leyline_engine.sglang.hints import CarriesHints, hints_secret, pack_hints
from leyline_engine.sglang.ranks import pin_session
from leyline_engine.sglang.server.answering import AnsweringWithRecords, note_envelope
from leyline_engine.sglang.server.leaving import LeavingEngine

log = logging.getLogger(__name__)

_SERVER = "sglang.srt.entrypoints.http_server"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
CLAIMS_METHOD = "leyline.claims"
"""Method that marks Leyline's messages among SGLang's own of the same kind."""


def register_http() -> None:
    """Hook into this process's HTTP server and tokenizer manager, should it ever start them.

    Does nothing in the processes that a launcher with a channel has started.
    """
    if ENDPOINT_VARIABLE in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    http = EngineHttp()
    for target, hook in (
        (f"{_SERVER}.launch_server", http.before_launch),
        (f"{_SERVER}._setup_and_run_http_server", http.before_serving),
        (f"{_TOKENIZER}._create_tokenized_object", http.before_tokenizing),
    ):
        HookRegistry.register(target, _logging_failures(hook), HookType.BEFORE)


class EngineHttp:
    """The hooks of the launching process, and their common state."""

    def __init__(self) -> None:
        self._channel: ReceiptChannel | None = None
        self._replicas = 1

    def before_launch(self, server_args: Any, *_: Any, **__: Any) -> None:
        """Open the channel; the processes that SGLang starts next inherit its address."""
        os.environ.pop(ENDPOINT_VARIABLE, None)
        if server_args.node_rank > 0:
            log.warning("node %d serves no HTTP: it listens for no receipts", server_args.node_rank)
            return
        self._channel = ReceiptChannel()
        atexit.register(self._channel.close)
        os.environ[ENDPOINT_VARIABLE] = self._channel.endpoint

    def before_serving(
        self, server_args: Any, tokenizer_manager: Any, template_manager: Any, *_: Any, **__: Any
    ) -> None:
        """Add the routes, once the schedulers run."""
        # Processes started from now on don't belong to this engine.
        os.environ.pop(ENDPOINT_VARIABLE, None)
        if self._channel is None:
            return
        if server_args.tokenizer_worker_num > 1:
            log.warning("Leyline's routes need --tokenizer-worker-num 1: none are served")
            return
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.runtime_context import get_parallel, get_serving

        self._replicas = get_parallel().num_dp_ranks
        endpoints = Endpoints(
            self._channel,
            tokenizer_manager,
            template_manager,
            template_kwargs=get_serving().default_chat_template_kwargs or {},
            replicas=self._replicas,
            secret=hints_secret(),
        )
        app.router.routes.extend(endpoints.routes())
        app.add_middleware(AnsweringWithRecords, records=self._channel.records)
        app.add_middleware(LeavingEngine, leaving=lambda: tokenizer_manager.gracefully_exit)

    def before_tokenizing(self, _: Any, request: CarriesHints, *__: Any, **___: Any) -> None:
        """Note and bound the request's envelope, and send the request to its session's replica."""
        if isinstance(params := request.sampling_params, dict):
            note_envelope(envelope_of(params.get("custom_params")))
        pack_hints(request)
        pin_session(request, self._replicas)


class Endpoints:
    """The handlers."""

    def __init__(
        self,
        channel: ReceiptChannel,
        tokenizer_manager: Any,
        template_manager: Any,
        *,
        template_kwargs: Mapping[str, Any],
        replicas: int = 1,
        secret: str | None = None,
    ) -> None:
        """
        Args:
            tokenizer_manager: SGLang's, with the tokenizer.
            template_manager: SGLang's, with the chat template.
            template_kwargs: arguments of templates, unless a request sets others.
            replicas: number of data-parallel replicas.
            secret: secret that signs the proxy's commands; None takes them unsigned.
        """
        self._channel = channel
        # The schedulers end with this process, and their retained turns with them.
        self._instance = token_hex(8)
        self._tokenizer_manager = tokenizer_manager
        self._template_manager = template_manager
        self._template_kwargs = dict(template_kwargs)
        self._replicas = replicas
        self._secret = secret
        self._clock = ClaimClock(self._send)

    def routes(self) -> list[Route]:
        """Return one route for each document."""
        return [
            Route(CAPABILITY_PATH, self.capability),
            Route(RECEIPT_PATH, self.receipt),
            Route(RENDERER_PATH, self.renderer),
            Route(CLAIMS_PATH, self.claims, methods=["POST"]),
            Route(LEDGER_PATH, self.ledger, methods=["POST"]),
        ]

    async def claims(self, request: Request) -> Response:
        """Carry out one command about claims."""
        body = await self._signed(request, MAX_COMMAND_BYTES, decode_command)
        if isinstance(body, Response):
            return body
        if self._replicas > 1:
            message = "claims need one replica: with --dp-size 1, a claim knows where it is"
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

    async def _send(self, message: ClaimMessage) -> ClaimAnswer:
        """Send a message to the scheduler; :class:`ClaimClock` numbers them."""
        from sglang.srt.managers.io_struct import DumperControlReqInput

        body = msgspec.to_builtins(message)
        request: Any = DumperControlReqInput(method=CLAIMS_METHOD, body=body)
        while True:
            outputs = await self._tokenizer_manager.dumper_control(request)
            if not all(output.success for output in outputs):
                raise SchedulerSilentError("the scheduler failed to carry the command out")
            answers = [
                msgspec.json.decode(output.response[0]["answer"], type=ClaimAnswer)
                for output in outputs
            ]
            for answer in answers:
                if answer.order == message.order and (answer.ledger or not message.question):
                    return answer
            # They are late answers to an abandoned message, maybe another tenant's.
            request = None

    async def capability(self, request: Request) -> Response:
        """Return the handshake document; 503 until every replica has sent its own."""
        capability = self._channel.capability(self._replicas)
        if capability is None:
            return _error(503, "the schedulers haven't said what they can do", "not_ready")
        named = msgspec.structs.replace(capability, instance=self._instance)
        return JSONResponse(msgspec.to_builtins(with_receipts_in_answers(named)))

    async def receipt(self, request: Request) -> Response:
        """Return the record of one request, by the ``message_id`` of its envelope."""
        record = self._channel.records.get(request.path_params["message_id"])
        if record is None:
            return _error(404, "no record of that message is kept", "not_found", "message_id")
        return JSONResponse(msgspec.to_builtins(record))

    async def renderer(self, request: Request) -> Response:
        """Return the chat renderer's parts and arguments; 404 if SGLang renders without them."""
        tokenizer = getattr(self._tokenizer_manager.tokenizer, "backend_tokenizer", None)
        templates = self._template_manager
        if tokenizer is None:
            return _error(404, "this engine has no fast tokenizer to show", "not_found")
        if templates.chat_template_name is not None or templates.python_chat_template is not None:
            return _error(404, "this engine renders chats without a Jinja template", "not_found")
        return JSONResponse(await run_in_threadpool(self._renderer_document))

    def _renderer_document(self) -> dict[str, Any]:
        tokenizer = self._tokenizer_manager.tokenizer
        template = tokenizer.chat_template
        return {
            "chat_template": template if isinstance(template, str) else "",
            "special_tokens": {
                name: str(value)
                for name, value in tokenizer.special_tokens_map.items()
                if isinstance(value, str)
            },
            "tokenizer_json": tokenizer.backend_tokenizer.to_str(),
            "dialect": ChatDialect.SGLANG,
            "takes_parts": self._template_manager.jinja_template_content_format == "openai",
            "template_kwargs": self._template_kwargs,
        }


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


def _logging_failures(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose failure leaves SGLang running as it would without it."""

    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            log.exception("Leyline's hook %s failed", hook.__name__)

    return guarded
