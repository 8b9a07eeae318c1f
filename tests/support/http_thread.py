"""An ASGI application on a loopback port, served by a thread, for clients that block."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


class ThreadServer:
    """A running server.

    Args:
        app: an ASGI application.
        port: to listen on; by default a free one.
    """

    def __init__(self, app: Any, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, lifespan="off", log_level="critical", loop="asyncio")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def kill(self) -> None:
        """Break off every answer, and listen no more. Call it from any thread."""
        self._server.force_exit = True
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until it is gone."""
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[ThreadServer]:
    """The application while the block runs."""
    server = ThreadServer(app, port)
    try:
        yield server
    finally:
        server.kill()
        server.join()
