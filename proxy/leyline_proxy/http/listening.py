"""A listener that takes connections, and stops without resetting any.

The loops' own servers aren't enough. libuv, and so uvloop, takes one connection per turn of the
loop: five a second when turns are full of work. Both loops close a listening socket with
connections that the kernel has already made, which resets them.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

_AT_ONCE = 256
"""Connections taken in one turn of the loop."""
_RETRY_S = 1.0
"""Seconds until the listener takes connections again after there were too many files."""
_LAST_TURNS = 64
"""Most rounds of taking connections at the end."""
_HANDSHAKE_S = 0.1
"""Seconds to wait for the third packet of clients that have sent their first."""

_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_SO_ATTACH_FILTER = 26
_NO_SYN = (
    (0x30, 0, 0, 13),  # load the byte of a TCP header that has its flags
    (0x54, 0, 0, 0x12),  # of these SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
)
"""A program of the kernel's packet filter: code, jump if true, jump if false, operand."""


Connect = Callable[[socket.socket], Awaitable[object]]
"""Gives a new connection to who serves it, and takes the socket over."""


class Door(Protocol):
    """A source of connections."""

    def start(self) -> None:
        """Take connections from now on."""

    async def close(self) -> None:
        """Take the connections that have come, then stop."""


class Listener:
    """A :class:`Door` for one socket.

    Args:
        sock: bound, and perhaps listening. The listener owns it from here on.
    """

    def __init__(self, sock: socket.socket, connect: Connect, backlog: int) -> None:
        self._sock = sock
        self._give = connect
        self._backlog = backlog
        self._loop = asyncio.get_running_loop()
        self._taking: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take connections from now on."""
        self._sock.setblocking(False)
        self._sock.listen(self._backlog)
        self._watch()

    async def close(self) -> None:
        """Take the connections that have come, then stop. Later ones are refused."""
        if _refuse_new(self._sock):
            await asyncio.sleep(_HANDSHAKE_S)
        for _ in range(_LAST_TURNS):
            if not self._take():
                break
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._taking:
            await asyncio.wait(self._taking)

    def _watch(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._take)

    def _take(self) -> bool:
        """Take waiting connections. Return True if more may wait."""
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._loop.remove_reader(self._sock)
                    self._retry = self._retry or self._loop.call_later(_RETRY_S, self._watch)
                    return False
                continue  # this client has left
            sock.setblocking(False)
            task = self._loop.create_task(self._connect(sock))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)
        return True

    async def _connect(self, sock: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            await self._give(sock)


def _refuse_new(sock: socket.socket) -> bool:
    """Have the kernel ignore new clients. Their systems try again, and are refused once the socket
    is closed. Clients that have begun to connect can finish.

    Returns:
        False if the system can't do that. A connection made between the last accept and the
        socket's close is then reset.
    """
    if sys.platform != "linux" or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    program = b"".join(struct.pack("HBBI", *step) for step in _NO_SYN)
    held = ctypes.create_string_buffer(program, len(program))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(_NO_SYN), ctypes.addressof(held)),
        )
    except OSError:
        return False
    return True
