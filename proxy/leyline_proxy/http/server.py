"""The servers of a process: the proxy's port, and the admin port if there is one."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ..settings import Settings
from ..shutdown import Shutdown
from .connection import ConnectionLimits, limited_protocol
from .listening import Listener

_ADMIN_CONNECTIONS = 64
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """A server that takes connections with a :class:`Listener`, and leaves none open."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listeners: list[Listener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen."""
        await super().startup([])
        if self.started:
            self._listeners = [
                Listener(sock, self._protocol, self.config.backlog) for sock in sockets or ()
            ]
            for listener in self._listeners:
                listener.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take waiting connections, stop listening, finish requests under way, abort the rest."""
        await asyncio.gather(*(listener.close() for listener in self._listeners))
        try:
            await super().shutdown([])
        finally:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            # The next turn of the loop reports their ends; some loops complain about open ones.
            await asyncio.sleep(0)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class ProxyServer(_Server):
    """Serves the proxy and the admin API in one event loop.

    Args:
        shutdown: set at the first signal to stop.
        beside: the admin API and its socket.
        started: called once both can be reached.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        shutdown: Shutdown,
        *,
        beside: tuple[ASGIApp, socket.socket] | None = None,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(_config(app, settings, shutdown))
        self._begun = shutdown
        self._beside = beside
        self._when_started = started
        self._delay_s = settings.shutdown_delay_s
        self._closes_at: float | None = None
        self._told = False
        self._admin: tuple[_AdminServer, asyncio.Task[None]] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start both servers."""
        await super().startup(sockets)
        if not self.started:
            return
        if self._beside is not None:
            app, sock = self._beside
            server = _AdminServer(_admin_config(app))
            self._admin = server, asyncio.create_task(server.serve(sockets=[sock]))
        self._when_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop after the delay. A second signal, or one from the keyboard, stops at once."""
        first, self._begun.begun = not self._begun.begun, True
        if first and self._delay_s and sig != signal.SIGINT:
            self._captured_signals.append(sig)
            self._closes_at = time.monotonic() + self._delay_s
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop now."""
        if self._begun.begun and not self._told:
            self._told = True
            for connection in list(self.server_state.connections):
                connection.shutdown()
        if self._closes_at is not None and time.monotonic() >= self._closes_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop both servers, the admin API last, so that operators can watch the shutdown."""
        self._begun.begun = True
        try:
            await super().shutdown(sockets)
        finally:
            if self._admin is not None:
                server, task = self._admin
                server.should_exit = True
                await asyncio.wait((task,))


class _AdminServer(_Server):
    """A server that leaves the process's signals to the other one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def _config(app: ASGIApp, settings: Settings, shutdown: Shutdown) -> uvicorn.Config:
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        max_header_bytes=settings.max_header_bytes,
        max_headers=settings.max_headers,
        header_timeout_s=settings.header_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=limited_protocol(limits, shutdown),
        ws="none",
        loop=settings.loop,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


def _admin_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_protocol(ConnectionLimits(max_connections=_ADMIN_CONNECTIONS)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
