"""The servers of a process: the proxy's port, and the admin port where there is one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ..settings import Settings
from .connection import ConnectionLimits, limited_protocol

_ADMIN_CONNECTIONS = 64
_KEEP_ALIVE_S = 75


def server_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """How the proxy is served."""
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        max_header_bytes=settings.max_header_bytes,
        max_headers=settings.max_headers,
        header_timeout_s=settings.header_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=limited_protocol(limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


def admin_config(app: ASGIApp) -> uvicorn.Config:
    """How the admin API is served."""
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


class ProxyServer(uvicorn.Server):
    """Serves the proxy, and beside it the admin API, in one event loop.

    Args:
        beside: how the admin API is served, and where.
        started: called once both can be reached.
        stopping: called at the first signal to stop.
        delay_s: from that signal until the port is closed.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        beside: tuple[uvicorn.Config, socket.socket] | None = None,
        started: Callable[[], None] = lambda: None,
        stopping: Callable[[], None] = lambda: None,
        delay_s: float = 0.0,
    ) -> None:
        super().__init__(config)
        self._beside = beside
        self._when_started = started
        self._when_stopping = stopping
        self._delay_s = delay_s
        self._closes_at: float | None = None
        self._admin: tuple[_QuietServer, asyncio.Task[None]] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start both."""
        await super().startup(sockets)
        if not self.started:
            return
        if self._beside is not None:
            config, sock = self._beside
            server = _QuietServer(config)
            self._admin = server, asyncio.create_task(server.serve(sockets=[sock]))
        self._when_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop when the delay is over; a second signal stops at once."""
        if self._closes_at is not None or not self._delay_s:
            self._when_stopping()
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._closes_at = time.monotonic() + self._delay_s
        self._when_stopping()

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop now."""
        if self._closes_at is not None and time.monotonic() >= self._closes_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop both; the admin API last, so that a graceful shutdown can be watched."""
        try:
            await super().shutdown(sockets)
        finally:
            if self._admin is not None:
                server, task = self._admin
                server.should_exit = True
                await asyncio.wait((task,))


class _QuietServer(uvicorn.Server):
    """A server that leaves the process's signals to another."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield
