"""Connections that the supervisor accepts and hands over to its workers.

With one listening socket in several processes, an idle machine gives nearly all connections to the
process that waits last; with one socket each, a hash of the addresses decides. The supervisor gives
each to the worker with the fewest instead.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Final

from .listening import Connect

PORT: Final = 0
"""A connection to the proxy's port."""
ADMIN: Final = 1
"""A connection to the admin port."""
END: Final = 2
"""No more will come; there is no connection with this message."""

_END_S = 2.0
"""Longest wait for the last connection at the end."""


class Handover:
    """A worker's end: the doors of its ports.

    Args:
        sock: of a pair of Unix sockets, which keeps messages apart.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._connects: dict[int, Connect] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Event | None = None

    def door(self, port: int) -> HandedDoor:
        """Return the door of a port."""
        return HandedDoor(self, port)

    def begin(self, port: int, connect: Connect) -> None:
        """Take a port's connections from now on."""
        self._connects[port] = connect
        if self._ended is None:
            self._ended = asyncio.Event()
            self._sock.setblocking(False)
            asyncio.get_running_loop().add_reader(self._sock, self._take)

    async def finish(self, port: int) -> None:
        """Wait for the port's last connection, and for those under way."""
        if self._ended is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._ended.wait()
        if self._connecting:
            await asyncio.wait(self._connecting)
        del self._connects[port]
        if not self._connects:
            # What is left in the socket is for this worker's successor.
            asyncio.get_running_loop().remove_reader(self._sock)

    def _take(self) -> None:
        try:
            message, files, _, _ = socket.recv_fds(self._sock, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            message, files = b"", []
        assert self._ended is not None  # noqa: S101 - set where the reader is added
        if not message or message[0] == END:
            self._ended.set()
            if not message:  # the supervisor has gone
                asyncio.get_running_loop().remove_reader(self._sock)
            return
        sock = socket.socket(fileno=files[0])
        sock.setblocking(False)
        connect = self._connects.get(message[0])
        if connect is None:
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(_connected(connect, sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)


async def _connected(connect: Connect, sock: socket.socket) -> None:
    with suppress(OSError):  # the client has left
        await connect(sock)


class HandedDoor:
    """A :class:`~.listening.Door` for one port of a worker."""

    def __init__(self, handover: Handover, port: int) -> None:
        self._handover = handover
        self._port = port
        self._connect: Connect | None = None

    def __call__(self, connect: Connect) -> HandedDoor:
        """Return itself, to give connections to ``connect``."""
        self._connect = connect
        return self

    def start(self) -> None:
        """Take connections from now on."""
        assert self._connect is not None  # noqa: S101 - called before
        self._handover.begin(self._port, self._connect)

    async def close(self) -> None:
        """Take the connections that have come, then stop."""
        await self._handover.finish(self._port)
