"""Another ASGI application's lifespan within this one's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message

_STOP_S = 30.0


@asynccontextmanager
async def lifespan_of(app: ASGIApp) -> AsyncIterator[None]:
    """Start ``app``, and stop it on exit.

    An application without a lifespan is left alone.

    Raises:
        RuntimeError: the application reports that it can't start.
    """
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    from_app: asyncio.Queue[Message] = asyncio.Queue()

    async def run() -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        try:
            await app(scope, to_app.get, from_app.put)
        except Exception as error:
            await from_app.put({"type": "failed", "message": type(error).__name__})
        else:
            await from_app.put({"type": "ended"})

    task = asyncio.create_task(run())
    await to_app.put({"type": "lifespan.startup"})
    answer = await from_app.get()
    if answer["type"] == "lifespan.startup.failed":
        await task
        raise RuntimeError(f"the embedded engine can't start: {answer.get('message', '')}")
    started = answer["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        if started:
            await to_app.put({"type": "lifespan.shutdown"})
        _, running = await asyncio.wait((task,), timeout=_STOP_S)
        for late in running:
            late.cancel()
            await asyncio.wait((late,))
