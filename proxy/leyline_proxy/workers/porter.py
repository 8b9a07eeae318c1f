"""The supervisor's end of the workers' doors: each new connection goes to the worker with the
fewest."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress

from ..http.handed import END

_RETRY_S = 0.02


class _Desk:
    """One worker's place."""

    def __init__(self) -> None:
        # Kept by the supervisor, too: what a killed worker hasn't taken is its successor's.
        self.inside, self.outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inside.setblocking(False)
        self.open = False
        self.connections = 0
        """Open connections, as the worker last counted them, and those given since."""


class Porter:
    """Gives connections to workers.

    Args:
        workers: number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._desks = [_Desk() for _ in range(workers)]
        self._opened = asyncio.Event()

    def file(self, worker: int) -> int:
        """Return the file descriptor that a worker inherits."""
        return self._desks[worker].outside.fileno()

    def open(self, worker: int) -> None:
        """Give a worker connections from now on."""
        self._desks[worker].open = True
        self._desks[worker].connections = 0
        self._opened.set()

    def close(self, worker: int) -> None:
        """Give a worker none for now."""
        self._desks[worker].open = False
        if not any(desk.open for desk in self._desks):
            self._opened.clear()

    def counted(self, worker: int, connections: int) -> None:
        """Take a worker's own number of open connections."""
        self._desks[worker].connections = connections

    async def give(self, port: int, sock: socket.socket) -> None:
        """Give a connection to a worker; wait while there is none that can take it."""
        with sock:
            while True:
                await self._opened.wait()
                for desk in self._by_load():
                    with suppress(OSError):  # full, or its worker has just gone
                        socket.send_fds(desk.inside, [bytes([port])], [sock.fileno()])
                        desk.connections += 1
                        return
                await asyncio.sleep(_RETRY_S)

    def end(self) -> None:
        """Tell all workers that no more will come."""
        for desk in self._desks:
            with suppress(OSError):
                desk.inside.send(bytes([END]))

    def aclose(self) -> None:
        """Close all sockets."""
        for desk in self._desks:
            desk.inside.close()
            desk.outside.close()

    def _by_load(self) -> Iterable[_Desk]:
        return sorted(
            (desk for desk in self._desks if desk.open), key=lambda desk: desk.connections
        )
