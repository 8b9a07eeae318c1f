"""The application, one per process. :class:`~.wiring.services.Services` holds all its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from importlib.metadata import version

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..hub.fleet import connected
from ..settings import Settings
from ..settings.other_paths import passing_paths
from ..telemetry.exposition import enter
from ..telemetry.processes import ALONE
from ..telemetry.tracing import Tracing
from ..upstream.embedded import lifespan_of
from ..wiring.services import Services, build_services
from ..wiring.workers import Worker
from .api import Api
from .early_answers import EarlyAnswers
from .errors import install_error_handlers
from .guard import guard_against_pages
from .metrics import keep_observing
from .openapi import describe
from .response_socket import ResponseSockets
from .routes import APIS, install_routes
from .turn import TurnExchange

_READ = frozenset({"/", "/healthz", "/readyz", "/metrics", "/v1/models"})


class HeadRequests:
    """ASGI middleware that answers ``HEAD`` like ``GET``; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one ASGI connection on."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if "path" in scope else ""
        if scope["type"] == "http" and scope["method"] == "HEAD" and path in _READ:
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class TurnDispatch:
    """ASGI middleware that sends a POST to an API's path for turns straight to its exchange, and
    takes all WebSocket connections.

    The routes of these paths stay, for the API's description and for other methods. An exchange
    answers every error itself, so that it bypasses none of the framework's handlers.

    Args:
        apis: APIs by path.
    """

    def __init__(self, app: ASGIApp, services: Services, apis: Mapping[str, Api]) -> None:
        self._app = app
        self._services = services
        self._apis = apis
        self._sockets = ResponseSockets(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch one ASGI connection."""
        if scope["type"] == "http" and scope["method"] == "POST":
            api = self._apis.get(scope["path"])
            if api is not None:
                request = Request(scope, receive, send)
                await TurnExchange(self._services, request, api)(scope, receive, send)
                return
        elif scope["type"] == "websocket":
            await self._sockets(scope, receive, send)
            return
        await self._app(scope, receive, send)


def create_app(
    settings: Settings,
    *,
    engine_app: ASGIApp | None = None,
    tracing: Tracing | None = None,
    worker: Worker | None = None,
) -> FastAPI:
    """Return the proxy as an ASGI application.

    With ``engine_app``, requests go to that application in this process, and its lifespan runs
    with the proxy's. Without, they go to ``settings.upstream``. ``tracing`` replaces the settings'
    tracing. A ``worker`` shares the proxy's state with others.

    Raises:
        leyline_policies.PolicyError: an unknown policy or a bad parameter.
        leyline_proxy.request.parse.OptionError: a bad rule for undeclared edits.
        ValueError: neither an engine nor an upstream; an unreadable key file.
    """
    services = build_services(settings, engine_app, tracing, worker)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with _alive(services, engine_app, worker):
            yield

    app = FastAPI(
        title="Leyline",
        version=version("leyline-kv"),
        summary="An OpenAI-compatible proxy that keeps the KV cache when agents edit history.",
        lifespan=lifespan,
        # FastAPI's pages load scripts from a content delivery network.
        docs_url=None,
        redoc_url=None,
        # FastAPI's records would quote exceptions, which may quote prompts.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.services = services
    install_error_handlers(app, passing_paths(settings.pass_through))
    install_routes(app, services)
    app.add_middleware(HeadRequests)
    app.add_middleware(TurnDispatch, services=services, apis=APIS)
    if services.tenants.open:
        guard_against_pages(app, settings, settings.host)
    app.add_middleware(EarlyAnswers)
    describe(app)
    return app


@asynccontextmanager
async def _alive(
    services: Services, engine_app: ASGIApp | None, worker: Worker | None
) -> AsyncIterator[None]:
    """Run everything beside the requests; what ends last comes first."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(services.tracing.aclose)
        if worker is not None:
            await stack.enter_async_context(connected(worker.link))
        if engine_app is not None:
            await stack.enter_async_context(lifespan_of(engine_app))
        await stack.enter_async_context(services.audit.running())
        stack.push_async_callback(services.store.aclose)
        await services.store.connect()
        stack.push_async_callback(services.pool.aclose)
        stack.push_async_callback(services.evictions.aclose)
        stack.push_async_callback(services.budgets.aclose)
        stack.push_async_callback(services.erasures.aclose)
        stack.push_async_callback(services.ends.aclose)
        await stack.enter_async_context(_handshaking(services))
        await stack.enter_async_context(_running(services.store.run()))
        await stack.enter_async_context(_running(services.erasures.run()))
        enter(f"worker {worker.link.index}" if worker is not None else ALONE)
        await stack.enter_async_context(_running(keep_observing(services)))
        await stack.enter_async_context(_running(services.budgets.run()))
        for watch in services.claim_watches:
            await stack.enter_async_context(_running(watch.run()))
        if services.fleet is not None:
            services.fleet.begin()
            await stack.enter_async_context(_running(services.fleet.run()))
        if services.tenants.tokens is not None:
            await stack.enter_async_context(_running(services.tenants.tokens.keys.run()))
        for context in services.tls:
            await stack.enter_async_context(_running(context.run()))
        if services.key_file is not None:
            await stack.enter_async_context(_running(services.key_file.run()))
        if services.policy_file is not None:
            await stack.enter_async_context(_running(services.policy_file.run()))
        yield


@asynccontextmanager
async def _handshaking(services: Services) -> AsyncIterator[None]:
    """Query the engines once before serving, so that the first ``/readyz`` is right, then keep
    querying them. New ones get their warm start meanwhile. Stores of texts are open."""
    warm_start, recall = services.warm_start, services.recall
    async with (
        recall.running() if recall is not None else nullcontext(),
        warm_start.running() if warm_start is not None else nullcontext(),
    ):
        await services.pool.refresh()
        async with _running(services.pool.run()):
            yield


@asynccontextmanager
async def _running(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run a task, and cancel it on exit."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
