"""An application on a loopback port, served from a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

START_S = 120.0


@contextmanager
def serving(app: ASGIApp, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve ``app`` with uvicorn, and yield its origin once it is ready.

    Args:
        options: of uvicorn, such as its files for TLS.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        deadline = time.monotonic() + START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.02)
        scheme = "https" if config.is_ssl else "http"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def check_clean(app: Starlette) -> None:
    """Check that in a replay engine nothing runs, every slot is accounted for, nothing failed."""
    engine = app.state.service._engine
    engine.check_integrity()
    assert engine.stats().in_flight == 0
    assert app.state.service.failure is None


def engine_tokenizer(app: Starlette) -> Any:
    """Return the tokenizer that a replay engine uses."""
    return app.state.service._decode.__self__._tokenizer
