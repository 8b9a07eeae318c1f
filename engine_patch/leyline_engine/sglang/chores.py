"""Bookkeeping that no request waits for, in portions between the scheduler's steps.

All ranks of a replica take the same steps between the same requests, and a portion is measured in
tokens and entries, never in time; so they find the same content at the same request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from leyline_engine.scheduler.containment import contained

_PORTIONS = 2
"""Portions per step and worker, of a millisecond or less each."""


class Worker(Protocol):
    """Has work that can wait, which it does in order."""

    def work(self) -> bool:
        """Do a portion; returns False if there is none."""


class Chores:
    """The workers of one scheduler; none waits for another's work.

    Args:
        workers: those whose work is shared out.
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = tuple(workers)

    def step(self) -> bool:
        """Let each worker do its portions for this step; returns False if none had any."""
        worked = False
        for worker in self._workers:
            with contained("catching up on bookkeeping"):
                for _ in range(_PORTIONS):
                    if not worker.work():
                        break
                    worked = True
        return worked
