"""A real proxy with the real embedded engine on a loopback port, for tests end to end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp
from support.engine_http import check_clean

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

START_S = 120.0


@contextmanager
def serving(app: ASGIApp, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve ``app`` with uvicorn in a thread; yields its origin once it is ready.

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


@contextmanager
def embedded_stack(engine_options: dict[str, Any], **settings: Any) -> Iterator[str]:
    """The origin of a proxy that splices."""
    engine = create_embedded_engine("replay", engine_options)
    with serving(create_app(Settings(**settings), engine_app=engine)) as origin:
        ready = httpx.get(f"{origin}/readyz", timeout=10).json()
        assert ready["upstreams"][0]["splices"], ready
        yield origin
    check_clean(engine)
