"""An instrument for a proxy's event loop: how long each callback holds it, in CPU time.

A wall clock would count what other processes do on a busy machine.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leyline_proxy.http.app import create_app
from leyline_proxy.http.server import ProxyServer, listening
from leyline_proxy.settings import Settings
from leyline_proxy.workers.serving import handshakes_of

TICK_S = 0.002
START_S = 60.0


@dataclass(frozen=True, order=True)
class Hold:
    """One callback, or one time in which a thread kept the loop from running."""

    cpu_s: float
    where: str
    """The code from which, and to which, it ran."""


@dataclass
class LoopHolds:
    """Holds of the loop of one thread."""

    callbacks: list[Hold] = field(default_factory=list)
    threads: list[Hold] = field(default_factory=list)
    """CPU time of other threads between two chances of the loop: they held the interpreter, or ran
    code that doesn't need it."""

    def clear(self) -> None:
        """Forget what was measured."""
        self.callbacks.clear()
        self.threads.clear()

    @property
    def longest(self) -> Hold:
        """The longest hold by a callback."""
        return max(self.callbacks)

    @property
    def longest_thread(self) -> Hold:
        """The longest hold by threads."""
        return max(self.threads)


def _place(awaited: Any) -> str:
    """The innermost code of the proxy at which a coroutine is suspended, or was."""
    found = "?"
    while awaited is not None:
        frame = (
            getattr(awaited, "cr_frame", None)
            or getattr(awaited, "ag_frame", None)
            or getattr(awaited, "gi_frame", None)
        )
        if frame is not None and "leyline" in frame.f_code.co_filename:
            name = Path(frame.f_code.co_filename).name
            found = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        awaited = (
            getattr(awaited, "cr_await", None)
            or getattr(awaited, "ag_await", None)
            or getattr(awaited, "gi_yieldfrom", None)
        )
    return found


def _coroutine_of(callback: Any) -> Awaitable[Any] | None:
    task = getattr(callback, "__self__", None)
    return task.get_coro() if isinstance(task, asyncio.Task) else None


@contextmanager
def watched_loop(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> Iterator[LoopHolds]:
    """Measure the callbacks of a loop that runs in ``thread``: one of asyncio's own."""
    holds, plain = LoopHolds(), asyncio.Handle._run
    stopped = threading.Event()
    last = [0.0, 0.0]

    def run(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread.ident:
            plain(handle)
            return
        callback = handle._callback  # type: ignore[attr-defined]
        coroutine = _coroutine_of(callback)
        # A callback's repr may have effects.
        name = getattr(callback, "__qualname__", type(callback).__name__)
        begun_at = _place(coroutine) if coroutine is not None else name
        begun = time.thread_time()
        plain(handle)
        cpu_s = time.thread_time() - begun
        ended_at = _place(coroutine) if coroutine is not None else ""
        holds.callbacks.append(Hold(cpu_s, f"{begun_at} -> {ended_at}"))

    def tick() -> None:
        own, whole = time.thread_time(), time.process_time()
        if last[1]:
            holds.threads.append(Hold((whole - last[1]) - (own - last[0]), "threads"))
        last[:] = own, whole
        if not stopped.is_set():
            loop.call_later(TICK_S, tick)

    asyncio.Handle._run = run  # type: ignore[method-assign]
    loop.call_soon_threadsafe(tick)
    try:
        yield holds
    finally:
        stopped.set()
        asyncio.Handle._run = plain  # type: ignore[method-assign]


@contextmanager
def watched_proxy(**settings: Any) -> Iterator[tuple[str, LoopHolds]]:
    """The origin of a proxy that runs as by ``leyline serve``, in a thread, and what holds its
    loop."""
    given = Settings(handshake_retry_s=0.05, shutdown_grace_s=5, loop="asyncio", **settings)
    app = create_app(given)
    services = app.state.services
    listener = socket.create_server(("127.0.0.1", 0))
    server = ProxyServer(
        app, given, services.shutdown, door=listening(listener), handshakes=handshakes_of(services)
    )
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        deadline = time.monotonic() + START_S
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with watched_loop(thread, loops[0]) as holds:
            yield "http://{}:{}".format(*listener.getsockname()), holds
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        listener.close()
