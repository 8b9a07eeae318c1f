"""Proof that work grows as its input does: CPU time of one thread, at two sizes."""

from __future__ import annotations

import time
from collections.abc import Callable

FACTOR, MOST = 8, 24
"""Eight times the input costs eight times the time; a quadratic loop takes 64 times as long."""


def check_linear(work_on: Callable[[int], Callable[[], object]], size: int) -> None:
    """Check that work on eight times ``size`` takes less than 24 times as long.

    Args:
        work_on: prepares the work for a size, which isn't measured.
    """
    small, large = _seconds(work_on(size)), _seconds(work_on(FACTOR * size))
    assert large < MOST * small, f"{FACTOR} times the input takes {large / small:.0f} times as long"


def _seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        begun = time.thread_time()
        work()
        best = min(best, time.thread_time() - begun)
    return best
