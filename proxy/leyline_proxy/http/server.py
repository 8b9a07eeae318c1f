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
from .handshakes import Handshakes
from .listening import Connect, Door, Listener
from .socket_protocol import BESIDE_BODY, limited_socket

_ADMIN_CONNECTIONS = 64
_KEEP_ALIVE_S = 75
_BACKLOG = 2048

DoorOf = Callable[[Connect], Door]
"""Returns a door whose connections are given on; called within the event loop."""

HandshakesOf = Callable[[int], Handshakes]
"""Returns the TLS handshakes of a port, given their maximum number."""


def listening(sock: socket.socket) -> DoorOf:
    """Return the door of a socket that this process alone has."""
    return lambda connect: Listener(sock, connect, _BACKLOG)


class _Server(uvicorn.Server):
    """A server that takes connections through a :class:`Door`, and leaves none open.

    Args:
        handshakes: None for plain HTTP.
    """

    def __init__(self, config: uvicorn.Config, door: DoorOf, handshakes: Handshakes | None) -> None:
        super().__init__(config)
        self._door_of = door
        self._handshakes = handshakes
        self._door: Door | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then take connections."""
        await super().startup([])
        if self.started:
            self._door = self._door_of(self._connect)
            self._door.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take waiting connections, then no more, finish requests under way, abort the rest."""
        try:
            if self._handshakes is not None:
                self._handshakes.hurry()
            if self._door is not None:
                await self._door.close()
            await super().shutdown([])
        finally:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            # The next turn of the loop reports their ends; some loops complain about open ones.
            await asyncio.sleep(0)

    async def _connect(self, sock: socket.socket) -> None:
        if self._handshakes is not None:
            await self._handshakes.connect(self._protocol, sock)
        else:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, sock)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class ProxyServer(_Server):
    """Serves the proxy and the admin API in one event loop.

    Args:
        door: gives it its connections.
        shutdown: set at the first signal to stop.
        beside: the admin API and its door.
        handshakes: returns those of either port; None for plain HTTP.
        started: called once both can be reached.
        ticked: called ten times a second with the number of open connections.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        shutdown: Shutdown,
        *,
        door: DoorOf,
        beside: tuple[ASGIApp, DoorOf] | None = None,
        handshakes: HandshakesOf | None = None,
        started: Callable[[], None] = lambda: None,
        ticked: Callable[[int], None] = lambda _: None,
    ) -> None:
        own = handshakes(settings.max_connections) if handshakes is not None else None
        super().__init__(_config(app, settings, shutdown), door, own)
        self._handshakes_of = handshakes
        self._ticked = ticked
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
            app, door = self._beside
            of = self._handshakes_of
            handshakes = of(_ADMIN_CONNECTIONS) if of is not None else None
            server = _AdminServer(_admin_config(app), door, handshakes)
            self._admin = server, asyncio.create_task(server.serve(sockets=[]))
        self._when_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop after the delay. A second signal, or one from the keyboard, stops at once."""
        first, self._begun.begun = not self._begun.begun, True
        if first and self._delay_s and sig != signal.SIGINT:
            self._captured_signals.append(sig)
            self._closes_at = time.monotonic() + self._delay_s
        else:
            super().handle_exit(sig, frame)

    def leave(self) -> None:
        """Stop at once, as if by a signal."""
        self._begun.begun = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop now."""
        self._ticked(len(self.server_state.connections))
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
        ws=limited_socket(settings.stall_timeout_s, settings.body_timeout_s),
        ws_max_size=_largest_body(settings) + BESIDE_BODY,
        # A small frame could unpack to a large one.
        ws_per_message_deflate=False,
        ws_ping_timeout=settings.stall_timeout_s,
        loop=settings.loop,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


def _largest_body(settings: Settings) -> int:
    own = (tenant.max_body_bytes or 0 for tenant in settings.tenants.values())
    return max((settings.max_body_bytes, *own))


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
