"""Waiting for what happens beside a test: in tasks, threads and servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

PAUSE_S = 0.01


async def until(condition: Callable[[], Any | Awaitable[Any]], seconds: float = 20.0) -> None:
    """Let other tasks run until the condition, or what it awaits, holds.

    Raises:
        AssertionError: it doesn't in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(PAUSE_S)


def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Block until the condition holds.

    Raises:
        AssertionError: it doesn't in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(PAUSE_S)
