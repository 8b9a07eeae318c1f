"""A clock over a scheduler's steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """CPU time of the scheduler's thread, without the time for rows."""

    def __init__(self) -> None:
        self.rows_ns = 0
        self.part_ns: Counter[str] = Counter()
        """By part of a step."""
        self.step_ns: list[int] = []
        """Of each step of the scheduler."""
        self._before_ns = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count a part of the present step."""
        began = self._now_ns()
        yield
        self.part_ns[name] += self._now_ns() - began

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a step, with what came before it since the last."""
        began = self._now_ns() - self._before_ns
        yield
        self.step_ns.append(self._now_ns() - began)
        self._before_ns = 0

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Count towards the next step."""
        began = self._now_ns()
        yield
        self._before_ns += self._now_ns() - began

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Leave out what touches rows."""
        began, before = time.thread_time_ns(), self.rows_ns
        yield
        # One that lies in another counts once.
        self.rows_ns = before + time.thread_time_ns() - began

    def without(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that isn't counted: all of it is work on the device's tensors."""

        def uncounted() -> None:
            with self.rows():
                call()

        return uncounted

    def _now_ns(self) -> int:
        return time.thread_time_ns() - self.rows_ns

    def clear(self) -> None:
        """Begin again."""
        self.part_ns.clear()
        self.step_ns.clear()
