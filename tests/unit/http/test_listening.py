"""Taking connections, and closing a listening socket, on real sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, cast

import pytest
import uvloop

from leyline_proxy.http import listening
from leyline_proxy.http.listening import Listener

CLIENTS = 60
LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


class Echo(asyncio.Protocol):
    """Sends back what comes; counts those made."""

    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """One more."""
        type(self).made += 1
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Send it back, and close."""
        transport = cast(asyncio.Transport, self._transport)
        transport.write(data)
        transport.close()


@pytest.fixture
def echo() -> type[Echo]:
    """A protocol with a count of its own."""
    return type("Counted", (Echo,), {})


def run(loop: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` on a loop of this kind."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(work())


def bound() -> socket.socket:
    """A socket to listen on."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def connected(stack: ExitStack, sock: socket.socket) -> list[socket.socket]:
    """Clients whose connections the kernel has made; none was taken, as the loop is idle."""
    address = sock.getsockname()
    return [
        stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(CLIENTS)
    ]


def listener_of(sock: socket.socket, echo: type[Echo], backlog: int) -> Listener:
    """A listener that gives each connection its own echo."""

    async def connect(client: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(echo, client)

    return Listener(sock, connect, backlog)


@pytest.mark.parametrize("loop", LOOPS)
def test_connections_are_taken_together(loop: str, echo: type[Echo]) -> None:
    """A crowd waits for a few turns of the loop, not for a turn each."""

    async def work() -> None:
        sock = bound()
        listener = listener_of(sock, echo, 256)
        listener.start()
        with ExitStack() as stack:
            connected(stack, sock)
            turns = 0
            while echo.made < CLIENTS and turns < CLIENTS:
                await asyncio.sleep(0)
                turns += 1
            assert turns < 10
        await listener.close()
        await asyncio.sleep(0.05)  # until the connections' ends were noticed

    run(loop, work)


@pytest.mark.parametrize("loop", LOOPS)
def test_who_has_connected_is_served_when_listening_ends(loop: str, echo: type[Echo]) -> None:
    """Connections that the kernel made before are taken and none is reset; later ones are refused,
    those included that ask while the last are taken."""

    async def work() -> None:
        sock = bound()
        address = sock.getsockname()
        listener = listener_of(sock, echo, 256)
        listener.start()
        with ExitStack() as stack:
            clients = connected(stack, sock)
            for client in clients:
                client.sendall(b"x")
            closing = asyncio.create_task(listener.close())
            await asyncio.sleep(0)
            late = asyncio.create_task(asyncio.open_connection(*address))
            await closing
            found = await asyncio.gather(*(asyncio.to_thread(each.recv, 9) for each in clients))
        assert found == [b"x"] * CLIENTS
        with pytest.raises(ConnectionRefusedError):
            await late

    run(loop, work)


class Full(socket.socket):
    """Listens in a process that has too many files open, once."""

    full = True

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept as the kernel does."""
        if self.full:
            self.full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_too_many_files_are_waited_out(echo: type[Echo], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop doesn't spin meanwhile, and connections are taken again."""
    monkeypatch.setattr(listening, "_RETRY_S", 0.2)

    async def work() -> None:
        sock = Full()
        sock.bind(("127.0.0.1", 0))
        listener = listener_of(sock, echo, 8)
        listener.start()
        with socket.create_connection(sock.getsockname(), timeout=5):
            await asyncio.sleep(0.1)
            assert (sock.full, echo.made) == (False, 0)
            for _ in range(200):
                await asyncio.sleep(0 if echo.made else 0.02)
            assert echo.made == 1
        await listener.close()
        await asyncio.sleep(0.05)

    run("asyncio", work)
