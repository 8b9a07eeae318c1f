"""Signs of life to a client whose answer takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Sign = Callable[[], Awaitable[None]]

FIRST_SIGN_S = 1.0
"""Time in which most errors come; before the first sign they have a status of their own."""
SIGN_S = 10.0


async def signing(work: Coroutine[Any, Any, T], sign: Sign | None) -> T:
    """Return the result of ``work``, and call ``sign`` now and then until it is there."""
    task = asyncio.ensure_future(work)
    pause_s = FIRST_SIGN_S if sign is not None else None
    try:
        while not (await asyncio.wait((task,), timeout=pause_s))[0]:
            if sign is not None:
                await sign()
            pause_s = SIGN_S
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
