"""A time limit for calls into foreign code."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from threading import Lock, Thread
from typing import Generic, TypeVar

from .fault_origins import place_of
from .prepare import PolicyTimeoutError

T = TypeVar("T")

_STOP_S = 0.1
"""Seconds given to a call after it is asked to stop."""


class _StoppedError(BaseException):
    """Raised inside a call that takes too long; no ``except Exception`` holds it back."""


class TimeLimit:
    """Runs calls in their own threads and abandons those that take too long.

    A call that hangs in Python code is stopped. A call that hangs elsewhere (a regular expression,
    a foreign library) can't be: its thread remains. While a tenant has ``max_stuck`` such threads,
    it gets no further call. While all tenants together have ``max_in_all``, no tenant that has any
    gets one, so no tenant's calls depend on the others.
    """

    def __init__(self, seconds: float, *, max_stuck: int = 4, max_in_all: int = 32) -> None:
        self._seconds = seconds
        self._max_stuck = max_stuck
        self._max_in_all = max_in_all
        self._stuck: Counter[str] = Counter()
        self._lock = Lock()

    def __call__(self, tenant: str, call: Callable[[], T]) -> T:
        """Return or raise the result of ``call``.

        Raises:
            PolicyTimeoutError: it took too long, or too many of the tenant's calls still hang.
        """
        if not self._may_call(tenant):
            raise PolicyTimeoutError("too many calls hang")
        running = _Call(call)
        running.thread.start()
        if not running.ends_in(self._seconds):
            place = place_of(running.thread.ident)
            self._leave(tenant, running)
            raise PolicyTimeoutError("the call takes too long", place)
        return running.result()

    def _may_call(self, tenant: str) -> bool:
        with self._lock:
            own = self._stuck[tenant]  # looking adds nothing to a counter
            return own == 0 or (own < self._max_stuck and self._stuck.total() < self._max_in_all)

    def _leave(self, tenant: str, running: _Call[T]) -> None:
        running.stop()
        if running.ends_in(_STOP_S):
            return
        with self._lock:
            self._stuck[tenant] += 1
        Thread(target=self._await_end, args=(tenant, running), daemon=True).start()

    def _await_end(self, tenant: str, running: _Call[T]) -> None:
        running.thread.join()
        with self._lock:
            self._stuck[tenant] -= 1
            self._stuck += Counter()  # drop tenants without any


class _Call(Generic[T]):
    """One call and its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.thread = Thread(target=self._run, name="leyline-policy", daemon=True)
        self._call = call
        self._lock = Lock()
        self._runs = self._stopped = False
        self._value: list[T] = []
        self._error: BaseException | None = None

    def ends_in(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the thread; return True if it has ended."""
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def result(self) -> T:
        """Return the call's value, or raise its error.

        An error that would end more than the call becomes a RuntimeError.
        """
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"the call raised {type(self._error).__name__}") from self._error
        return self._value[0]

    def stop(self) -> None:
        """Interrupt the call, unless it has ended."""
        with self._lock:
            self._stopped = True
            # Another thread may have the number of one that has ended.
            if self._runs:
                _interrupt(self.thread, ctypes.py_object(_StoppedError))

    def _run(self) -> None:
        try:
            with self._lock:
                self._runs = not self._stopped
            if self._runs:
                self._called()
                self._end()
        except _StoppedError:  # arrived after the call, and arrives only once
            self._end()

    def _called(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # passed to the caller
            self._error = error

    def _end(self) -> None:
        with self._lock:
            self._runs = False
            # A pending exception must not reach code that the thread runs after this.
            _interrupt(self.thread, None)


def _interrupt(thread: Thread, error: ctypes.py_object[type[BaseException]] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), error)
