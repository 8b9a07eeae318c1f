"""Leyline's documents on vLLM's own HTTP application, for callers with vLLM's own API key.

``EngineHttp`` lives in the process that serves HTTP: it opens the channel when vLLM has made its
configuration, before the engine's processes start, and joins vLLM's endpoint plugins, which add
routes when the engine runs. Where vLLM serves from other processes (``--api-server-count``, the
Rust front end), the routes are missing, and the proxy takes the engine for one that doesn't splice.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial, wraps
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from leyline_engine.admit.packed_hints import hints_secret
from leyline_engine.contract import TOKENS_PATH, ChatDialect, Reason
from leyline_engine.metrics import PrometheusMetrics
from leyline_engine.server.answering import AnsweringWithRecords
from leyline_engine.server.channel import ENDPOINT_VARIABLE, ReceiptChannel
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage
from leyline_engine.server.endpoints import Endpoints, NoRendererError, special_tokens_of
from leyline_engine.server.leaving import LeavingEngine
from leyline_engine.server.unpacking import Unpacking
from leyline_engine.vllm.control import CONTROL_METHOD
from leyline_engine.vllm.server.carrying import carry_envelopes


def renderer_document(state: Any) -> dict[str, Any]:
    """Return the chat renderer's parts and arguments.

    Args:
        state: the state of vLLM's application, once it has begun to serve.

    Raises:
        NoRendererError: vLLM renders with code of its own, or has no fast tokenizer.
    """
    from vllm.renderers.hf import (
        HfRenderer,
        resolve_chat_template,
        resolve_chat_template_content_format,
    )

    online, config = state.online_renderer, state.online_renderer.model_config
    if online.use_harmony or type(online.renderer) is not HfRenderer:
        raise NoRendererError("this engine renders chats without a Jinja template")
    tokenizer = online.renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoRendererError("this engine has no fast tokenizer to show")
    some: tuple[Any, ...] = (None, [{}])
    plain, with_tools = (
        resolve_chat_template(tokenizer, online.chat_template, tools, model_config=config)
        for tools in some
    )
    if plain is None or plain != with_tools:
        raise NoRendererError("this engine has no chat template, or another one for tools")
    return {
        "chat_template": plain,
        "special_tokens": special_tokens_of(tokenizer),
        "tokenizer_json": backend.to_str(),
        "dialect": ChatDialect.VLLM,
        "takes_parts": resolve_chat_template_content_format(
            online.chat_template,
            None,
            online.chat_template_content_format,
            tokenizer,
            model_config=config,
        )
        == "openai",
        "template_kwargs": dict(online.default_chat_template_kwargs),
        "withholds_tools": bool(online.exclude_tools_when_tool_choice_none),
        "tokens_path": TOKENS_PATH,
    }


async def answer_with_tokens(state: Any, request: Request) -> Response:
    """Answer a chat request with its prompt's tokens, whether or not its tools may be called.

    vLLM's own errors give the answer to what it refuses.

    Args:
        state: see :func:`renderer_document`.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    online = state.online_renderer
    chat = ChatCompletionRequest.model_validate(json.loads(await request.body()))
    refused = online.validate_chat_template(
        chat.chat_template, chat.chat_template_kwargs, online.trust_request_chat_template
    )
    if refused is not None:
        return JSONResponse(refused.model_dump(), refused.error.code)
    withheld = chat.tool_choice == "none" and online.exclude_tools_when_tool_choice_none
    tools = None if withheld or not chat.tools else [tool.model_dump() for tool in chat.tools]
    _, (prompt,) = await online.preprocess_chat(
        chat,
        chat.messages,
        default_template=online.chat_template,
        default_template_content_format=online.chat_template_content_format,
        default_template_kwargs=online.default_chat_template_kwargs,
        tool_dicts=tools,
        skip_mm_cache=True,
    )
    return JSONResponse({"tokens": list(prompt["prompt_token_ids"])})


_PREFIX = f"{Reason.REFUSED_BY_CLAIM.value}: "


def explaining_refusals(
    generate: Callable[..., AsyncIterator[Any]],
) -> Callable[..., AsyncIterator[Any]]:
    """Wrap the generation of vLLM's client of its engine.

    Raises:
        RetryableRequestError: from the wrapped generation, if the scheduler refused the request.
    """
    from vllm.exceptions import RetryableRequestError

    @wraps(generate)
    async def generated(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for output in generate(*args, **kwargs):
            for each in output.outputs if output.finished else ():
                if each.finish_reason == "error" and str(each.stop_reason).startswith(_PREFIX):
                    raise RetryableRequestError(str(each.stop_reason))
            yield output

    return generated


log = logging.getLogger(__name__)

_ARGUMENTS = "vllm.engine.arg_utils"


def register_http() -> None:
    """Hook into this process's HTTP server, should it ever start one.

    Does nothing in the processes that a server with a channel has started, and in others that don't
    read a server's arguments.
    """
    if ENDPOINT_VARIABLE in os.environ or _ARGUMENTS not in sys.modules:
        return
    from vllm import plugins
    from vllm.engine.arg_utils import EngineArgs

    http = EngineHttp()
    EngineArgs.create_engine_config = http.opening(EngineArgs.create_engine_config)
    plugins.load_endpoint_plugins = http.joining(plugins.load_endpoint_plugins)


class EngineHttp:
    """The hooks of the serving process, and their common state; also vLLM's ``EndpointPlugin``."""

    name = "leyline"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._channel: ReceiptChannel | None = None
        self._replicas = 1
        self._client: Any = None
        self._state: Any = None
        self._leaving = False

    def opening(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap vLLM's making of its configuration: the channel opens after it."""

        @wraps(create)
        def created(
            args: Any, usage_context: Any = None, headless: bool = False, **more: Any
        ) -> Any:
            config = create(args, usage_context, headless, **more)
            if getattr(usage_context, "value", "") == "OPENAI_API_SERVER":
                _logging_failures(self.open)(config.parallel_config, headless)
            return config

        return created

    def joining(self, load: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Wrap vLLM's loading of its endpoint plugins: this is one of them."""

        @wraps(load)
        def loaded(supported_tasks: Any = None) -> list[Any]:
            # Processes started from now on don't belong to this engine.
            os.environ.pop(ENDPOINT_VARIABLE, None)
            others = load(supported_tasks)
            serves = self._channel is not None and "generate" in (supported_tasks or ())
            return [*others, self] if serves else others

        return loaded

    def open(self, parallel: Any, headless: bool) -> None:
        """Open the channel; the processes that vLLM starts next inherit its address.

        Args:
            parallel: vLLM's configuration of its processes.
            headless: True if this node serves no HTTP.
        """
        os.environ.pop(ENDPOINT_VARIABLE, None)
        if headless:
            log.warning("this node serves no HTTP: it listens for no receipts")
            return
        if parallel._api_process_count > 1 or parallel._api_process_rank < 0:
            log.warning(
                "Leyline's routes need --api-server-count 1 and vLLM's Python front end: none are "
                "served"
            )
            return
        if self._channel is None:
            self._channel = ReceiptChannel(metrics=PrometheusMetrics())
            atexit.register(self._channel.close)
        local = parallel.local_engines_only
        self._replicas = int(
            parallel.data_parallel_size_local if local else parallel.data_parallel_size
        )
        os.environ[ENDPOINT_VARIABLE] = self._channel.endpoint

    def attach_router(self, app: Any) -> None:
        """Add the routes, and what completes and refuses answers; see vLLM's ``EndpointPlugin``."""
        _logging_failures(self._attach)(app)

    def _attach(self, app: Any) -> None:
        assert self._channel is not None  # noqa: S101 - else it isn't loaded
        endpoints = Endpoints(
            self._channel,
            self._send,
            lambda: renderer_document(self._state),
            replicas=self._replicas,
            secret=hints_secret(),
        )
        guard = Middleware(Guarded, keys=_keys_of(app.state.args))
        app.router.routes.extend(endpoints.routes(middleware=[guard]))
        tokens = Route(TOKENS_PATH, self._tokens, methods=["POST"], middleware=[guard])
        app.router.routes.append(tokens)
        app.add_middleware(AnsweringWithRecords, records=self._channel.records)
        app.add_middleware(Unpacking)
        app.add_middleware(LeavingEngine, leaving=lambda: self._leaving)
        carry_envelopes()

    async def init_state(self, engine_client: Any, state: Any, _: Any) -> None:
        """Take vLLM's client of its engine; see vLLM's ``EndpointPlugin``."""
        self._client, self._state = engine_client, state
        engine_client.generate = explaining_refusals(engine_client.generate)
        engine_client.shutdown = partial(self._shut_down, engine_client.shutdown)

    def _shut_down(self, shut_down: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # vLLM serves HTTP on until the engine has stopped.
        self._leaving = True
        return shut_down(*args, **kwargs)

    async def _tokens(self, request: Request) -> Response:
        return await answer_with_tokens(self._state, request)

    async def _send(self, message: ClaimMessage) -> ClaimAnswer:
        """Send a message to the engine core; :class:`~.claim_clock.ClaimClock` numbers them."""
        core, text = self._client.engine_core, msgspec.json.encode(message).decode()
        if self._replicas == 1:
            texts = [await core.call_utility_async(CONTROL_METHOD, text)]
        else:
            texts = await core.call_utility_all_async(CONTROL_METHOD, text)
        answers = [msgspec.json.decode(each, type=ClaimAnswer) for each in texts]
        return next((each for each in answers if each.ledger is not None), answers[0])


class Guarded:
    """ASGI middleware: asks for one of the API keys, where vLLM guards only its own paths.

    Args:
        keys: the server's keys; none lets everybody in.
    """

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        self._app = app
        self._check = AuthenticationMiddleware(app, keys) if keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI."""
        if self._check is None or self._check.verify_token(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)


def _keys_of(args: Any) -> list[str]:
    """Return the API keys as vLLM chooses them."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def _logging_failures(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose failure leaves vLLM running as it would without it."""

    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            log.exception("Leyline's hook %s failed", hook.__name__)

    return guarded
