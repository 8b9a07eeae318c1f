"""Taking connections, and ceasing to take them so that none is reset.

The loops' own servers don't do: libuv, and so uvloop, takes one connection a turn of the loop, five
a second where turns are full of work; and both close a listening socket over connections that the
kernel has made already, which resets them.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

_AT_ONCE = 256
"""Connections that are taken in a turn of the loop."""
_RETRY_S = 1.0
"""Until connections are taken again, once there were too many files."""
_LAST_TURNS = 64
"""Times as many at most are taken at the end."""
_HANDSHAKE_S = 0.1
"""For the third packet of those that have sent their first."""

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


class Listener:
    """Gives each connection that comes a protocol of its own.

    Args:
        sock: bound, and perhaps listening; the listener's from here on.
    """

    def __init__(
        self, sock: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], backlog: int
    ) -> None:
        self._sock = sock
        self._protocol = protocol
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
        """Take those that have come, and then no more: whoever comes now is refused."""
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
        """Take what waits; whether more may wait."""
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
                continue  # this one has gone again
            sock.setblocking(False)
            task = self._loop.create_task(self._connect(sock))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)
        return True

    async def _connect(self, sock: socket.socket) -> None:
        with suppress(OSError):  # it has gone meanwhile
            await self._loop.connect_accepted_socket(self._protocol, sock)


def _refuse_new(sock: socket.socket) -> bool:
    """Have the kernel ignore whoever wants to connect: their systems ask again, and are refused
    once the socket is closed. Those that have begun to connect may end it.

    Returns:
        False where the system can't do that; a connection that is made between the last look and
        the socket's end is then reset.
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
