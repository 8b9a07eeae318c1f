"""The engine's Starlette application."""

from __future__ import annotations

import hmac
import logging
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leyline_engine.admit.hints import Hints, envelope_of, read_hints
from leyline_engine.contract import (
    CAPABILITY_PATH,
    CLAIMS_PATH,
    LEDGER_PATH,
    MAX_COMMAND_BYTES,
    MAX_QUESTION_BYTES,
    RECEIPT_PATH,
    RENDERER_PATH,
    SIGNATURE_HEADER,
    is_signature_of,
    message_that_asks,
    unpacked,
    with_carriage,
    with_receipts_in_answers,
)
from leyline_replay.engine import GenerationRequest
from leyline_replay.generation import JobSpec
from leyline_replay.http.errors import ApiError, to_api_error
from leyline_replay.http.generate import Delivery, run_request, run_whole
from leyline_replay.http.responses import (
    ChatShape,
    CompletionShape,
    Head,
    NativeShape,
)
from leyline_replay.http.schema import (
    ChatBody,
    CommonBody,
    CompletionBody,
    NativeBody,
    TokenizeBody,
    check_chat,
    check_common,
    check_completion,
    check_messages,
    check_native,
    decode_body,
    decode_claim_command,
    decode_ledger_question,
)
from leyline_replay.service import EngineService
from leyline_replay.text.chat import PromptEncoder
from leyline_replay.text.sampling import SamplingParams

log = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Limits and names of the HTTP side."""

    default_max_tokens: int = 1024
    """Limit of answers to requests that set none; the context may bound them sooner."""
    max_body_bytes: int = 64 << 20
    api_secret: str | None = None
    """Bearer token that every path but ``/health`` requires, if set."""
    hints_secret: str | None = None
    """Secret with which envelopes and commands about claims must be signed, if set."""


class EngineEndpoints:
    """The handlers; one instance per application."""

    def __init__(
        self,
        service: EngineService,
        encoder: PromptEncoder,
        stop_tokens: frozenset[int],
        options: ServingOptions,
    ) -> None:
        self._service = service
        self._encoder = encoder
        self._stop_tokens = stop_tokens
        self._options = options
        self._model = service.capability.model

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = decode_body(unpacked(await self._read(request)), ChatBody)
        check_common(body, self._model)
        check_chat(body)
        prompt = await run_in_threadpool(
            self._encoder.chat, body.messages, body.tools, body.template_options
        )
        limit = body.max_completion_tokens or body.max_tokens
        top = (body.top_logprobs or 0) if body.logprobs else None
        spec = self._spec(body, prompt, limit, top, f"chatcmpl-{uuid4().hex}")
        head = Head(spec.request.request_id, self._model)
        shape = ChatShape(head, self._encoder.token_text, parse_tools=body.parses_tools)
        asks = message_that_asks(envelope_of(body.custom_params)) is not None
        delivery = Delivery(bool(body.stream), body.include_usage, with_record=asks)
        return await run_request(self._service, request, spec, shape, delivery)

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = decode_body(await self._read(request), CompletionBody)
        check_common(body, self._model)
        check_completion(body)
        prompt = await self._plain_prompt(body.prompt)
        spec = self._spec(body, prompt, body.max_tokens or 16, body.logprobs, f"cmpl-{uuid4().hex}")
        shape = CompletionShape(
            Head(spec.request.request_id, self._model), self._encoder.token_text
        )
        delivery = Delivery(bool(body.stream), body.include_usage)
        return await run_request(self._service, request, spec, shape, delivery)

    async def native(self, request: Request) -> Response:
        """``POST /generate``: tokens for tokens, with any number of log probabilities."""
        body = decode_body(await self._read(request), NativeBody)
        check_native(body)
        prompt = await self._plain_prompt(body.input_ids)
        limit = body.sampling_params.max_new_tokens
        request_id = f"generate-{uuid4().hex}"
        spec = self._spec(body.common, prompt, limit, body.top_logprobs_num, request_id)
        shape = NativeShape(self._stop_tokens)
        return await run_whole(self._service, request, replace(spec, every_token=True), shape)

    async def flush(self, request: Request) -> Response:
        """``POST /flush_cache``: forget all that is cached and retained."""
        if await self._service.flush():
            return JSONResponse({"status": "ok"})
        raise ApiError(409, "the cache can't be flushed while a request runs", code="not_idle")

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the tokens of a prompt or a conversation."""
        body = decode_body(await self._read(request), TokenizeBody)
        if (body.messages is None) == (body.prompt is None):
            raise ApiError(400, "send either messages or prompt", param="messages")
        if body.messages is not None:
            check_messages(body.messages)
            tokens = await run_in_threadpool(
                self._encoder.chat, body.messages, body.tools, body.template_options
            )
        else:
            tokens = await run_in_threadpool(self._encoder.text, body.prompt or "")
        return JSONResponse({"tokens": tokens.tolist(), "count": len(tokens)})

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "leyline",
            "max_model_len": self._service.max_context,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 while the engine serves, else 503."""
        failure = self._service.failure
        if failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "detail": failure}, 503)

    async def capability(self, request: Request) -> Response:
        """Return the handshake document."""
        capability = with_carriage(with_receipts_in_answers(self._service.capability))
        return JSONResponse(msgspec.to_builtins(capability))

    async def receipt(self, request: Request) -> Response:
        """Return the record of one request, by its envelope's ``message_id`` or its own id."""
        record = self._service.records.get(request.path_params["message_id"])
        if record is None:
            raise ApiError(
                404, "no record of that message is kept", param="message_id", code="not_found"
            )
        return JSONResponse(msgspec.to_builtins(record))

    async def claims(self, request: Request) -> Response:
        """``POST`` of one command about claims; signed if proxy and engine share a secret."""
        body = await self._signed(request, MAX_COMMAND_BYTES)
        reply = await self._service.claims(decode_claim_command(body))
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def ledger(self, request: Request) -> Response:
        """``POST`` of one question about the ledger; signed like a command."""
        question = decode_ledger_question(await self._signed(request, MAX_QUESTION_BYTES))
        answer = await self._service.ledger(question)
        if answer is None:
            raise ApiError(404, "this engine takes no questions", code="not_found")
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _signed(self, request: Request, most: int) -> bytes:
        """Return the body of a command of the proxy's."""
        body = await self._read(request, most)
        secret = self._options.hints_secret
        given = request.headers.get(SIGNATURE_HEADER, "")
        if secret is not None and not is_signature_of(given, body, secret):
            raise ApiError(
                403,
                f"the header {SIGNATURE_HEADER} is not the proxy's signature of this command",
                kind="permission_error",
                code="invalid_signature",
            )
        return body

    async def renderer(self, request: Request) -> Response:
        """Return chat template, special tokens and tokenizer."""
        return JSONResponse(await run_in_threadpool(self._encoder.renderer_document))

    def _spec(
        self,
        body: CommonBody,
        prompt: array[int],
        limit: int | None,
        top_logprobs: int | None,
        request_id: str,
    ) -> JobSpec:
        hints: Hints = read_hints(body.custom_params, self._options.hints_secret)
        if hints.forgets:
            self._encoder.forget()
        if limit is None:
            room = self._service.max_context - len(prompt)
            limit = max(1, min(self._options.default_max_tokens, room))
        sampling: SamplingParams = body.sampling(self._service.capability.vocab_size, top_logprobs)
        return JobSpec(
            request=GenerationRequest(
                request_id=hints.message_id or request_id,
                tokens=prompt,
                payload=hints.payload,
                reuse=hints.reuse,
                prove=hints.prove,
                skipped=hints.skipped,
                max_new_tokens=limit,
                admits=not hints.nameless,
            ),
            sampling=sampling,
            stops=body.stops,
            stop_tokens=frozenset() if body.ignore_eos else self._stop_tokens,
            invalid=hints.invalid,
            invalid_detail=hints.detail,
            enveloped=hints.message_id is not None or hints.invalid is not None,
        )

    async def _plain_prompt(self, prompt: str | list[Any]) -> array[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await run_in_threadpool(self._encoder.text, prompt)
        vocab = self._service.capability.vocab_size
        if not all(type(token) is int and 0 <= token < vocab for token in prompt):
            raise ApiError(
                400,
                f"prompt must be one text or one list of token ids below {vocab}",
                param="prompt",
            )
        return array("q", prompt)

    async def _read(self, request: Request, most: int | None = None) -> bytes:
        most = self._options.max_body_bytes if most is None else most
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise ApiError(
                    413,
                    f"the request body exceeds {most} bytes",
                    code="body_too_large",
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def guarded(self, handler: Handler) -> Handler:
        """Return a handler that asks for the secret and turns errors into OpenAI's shape."""

        async def guard(request: Request) -> Response:
            try:
                self._authorize(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                answer = to_api_error(error)
                if answer.status == 500:
                    log.exception("%s failed", request.url.path)
                return answer.response()

        return guard

    def _authorize(self, request: Request) -> None:
        secret = self._options.api_secret
        if secret is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {secret}".encode()):
            raise ApiError(
                401,
                "this engine wants its secret as bearer token",
                kind="authentication_error",
                code="invalid_api_key",
            )


def build_app(
    service: EngineService,
    encoder: PromptEncoder,
    stop_tokens: frozenset[int],
    registry: CollectorRegistry,
    options: ServingOptions | None = None,
) -> Starlette:
    """Return the application over a running service.

    Args:
        registry: the registry that ``/metrics`` shows.

    Its lifespan, or ``app.state.shutdown()``, stops the service.
    """
    endpoints = EngineEndpoints(service, encoder, stop_tokens, options or ServingOptions())
    guarded = endpoints.guarded

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(endpoints.chat), methods=["POST"]),
            Route("/v1/completions", guarded(endpoints.completions), methods=["POST"]),
            Route("/generate", guarded(endpoints.native), methods=["POST"]),
            Route("/flush_cache", guarded(endpoints.flush), methods=["POST"]),
            Route("/v1/models", guarded(endpoints.models)),
            Route("/tokenize", guarded(endpoints.tokenize), methods=["POST"]),
            Route("/health", endpoints.health),
            Route("/metrics", guarded(partial(metrics_response, registry))),
            Route(CAPABILITY_PATH, guarded(endpoints.capability)),
            Route(RECEIPT_PATH, guarded(endpoints.receipt)),
            Route(RENDERER_PATH, guarded(endpoints.renderer)),
            Route(CLAIMS_PATH, guarded(endpoints.claims), methods=["POST"]),
            Route(LEDGER_PATH, guarded(endpoints.ledger), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.shutdown = service.close
    return app


async def metrics_response(registry: CollectorRegistry, request: Request) -> Response:
    """``GET /metrics``, as OpenMetrics if ``Accept`` asks for it."""
    try:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
    except ValueError:  # an unknown version
        encode, content_type = choose_encoder("")
    return Response(encode(registry), headers={"content-type": content_type})


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = f"{request.method} {request.url.path} isn't served here"
    return ApiError(status, detail, code="not_found" if status == 404 else None).response()
