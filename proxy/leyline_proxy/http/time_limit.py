"""The time limit of a whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..errors import UpstreamTimeoutError

T = TypeVar("T")


async def within(limit_s: float | None, work: Coroutine[Any, Any, T], *, spent_s: float = 0) -> T:
    """Return the result of ``work``; cancel it if it takes longer than ``limit_s``.

    Args:
        spent_s: time that other work on the same answer took.

    Raises:
        UpstreamTimeoutError: it took longer.
    """
    try:
        async with asyncio.timeout(limit_s and max(0.0, limit_s - spent_s)):
            return await work
    except TimeoutError as error:
        raise UpstreamTimeoutError(
            f"The whole answer took longer than {limit_s} s.", code="upstream_total"
        ) from error
