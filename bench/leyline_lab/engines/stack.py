"""A proxy in this process, on a free loopback port, in front of the embedded engine or a server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline_engine.contract import CAPABILITY_PATH
from leyline_policies import PolicyError
from leyline_proxy.http.app import create_app
from leyline_proxy.model.fields import OptionError
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import build_directory
from leyline_proxy.upstream.embedded import EngineUnavailable, create_embedded_engine

from ..errors import AccountError, StackError
from .remote import Forwarder, empty_cache

CHAT_PATH = "/v1/chat/completions"
START_S = 600.0
"""Longest wait for a model to load."""
STOP_S = 30.0
_RENDERED = ("model", "messages", "tools", "chat_template_kwargs")
"""Members of a request on which its prompt depends."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A running engine that may serve others, too: a stack is a tenant of its own there."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    hints_secret: str | None = field(default=None, repr=False)
    isolates: bool = False
    """True if it keeps the KV of tenants apart; otherwise its cache is emptied for each stack."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers that it asks for."""
        return _bearer(self.api_key) if self.api_key is not None else {}

    def settings(self, key: str) -> dict[str, Any]:
        """Return the proxy's settings for a tenant that no other stack has.

        Args:
            key: the tenant's API key.
        """
        return {
            "upstream": self.url,
            "upstream_api_key": self.api_key,
            "hints_secret": self.hints_secret,
            "cache_scope": "tenant" if self.isolates else "shared",
            "tenants": {f"stack-{token_hex(8)}": {"api_keys": [key]}},
        }


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The common settings of the arms of one replay."""

    policy: str | None = None
    undeclared: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    pool_tokens: int | None = None
    page_tokens: int | None = None
    """Tokens per page of an engine that is embedded; None: 1."""
    fidelity_profile: Path | None = None
    recall: bool = False
    """True to keep evicted texts, and to offer the model their recall."""
    engine_url: str | None = None
    """A server whose cache is flushed for each stack; None embeds an engine."""
    served: ServedEngine | None = None
    """A running engine to put the proxy in front of, without a tap; wins over the others."""

    def settings(self, *, splice: bool, key: str = "") -> Settings:
        """Return the proxy's settings, without any from the environment.

        Args:
            key: API key of the stack's tenant at a served engine.
        """
        defaults = {
            name: member.get_default(call_default_factory=True, validated_data={})
            for name, member in Settings.model_fields.items()
        }
        chosen = {
            "port": 0,
            "engine_options": self.engine_options(),
            "model": self.model,
            "policy": self.policy,
            "undeclared": dict(self.undeclared),
            "splice": splice,
            "fidelity_profile": self.fidelity_profile,
            "recall": "on" if self.recall else "off",
            # Every arm sends the same prompts.
            "edit_timing": "now",
            "log_level": "warning",
        }
        if self.served is not None:
            chosen |= self.served.settings(key)
        return Settings(**(defaults | chosen))

    def engine_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the engine's factory."""
        options: dict[str, Any] = {"model": self.model}
        if self.pool_tokens is not None:
            options["pool_tokens"] = self.pool_tokens
        if self.page_tokens is not None:
            options["page_tokens"] = self.page_tokens
        return options


class PromptTap:
    """Records the last chat request on its way to the engine.

    Unchanged tokens are counted in the served prompts, after policies, so they are read at the
    engine.
    """

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine
        self.last: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http" or scope["path"] != CHAT_PATH:
            await self._engine(scope, receive, send)
            return
        body = bytearray()

        async def listen() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    self.last = bytes(body)
            return message

        await self._engine(scope, listen, send)

    async def tokens(self, more: Sequence[Mapping[str, Any]] = ()) -> array[int]:
        """Return the token ids of the last prompt, by the engine's own ``/tokenize``.

        Args:
            more: messages that are put after those of the prompt.

        Raises:
            AccountError: no request came through, or the engine does not tokenise it.
        """
        if self.last is None:
            raise AccountError("the proxy sent no chat request to the engine")
        sent = json.loads(self.last)
        body = {key: sent[key] for key in _RENDERED if sent.get(key)}
        body["messages"] = [*body["messages"], *more]
        transport = httpx.ASGITransport(app=self._engine)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.post("/tokenize", json=body)
        if answer.status_code != httpx.codes.OK:
            raise AccountError(f"the engine's /tokenize answers {answer.status_code}")
        return array("q", answer.json()["tokens"])


class Stack:
    """A running stack."""

    def __init__(
        self,
        server: uvicorn.Server,
        thread: threading.Thread,
        port: int,
        headers: Mapping[str, str],
    ) -> None:
        self._server: uvicorn.Server | None = server
        self._thread = thread
        self.origin = f"http://127.0.0.1:{port}"
        self.headers = headers
        """Headers that requests need."""
        self.tap: PromptTap | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def base_url(self) -> str:
        """The OpenAI base URL."""
        return f"{self.origin}/v1"

    def attach(self, tap: PromptTap, loop: asyncio.AbstractEventLoop) -> None:
        """Set the tap and the engine's event loop."""
        self.tap, self._loop = tap, loop

    def last_prompt(self, more: Sequence[Mapping[str, Any]] = ()) -> array[int]:
        """Return the token ids of the last served prompt. See :meth:`PromptTap.tokens`."""
        if self.tap is None or self._loop is None:
            raise StackError("the stack has no tap, or is not running")
        return asyncio.run_coroutine_threadsafe(self.tap.tokens(more), self._loop).result(60)

    def page_tokens(self) -> int:
        """Return the tokens of one of the engine's pages; 1 if it doesn't say."""
        answer = httpx.get(f"{self.origin}{CAPABILITY_PATH}", headers=dict(self.headers))
        kv = answer.json().get("kv") if answer.is_success else None
        pages = kv.get("page_tokens") if isinstance(kv, dict) else None
        return pages if isinstance(pages, int) and pages > 0 else 1

    def stop(self) -> None:
        """Stop the server, wait for its thread, and let go of the engine, which holds KV."""
        server, self._server, self.tap = self._server, None, None
        if server is None:
            return
        server.should_exit = True
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            server.force_exit = True
            self._thread.join(STOP_S)


@contextmanager
def running_stack(options: StackOptions, *, splice: bool) -> Iterator[Stack]:
    """Run a fresh stack, ready for requests, and stop it at the end.

    Raises:
        StackError: the engine cannot be created, or the stack is not ready in time.
    """
    key = token_hex(16)
    settings = options.settings(splice=splice, key=key)
    _check_policies(settings)  # before the engine, which may take long to load
    tap = PromptTap(_engine(options)) if options.served is None else None
    if options.served is not None and not options.served.isolates:
        empty_cache(options.served.url, options.served.headers)
    server = uvicorn.Server(
        uvicorn.Config(create_app(settings, engine_app=tap), lifespan="on", log_config=None)
    )
    headers = _bearer(key) if options.served is not None else {}
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        thread, stack = _start(server, listener, tap, headers)
        try:
            _wait_ready(stack, server, thread)
            yield stack
        finally:
            stack.stop()


def _check_policies(settings: Settings) -> None:
    try:
        build_directory(settings)
    except (PolicyError, OptionError, ValueError) as error:
        raise StackError(str(error)) from error


def _engine(options: StackOptions) -> ASGIApp:
    if options.engine_url is not None:
        empty_cache(options.engine_url, {})
        return Forwarder(options.engine_url)
    try:
        return create_embedded_engine("replay", options.engine_options())
    except EngineUnavailable as error:
        raise StackError(str(error)) from error
    except Exception as error:  # loading a model may raise any error of the engine
        raise StackError(f"the engine cannot be made: {error}") from error


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _start(
    server: uvicorn.Server,
    listener: socket.socket,
    tap: PromptTap | None,
    headers: Mapping[str, str],
) -> tuple[threading.Thread, Stack]:
    loops: list[asyncio.AbstractEventLoop] = []
    entered = threading.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        entered.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="leyline-replay-stack")
    thread.start()
    entered.wait(STOP_S)
    stack = Stack(server, thread, listener.getsockname()[1], headers)
    if tap is not None:
        stack.attach(tap, loops[0])
    return thread, stack


def _wait_ready(stack: Stack, server: uvicorn.Server, thread: threading.Thread) -> None:
    """Wait until ``/readyz`` reports success."""
    deadline = time.monotonic() + START_S
    said = "it did not start"
    with httpx.Client(base_url=stack.origin, timeout=10) as client:
        while time.monotonic() < deadline:
            if not thread.is_alive():
                raise StackError("the stack stopped while it was starting")
            if server.started:
                answer = client.get("/readyz")
                if answer.status_code == httpx.codes.OK:
                    return
                said = f"/readyz answers {answer.status_code}"
            time.sleep(0.05)
    raise StackError(f"the stack is not ready after {START_S:.0f} s: {said}")
